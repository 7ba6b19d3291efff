// The page's model of the engine: the live messages, kept as far back as the timeline reaches.
//
// Spans (a choice's piece of a prompt, or a run of its decodes) and steps lie in rings of typed arrays, requests in a
// map of bounded size, so memory does not grow with time.

import { totals } from "./blocks.js";

const MAX_SPANS = 1 << 15;
const MAX_STEPS = 1 << 13;
const MAX_RANK_STEPS = 1 << 15;
const MAX_REQUESTS = 1024;
const MAX_MINE = 64;

export const KEPT_S = 65;
const JOINED_S = 0.1; // decodes that follow each other make one span up to this length
const RATE_S = 2; // rates are means over this time

export const QUEUED = 0;
export const PREFILL = 1;
export const DECODE = 2;
export const PREEMPTED = 3;

/** A ring of records, each a number in every column. */
export class Ring {
  constructor(capacity, columns) {
    this.capacity = capacity;
    this.columns = Object.fromEntries(columns.map((name) => [name, new Float64Array(capacity)]));
    this.end = 0; // of all records ever; the latest `size` are kept
    this.size = 0;
  }

  push(record) {
    const at = this.end % this.capacity;
    for (const name in this.columns) this.columns[name][at] = record[name];
    this.end += 1;
    this.size = Math.min(this.size + 1, this.capacity);
    return this.end - 1;
  }

  /** Places of the records, the latest first. */
  *latest() {
    for (let number = this.end - 1; number >= this.end - this.size; number -= 1) yield number % this.capacity;
  }

  has(number) {
    return number >= this.end - this.size;
  }
}

export class EngineModel {
  constructor() {
    this.mine = new Set();
    this.clear();
  }

  /** Clears everything: another engine, or a gap in the messages. */
  clear() {
    this.spans = new Ring(MAX_SPANS, ["serial", "kind", "start", "end", "count"]);
    this.steps = new Ring(MAX_STEPS, ["start", "end", "prefill", "decode", "running", "waiting"]);
    this.rankSteps = new Ring(MAX_RANK_STEPS, ["lane", "start", "end", "waited"]); // of engines of several ranks
    this.requests = new Map(); // by "id index", in the order of arrival
    this.info = null;
    this.stats = null;
    this.state = "connecting";
    this.blockMap = null;
    this.engines = []; // of several: {state, stats} of each
    this.maps = [];
    this.numMissed = 0;
    this.numSteps = 0;
    this.nowS = 0;
    this.clockOffsetS = -Infinity; // the server's clock less ours, by the fastest message
    this.serial = 0;
  }

  /** Marks the requests of this page. */
  addMine(id) {
    this.mine.add(id);
    if (this.mine.size > MAX_MINE) this.mine.delete(this.mine.values().next().value);
    for (const request of this.requests.values()) request.isMine ||= request.id.startsWith(id);
  }

  /** The server's time, by our clock. */
  get estimatedNowS() {
    return performance.now() / 1000 + this.clockOffsetS;
  }

  /** Takes in one message of `/live`. */
  take(message) {
    if (message.now_s < this.nowS) this.clear(); // another machine's clock: old data is not comparable
    this.nowS = message.now_s;
    this.clockOffsetS = Math.max(this.clockOffsetS, message.now_s - performance.now() / 1000);
    this.info = message.info;
    this.stats = message.stats;
    this.state = message.state;
    this.engines = message.engines ?? [];
    this.engines.forEach(({ stats }, number) => stats || delete this.maps[number]);
    this.numMissed += message.num_missed;
    for (const step of message.steps) this.#takeStep(step);
    this.#settle();
    this.#forget();
    if (this.stats) this.#settleBlocks(this.stats);
  }

