// The timeline: above, tokens a second and the running and waiting requests; below, a row per request.

import { DECODE, PREEMPTED, PREFILL, QUEUED } from "./engine.js";
import { count, seconds } from "./numbers.js";

const LANE = 46; // height of the lane of rates
const LOAD = 30; // and of the lane of running and waiting
const GAP = 10;
const RANK = 9; // height of a rank's lane
const MAX_RANKS = 16; // shown
const AXIS = 18;
const MAX_ROW = 18;
const MIN_ROW = 3;
const BIN = 3; // pixels of one column of rates

/** Prepares a canvas for sharp drawing in CSS pixels; returns its context and its size. */
export function prepare(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A pattern of slanted lines, to distinguish kinds without colour. */
export function hatch(context, colour, isDense = false) {
  const size = isDense ? 4 : 6;
  const tile = new OffscreenCanvas(size * 2, size * 2);
  const pen = tile.getContext("2d");
  pen.scale(2, 2);
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift, size);
    pen.lineTo(shift + size, 0);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

export class Timeline {
  /** colours  () → {queued, prefill, decode, preempted, ink, muted, line, ground} */
  constructor(canvas, model, colours) {
    this.canvas = canvas;
    this.model = model;
    this.colours = colours;
    this.spanS = 15;
    this.rows = []; // [{request, top, height}], as last drawn
  }

  /** Draws the last `spanS` seconds before `nowS`. Returns whether anything is still moving. */
  draw(nowS) {
    const { context, width, height } = prepare(this.canvas);
    if (width === 0) return false;
    const gutter = 76;
    const fromS = nowS - this.spanS;
    const scale = (width - gutter - 8) / this.spanS;
    this.context = context;
    this.palette = this.colours();
    this.left = gutter;
    this.right = width - 8;
    this.x = (timeS) => gutter + (timeS - fromS) * scale;
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    context.textBaseline = "middle";
    this.#axis(nowS, height);
    const hasSteps = this.#lanes(fromS, nowS);
    const top = LANE + LOAD + GAP * 2 + this.#ranks(fromS, nowS, LANE + LOAD + GAP * 2);
    const hasRows = this.#rows(fromS, nowS, top, height - AXIS - top);
    return hasSteps || hasRows;
  }

  #axis(nowS, height) {
    const { context, palette } = this;
    const step = this.spanS <= 5 ? 1 : this.spanS <= 15 ? 3 : 15;
    context.textAlign = "center";
    for (let ago = 0; ago <= this.spanS; ago += step) {
      const x = Math.round(this.x(nowS - ago)) - 0.5;
      context.fillStyle = palette.line;
      context.fillRect(x, 0, 1, height - AXIS + 3);
      context.fillStyle = palette.muted;
      context.textAlign = ago === 0 ? "right" : "center";
      if (x > this.left - 20) context.fillText(ago === 0 ? "now" : `−${ago} s`, ago === 0 ? x + 8 : x, height - 7);
    }
  }

  /** The two lanes above the rows: generated tokens a second; running and waiting. */
  #lanes(fromS, nowS) {
    const { context, palette, model } = this;
    const { columns } = model.steps;
    const numBins = Math.max(1, Math.floor((this.right - this.left) / BIN));
    const tokens = new Float64Array(numBins);
    const running = new Float64Array(numBins);
    const waiting = new Float64Array(numBins);
    const binS = this.spanS / numBins;
    let isAny = false;
    for (const at of model.steps.latest()) {
      const start = columns.start[at];
      const end = Math.max(columns.end[at], start + 1e-6);
      if (end < fromS) break;
      if (start > nowS) continue;
      isAny = true;
      const first = Math.max(0, Math.floor((start - fromS) / binS));
      const last = Math.min(numBins - 1, Math.floor((end - fromS) / binS));
      const rate = columns.decode[at] / (end - start);
      for (let bin = first; bin <= last; bin += 1) {
        const inside = Math.min(end, fromS + (bin + 1) * binS) - Math.max(start, fromS + bin * binS);
        tokens[bin] += (rate * Math.max(0, inside)) / binS;
        running[bin] = Math.max(running[bin], columns.running[at]);
        waiting[bin] = Math.max(waiting[bin], columns.waiting[at]);
      }
    }
    const smooth = tokens.map((value, bin) => (value + (tokens[bin - 1] ?? value) + (tokens[bin + 1] ?? value)) / 3);
    const most = niceCeiling(Math.max(...smooth));
    this.#lane(smooth, most, 0, LANE, palette.decode, "tokens/s");
    const load = niceCeiling(Math.max(...running.map((value, bin) => value + waiting[bin])));
    const top = LANE + GAP;
    this.#lane(running, load, top, LOAD, palette.decode, "requests", 0.45);
    context.fillStyle = hatch(context, palette.queued, true);
    for (let bin = 0; bin < numBins; bin += 1) {
      const low = (running[bin] / load) * LOAD;
      const high = (waiting[bin] / load) * LOAD;
      if (high > 0) context.fillRect(this.left + bin * BIN, top + LOAD - low - high, BIN, high);
    }
    return isAny;
  }

  /** Lanes of ranks: when each computed, hatched where it waited for another stage. Returns their height. */
  #ranks(fromS, nowS, top) {
    const { context, palette, model } = this;
    const names = model.rankNames.slice(0, MAX_RANKS);
    if (!names.length) return 0;
    context.textAlign = "right";
    names.forEach((name, lane) => {
      const y = top + lane * RANK;
      context.fillStyle = palette.muted;
      context.fillText(name, this.left - 6, y + RANK / 2);
      context.fillStyle = palette.line;
      context.fillRect(this.left, y + RANK - 1, this.right - this.left, 1);
    });
    const waits = hatch(context, palette.queued, true);
    const { columns } = model.rankSteps;
    for (const at of model.rankSteps.latest()) {
      if (columns.end[at] < fromS - 2) break; // ranks' steps come nearly in their order
      if (columns.end[at] < fromS || columns.start[at] > nowS || columns.lane[at] >= names.length) continue;
      const y = top + columns.lane[at] * RANK;
      const left = Math.max(this.left, this.x(columns.start[at]));
      const right = Math.min(this.right, this.x(columns.end[at]));
      const begin = Math.min(right, Math.max(left, this.x(columns.start[at] + columns.waited[at])));
      context.fillStyle = waits;
      context.fillRect(left, y + 1, begin - left, RANK - 3);
      context.fillStyle = palette.decode;
      context.fillRect(begin, y + 1, right - begin, RANK - 3);
    }
    return names.length * RANK + GAP;
  }

  #lane(values, most, top, height, colour, unit, alpha = 0.9) {
    const { context, palette } = this;
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    values.forEach((value, bin) => {
      const tall = (value / most) * height;
      if (tall > 0) context.fillRect(this.left + bin * BIN, top + height - tall, BIN - (alpha < 0.9 ? 0 : 0.6), tall);
    });
    context.globalAlpha = 1;
    context.fillStyle = palette.line;
    context.fillRect(this.left, top + height, this.right - this.left, 1);
    context.fillStyle = palette.muted;
    context.textAlign = "right";
    context.fillText(count(most), this.left - 6, top + 6);
    context.fillText(unit, this.left - 6, top + height - 6);
  }

  #rows(fromS, nowS, top, room) {
    const { model } = this;
    let shown = [...model.requests.values()].filter(
      (request) => (request.state !== "done" || request.lastS > fromS) && request.arrivalS < nowS,
    );
    const most = Math.floor(room / MIN_ROW);
    const numHidden = Math.max(0, shown.length - most);
    if (numHidden) shown = shown.slice(numHidden);
    const height = Math.max(MIN_ROW, Math.min(MAX_ROW, Math.floor(room / Math.max(1, shown.length))));
    this.rows = shown.map((request, at) => ({ request, top: top + at * height, height }));
    const bySerial = new Map(this.rows.map((row) => [row.request.serial, row]));
    this.#labels(height);
    this.#bars(bySerial, fromS, nowS);
    this.#preemptions(nowS, height);
    this.numHidden = numHidden;
    return shown.length > 0;
  }

  #labels(height) {
    const { context, palette } = this;
    context.textAlign = "right";
    const every = Math.ceil(13 / height);
    this.rows.forEach(({ request, top }, at) => {
      if (at % every) return;
      context.fillStyle = request.isMine ? palette.ink : palette.muted;
      context.fillText(request.isMine ? "this page" : request.label, this.left - 6, top + height / 2);
    });
  }

  #bars(bySerial, fromS, nowS) {
    const { context, palette, model } = this;
    const { columns } = model.spans;
    const queued = hatch(context, palette.queued, true);
    const preempted = hatch(context, palette.preempted);
    const places = [];
    for (const at of model.spans.latest()) {
      if (columns.end[at] < fromS - 2 && columns.kind[at] === DECODE) break; // long spans may lie below short ones
      places.push(at);
    }
    for (const at of places.reverse()) {
      const row = bySerial.get(columns.serial[at]);
      if (!row || columns.end[at] < fromS) continue;
      const left = Math.max(this.left, Math.round(this.x(columns.start[at]))); // whole pixels: sharp edges
      const right = Math.min(this.right, Math.round(this.x(columns.end[at])));
      if (right < left || columns.start[at] > nowS) continue;
      const width = Math.max(1, right - left);
      const { top, height } = row;
      const inset = height >= 8 ? 2 : height >= 5 ? 1 : 0;
      switch (columns.kind[at]) {
        case PREFILL:
          context.fillStyle = palette.prefill;
          context.fillRect(left, top + inset, Math.max(2, width - (width > 4 ? 1 : 0)), height - inset * 2);
          if (width > 34 && height >= 13) {
            context.fillStyle = palette.ground;
            context.textAlign = "left";
            context.fillText(String(columns.count[at]), left + 5, top + height / 2 + 0.5);
          }
          break;
        case DECODE: {
          const thin = height >= 8 ? Math.round(height * 0.28) : inset;
          context.fillStyle = palette.decode;
          context.fillRect(left, top + thin, width - (width > 5 ? 0.7 : 0), height - thin * 2);
          break;
        }
        case QUEUED:
          context.fillStyle = queued;
          context.fillRect(left, top + inset + 1, width, height - inset * 2 - 2 || 1);
          break;
        case PREEMPTED:
          context.fillStyle = preempted;
          context.fillRect(left, top + inset, width, height - inset * 2);
          break;
      }
    }
  }

  /** A cross where a request was preempted, and its wait since then. */
  #preemptions(nowS, height) {
    const { context, palette } = this;
    const size = Math.max(2, Math.min(5, height / 2 - 2));
    for (const { request, top } of this.rows) {
      if (request.state === "preempted") {
        const left = Math.max(this.left, this.x(request.preempted.at(-1)));
        context.fillStyle = hatch(context, palette.preempted);
        context.fillRect(left, top + 2, Math.max(0, this.x(nowS) - left), Math.max(1, height - 4));
      }
      for (const timeS of request.preempted) {
        const x = this.x(timeS);
        if (x < this.left || x > this.right) continue;
        const y = top + height / 2;
        for (const [colour, lineWidth] of [[palette.ground, 4], [palette.preempted, 2]]) {
          context.strokeStyle = colour;
          context.lineWidth = lineWidth;
          context.beginPath();
          context.moveTo(x - size, y - size);
          context.lineTo(x + size, y + size);
          context.moveTo(x + size, y - size);
          context.lineTo(x - size, y + size);
          context.stroke();
        }
      }
    }
  }

  /** A description of this place, or null. */
  describe(x, y) {
    const row = this.rows.find(({ top, height }) => y >= top && y < top + height);
    if (!row) return null;
    const { request } = row;
    const lines = [
      `${request.id}${request.index ? ` · choice ${request.index}` : ""}`,
      `${request.numPrompt} prompt tokens, ${request.generated} generated, ${request.state}`,
    ];
    if (request.miss) lines.push(missed(request.miss, request.numPrompt));
    const queued = request.beginS - request.arrivalS;
    if (queued > 0.001) lines.push(`waited ${seconds(queued)}`);
    if (request.firstTokenS !== null) lines.push(`first token after ${seconds(request.firstTokenS - request.arrivalS)}`);
    return lines;
  }
}

/** Why no more of a prompt was in the prefix cache. */
function missed({ reason, first_difference: firstDifference, checkpoint: numCached }, numPrompt) {
  const why = {
    unseen: `token ${firstDifference} and on are new`,
    evicted: `what follows token ${numCached} was evicted`,
    no_checkpoint: `no state was kept after token ${numCached}, and the prompts differ from ${firstDifference} on`,
    prompt_logprobs: "log probabilities of the prompt were asked for",
  }[reason];
  return `reused ${numCached} of ${numPrompt} prompt tokens: ${why}`;
}

/** 1, 2 or 5 times a power of ten, at least `value`. */
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}
