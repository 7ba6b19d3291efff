// The live view: reads `/live` while it is visible, and draws the model of the engine.

import { getEvents } from "./api.js";
import { BlockMap } from "./blocks.js";
import { byId, h, reducesMotion, setIcon } from "./dom.js";
import { EngineModel } from "./engine.js";
import { count, rate, seconds } from "./numbers.js";
import { Timeline } from "./timeline.js";

const DELAY_S = 0.2; // the picture lags this much, so that late messages still arrive in time
const SLOW_FRAME_MS = 500; // between two pictures if the user prefers reduced motion
const MAX_RETRY_S = 10;
const NUM_TABLE_ROWS = 8;
const STATES = { ready: "running", draining: "draining", starting: "starting", down: "down", closing: "closing" };

export class Live {
  #controller = null;
  #frame = 0;
  #lastFrameMs = 0;
  #lastTilesMs = 0;
  #frozenS = null;
  #shownMap = null;
  #colours = new Map(); // by legend; until the theme changes

  /** failed  called with an `ApiFailure` that needs the user */
  constructor(failed) {
    this.failed = failed;
    this.model = new EngineModel();
    this.section = byId("live");
    this.timeline = new Timeline(byId("timeline"), this.model, () => this.#coloursOf("timeline-legend"));
    this.blocks = new BlockMap(byId("blocks"), () => this.#coloursOf("blocks-legend"));
    this.#wire();
  }

  #wire() {
    for (const button of byId("span").children) {
      button.addEventListener("click", () => {
        this.timeline.spanS = Number(button.dataset.seconds);
        for (const each of byId("span").children) each.setAttribute("aria-pressed", String(each === button));
        this.#wake();
      });
    }
    byId("freeze").addEventListener("click", (event) => {
      const button = event.currentTarget;
      this.#frozenS = this.#frozenS === null ? this.#nowS : null;
      const isFrozen = this.#frozenS !== null;
      button.setAttribute("aria-pressed", String(isFrozen));
      button.title = isFrozen ? "Go on" : "Freeze the picture";
      button.setAttribute("aria-label", button.title);
      setIcon(button, isFrozen ? "play" : "pause");
      this.#wake();
    });
    const canvas = byId("timeline");
    const tip = byId("timeline-tip");
    canvas.addEventListener("pointermove", (event) => {
      const lines = this.timeline.describe(event.offsetX, event.offsetY);
      tip.hidden = !lines;
      if (!lines) return;
      tip.replaceChildren(...lines.map((line) => h("div", {}, line)));
      const place = canvas.parentElement;
      tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, place.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${Math.min(event.offsetY + 16, place.clientHeight - tip.offsetHeight)}px`;
    });
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
    document.addEventListener("visibilitychange", () => this.#look());
    new ResizeObserver(() => this.redraw()).observe(this.section);
  }

  /** Shows or hides the view; `/live` is read only while it is visible. */
  set isShown(isShown) {
    this.section.hidden = !isShown;
    this.#look();
  }

  get isShown() {
    return !this.section.hidden;
  }

  #look() {
    const isSeen = this.isShown && document.visibilityState === "visible";
    if (isSeen && !this.#controller) this.#connect();
    if (!isSeen && this.#controller) this.disconnect();
  }

  /** Connects anew, with the key as it is now. */
  reconnect() {
    this.disconnect();
    this.#look();
  }

  disconnect() {
    this.#controller?.abort();
    this.#controller = null;
  }

  async #connect() {
    const controller = (this.#controller = new AbortController());
    let waitS = 0.5;
    while (!controller.signal.aborted) {
      try {
        this.#setState("connecting");
        for await (const message of getEvents("live", controller.signal)) {
          waitS = 0.5;
          this.model.take(message);
          this.#setState(STATES[message.state] ?? message.state);
          this.#wake();
        }
        this.#setState("disconnected");
      } catch (error) {
        if (controller.signal.aborted) return;
        this.#setState(error.code === "starting" ? "starting" : "disconnected");
        if (error.needsKey) {
          this.#controller = null;
          this.failed(error);
          return;
        }
        if (error.retryAfterS) waitS = error.retryAfterS;
      }
      await pause(waitS, controller.signal);
      waitS = Math.min(MAX_RETRY_S, waitS * 2);
    }
  }

  #setState(state) {
    const place = byId("live-state");
    if (place.textContent !== state) place.textContent = state;
    place.dataset.state = state;
  }

  get #nowS() {
    return this.#frozenS ?? this.model.estimatedNowS - DELAY_S;
  }

  /** Draws every frame until nothing moves. */
  #wake() {
    this.#frame ||= requestAnimationFrame((nowMs) => this.#draw(nowMs));
  }

  /** Draws all anew: another theme, another size. */
  redraw() {
    this.#shownMap = null;
    this.#colours.clear();
    this.#lastFrameMs = this.#lastTilesMs = 0;
    this.#wake();
  }

  /** The colours of a legend's swatches, and the panel's own: one place, the style sheet, decides. */
  #coloursOf(legend) {
    if (!this.#colours.has(legend)) {
      const panel = getComputedStyle(byId(legend).closest(".panel"));
      const found = {
        ink: panel.color,
        muted: getComputedStyle(byId("live-note")).color,
        line: panel.borderTopColor,
        ground: panel.backgroundColor,
      };
      for (const swatch of byId(legend).querySelectorAll("i")) {
        found[swatch.dataset.kind] = getComputedStyle(swatch).color;
      }
      this.#colours.set(legend, found);
    }
    return this.#colours.get(legend);
  }

  #draw(nowMs) {
    this.#frame = 0;
    if (!this.isShown || document.visibilityState !== "visible") return;
    let moves = true;
    if (!reducesMotion() || nowMs - this.#lastFrameMs >= SLOW_FRAME_MS || this.#lastFrameMs === 0) {
      this.#lastFrameMs = nowMs;
      moves = this.timeline.draw(this.#nowS) && this.#frozenS === null;
    }
    if (nowMs - this.#lastTilesMs > 250 || this.#lastTilesMs === 0) {
      this.#lastTilesMs = nowMs;
      this.#showNumbers();
      this.#showBlocks();
      this.#showRequests();
    }
    if (moves) this.#wake();
  }

  #showNumbers() {
    const { stats, info } = this.model;
    const { decode, prefill } = this.model.rates();
    tile("generated", rate(decode), "tokens/s");
    tile("prompts", rate(prefill), "tokens/s");
    tile("running", stats ? count(stats.num_running) : "–", info ? `of ${count(info.max_num_seqs)}` : "");
    tile("waiting", stats ? count(stats.num_waiting) : "–", "in queue");
    const held = stats && stats.num_blocks - stats.num_free_blocks;
    const share = stats ? `${Math.round((100 * held) / Math.max(1, stats.num_blocks))}%` : "–";
    tile("blocks", share, stats ? `${count(held)} of ${count(stats.num_blocks)}` : "");
    const hits = stats?.prefix_cache_queries ? Math.round((100 * stats.prefix_cache_hits) / stats.prefix_cache_queries) : null;
    tile("hits", hits === null ? "–" : `${hits}%`, "of prompts");
    const notes = [];
    const numbers = info?.quantization === "int8" ? `int8 weights, ${info.dtype} pages` : info?.dtype;
    if (info) notes.push(`${info.model} on ${info.device}, ${numbers}. Up to ${count(info.max_num_batched_tokens)} tokens a step.`);
    if (this.model.engines.length) notes.push(...this.model.engines.map(describeEngine));
    if (stats?.num_preemptions) notes.push(`${count(stats.num_preemptions)} preemptions so far.`);
    if (stats?.num_draft_tokens) {
      notes.push(`${count(stats.num_accepted_tokens)} of ${count(stats.num_draft_tokens)} proposed tokens were kept.`);
    }
    if (this.timeline.numHidden) notes.push(`${count(this.timeline.numHidden)} earlier requests are not shown.`);
    if (this.model.numMissed) notes.push(`${count(this.model.numMissed)} steps came too fast to be shown.`);
    byId("live-note").textContent = notes.join(" ");
    const shown = this.timeline.rows.length;
    byId("timeline").setAttribute(
      "aria-label",
      `Timeline of the last ${this.timeline.spanS} seconds: ${shown} requests, ${rate(decode)} tokens a second.`,
    );
  }

  #showBlocks() {
    const { blockMap, info } = this.model;
    if (blockMap === null || blockMap === this.#shownMap) return;
    this.#shownMap = blockMap;
    const perCell = this.blocks.draw(blockMap);
    const sums = this.model.blockTotals;
    for (const item of byId("blocks-legend").children) {
      item.querySelector("b").textContent = count(sums[item.querySelector("i").dataset.kind]);
    }
    const windows = info ? info.group_windows.filter((window) => window !== null) : [];
    byId("blocks-legend").querySelector('[data-kind="window"]').parentElement.hidden = !windows.length;
    const groups = windows.length
      ? ` of one of ${info.group_windows.length} groups of layers, ${windows.length} of which see the last ${count(Math.max(...windows))} only`
      : "";
    const size = info ? `A block holds ${info.block_size} tokens${groups}.` : "";
    byId("blocks-note").textContent = perCell > 1 ? `${size} Each cell is ${perCell} blocks, the fuller the more are taken.` : size;
    byId("blocks").setAttribute(
      "aria-label",
      `KV blocks: ${sums.used} used, ${windows.length ? `${sums.window} in windows, ` : ""}${sums.shared} shared, ${sums.cached} cached, ${sums.free} free.`,
    );
  }

  #showRequests() {
    const latest = [...this.model.requests.values()].slice(-NUM_TABLE_ROWS).reverse();
    const key = JSON.stringify(latest.map((r) => [r.serial, r.state, r.generated, r.firstTokenS, r.isMine]));
    if (key === this.tableKey) return;
    this.tableKey = key;
    const row = (request) =>
      h(
        "tr",
        { class: request.isMine ? "mine" : null },
        h("th", { scope: "row", title: request.id }, request.isMine ? "this page" : request.label),
        h("td", {}, h("span", { class: `dot ${request.state}` }), request.state),
        h("td", { class: "right" }, count(request.numPrompt)),
        h("td", { class: "right" }, count(request.generated)),
        h("td", { class: "right" }, request.firstTokenS === null ? "–" : seconds(request.firstTokenS - request.arrivalS)),
      );
    const empty = h("tr", {}, h("td", { colspan: "5", class: "empty" }, "No requests yet. Ask something, and watch."));
    byId("requests").replaceChildren(...(latest.length ? latest.map(row) : [empty]));
  }
}

function tile(name, value, unit) {
  const place = byId(`tile-${name}`);
  const text = `${value} ${unit}`;
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  place.replaceChildren(value, h("small", {}, unit));
}

function pause(waitS, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, waitS * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** One of several engines in words. */
function describeEngine({ state, stats }, number) {
  if (!stats) return `Engine ${number} is ${STATES[state] ?? state}.`;
  const share = Math.round((100 * (stats.num_blocks - stats.num_free_blocks)) / Math.max(1, stats.num_blocks));
  const name = state === "ready" ? `Engine ${number}` : `Engine ${number} (${STATES[state] ?? state})`;
  return `${name}: ${count(stats.num_running)} running, ${count(stats.num_waiting)} waiting, ${share}% of its blocks.`;
}