  /** The map is sent only with steps. Before the first and after the last, it is made from the counts. */
  #settleBlocks(stats) {
    const held = stats.num_blocks - stats.num_free_blocks;
    if (this.blockMap === null) this.blockMap = countsOf(stats);
    else if (held === 0) this.blockMap = this.blockMap.replace(/[uws]/g, stats.num_cached_blocks ? "c" : "f");
  }

  /** A map of all engines' blocks, one after the other; from the counts for engines without a map. */
  #takeMap(engine, map) {
    this.maps[engine] = map;
    if (!this.engines.length) {
      this.blockMap = map;
      return;
    }
    this.blockMap = this.engines.map(({ stats }, number) => this.maps[number] ?? (stats ? countsOf(stats) : "")).join("");
  }

  get blockTotals() {
    return totals(this.blockMap ?? "");
  }

  #takeStep(step) {
    const end = step.start_s + step.duration_s;
    let prefill = 0;
    let decode = 0;
    for (const chunk of step.chunks) {
      const isDecode = chunk.start >= chunk.num_prompt_tokens;
      if (isDecode) decode += chunk.count;
      else prefill += chunk.count;
      // the step that ends a prompt also samples the first token
      if (!isDecode && chunk.start + chunk.count >= chunk.num_prompt_tokens) decode += 1;
      this.#takeChunk(chunk, isDecode, step, end);
    }
    for (const id of step.preempted) {
      for (const request of this.requests.values()) {
        if (request.id === id && request.state === "running" && request.lastStep < step.step) {
          request.state = "preempted";
          request.preempted.push(end);
          if (request.preempted.length > 8) request.preempted.shift();
        }
      }
    }
    this.numSteps += 1;
    this.lastStep = step.step;
    this.steps.push({
      start: step.start_s,
      end,
      prefill,
      decode,
      running: step.num_running,
      waiting: step.num_waiting,
    });
    const engine = step.engine ?? 0;
    for (const span of step.ranks ?? []) {
      const lane = engine * this.numRanks + span.rank;
      this.rankSteps.push({ lane, start: span.start_s, end: span.start_s + span.duration_s, waited: span.waited_s });
    }
    if (step.block_map !== null) this.#takeMap(engine, step.block_map);
  }

  /** Ranks of an engine; 0 if its model is not split. */
  get numRanks() {
    return this.info?.rank_stages?.length ?? 0;
  }

  /** A name for each rank of each engine, in the order of lanes. */
  get rankNames() {
    const stages = this.info?.rank_stages ?? [];
    const isStaged = new Set(stages).size > 1;
    const numEngines = Math.max(1, this.engines.length);
    return Array.from({ length: numEngines * stages.length }, (_, lane) => {
      const rank = lane % stages.length;
      const name = isStaged ? `${rank}, stage ${stages[rank]}` : `rank ${rank}`;
      return numEngines > 1 ? `${Math.floor(lane / stages.length)}/${name}` : name;
    });
  }

  #takeChunk(chunk, isDecode, step, end) {
    const key = `${chunk.request_id} ${chunk.index}`;
    let request = this.requests.get(key);
    if (!request) {
      request = this.#newRequest(chunk, step.start_s);
      this.requests.set(key, request);
    }
    if (request.state === "preempted") {
      this.#addSpan(request, PREEMPTED, request.preempted.at(-1), step.start_s, 0);
    }
    request.state = "running";
    request.lastStep = step.step;
    request.lastS = end;
    if (isDecode) {
      request.generated = chunk.start + chunk.count - chunk.num_prompt_tokens + 1;
      if (this.#extend(request, chunk.count, step.start_s, end)) return;
    } else if (chunk.start + chunk.count >= chunk.num_prompt_tokens && request.generated === 0) {
      request.generated = 1;
      request.firstTokenS = end;
    }
    this.#addSpan(request, isDecode ? DECODE : PREFILL, step.start_s, end, chunk.count);
  }

  #newRequest(chunk, startS) {
    const request = {
      id: chunk.request_id,
      index: chunk.index,
      serial: this.serial++,
      label: labelOf(chunk.request_id, chunk.index),
      isMine: [...this.mine].some((id) => chunk.request_id.startsWith(id)),
      numPrompt: chunk.num_prompt_tokens,
      generated: Math.max(0, chunk.start + chunk.count - chunk.num_prompt_tokens),
      arrivalS: chunk.arrival_s || startS,
      firstTokenS: null,
      miss: chunk.miss ?? null,
      beginS: startS,
      lastS: startS,
      lastStep: -1,
      lastSpan: -1,
      state: "running",
      preempted: [],
    };
    if (startS - request.arrivalS > 0.001) this.#addSpan(request, QUEUED, request.arrivalS, startS, 0);
    return request;
  }

  #addSpan(request, kind, start, end, count) {
    request.lastSpan = this.spans.push({ serial: request.serial, kind, start, end, count });
  }

  #extend(request, count, start, end) {
    if (request.lastSpan < 0 || !this.spans.has(request.lastSpan)) return false;
    const at = request.lastSpan % this.spans.capacity;
    const { columns } = this.spans;
    const isNext = start - columns.end[at] < 0.002 && end - columns.start[at] <= JOINED_S;
    if (columns.kind[at] !== DECODE || !isNext) return false;
    columns.end[at] = end;
    columns.count[at] += count;
    return true;
  }

  /** Ends requests that are missing from several steps, or all once nothing runs. */
  #settle() {
    const { stats } = this;
    const isIdle = stats === null || (stats.num_running === 0 && stats.num_waiting === 0);
    for (const request of this.requests.values()) {
      if (request.state === "done") continue;
      const isLeftOut = request.state === "running" && this.lastStep - request.lastStep > 3;
      if (isLeftOut || (isIdle && this.nowS - request.lastS > 0.3)) request.state = "done";
    }
  }

  #forget() {
    for (const [key, request] of this.requests) {
      const isOld = request.state === "done" && request.lastS < this.nowS - KEPT_S;
      if (isOld || this.requests.size > MAX_REQUESTS) this.requests.delete(key);
    }
  }

  /** Tokens a second over the latest period: generated, prompt tokens, and the mean step. */
  rates() {
    const { columns } = this.steps;
    const since = this.estimatedNowS - RATE_S;
    let decode = 0;
    let prefill = 0;
    for (const at of this.steps.latest()) {
      if (columns.end[at] < since) break;
      decode += columns.decode[at];
      prefill += columns.prefill[at];
    }
    return { decode: decode / RATE_S, prefill: prefill / RATE_S };
  }
}

/** A short name: the end of the random part of "chatcmpl-3f9a…-0", with the choice if there are several. */
function labelOf(id, index) {
  const hex = /([0-9a-f]{6})[0-9a-f]*-(\d+)$/.exec(id);
  const name = hex ? hex[1] : id.slice(-8);
  return index ? `${name}·${index}` : name;
}

/** A map of an engine's blocks made from its counts. */
function countsOf(stats) {
  const cached = stats.num_cached_blocks;
  return `${stats.num_blocks - stats.num_free_blocks}u${cached}c${stats.num_free_blocks - cached}f`;
}
