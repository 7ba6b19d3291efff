// The dot beside the model's name: whether the server answers, and its engine's state.

import { ApiFailure, getJson, readiness } from "./api.js";
import { byId } from "./dom.js";

const READY_MS = 5000; // between two looks
const UNREADY_MS = 1500;
const WORDS = {
  starting: "starting",
  restarting: "restarting",
  ending: "shutting down",
  failed: "engine failed",
  gone: "server gone",
  key: "key needed",
};
const KINDS = { ready: "ready", starting: "waiting", restarting: "waiting", ending: "waiting" }; // all others: failed

export class Status {
  #timer = 0;
  #look = 0;
  #wasReady = false;
  #state = null;
  #name = "";

  /** on  {ready(): the server accepts requests again; needsKey()} */
  constructor(on) {
    this.on = on;
    this.place = byId("model");
    document.addEventListener("visibilitychange", () => this.look());
    addEventListener("online", () => this.look());
    addEventListener("offline", () => this.#show("gone"));
  }

  get isReady() {
    return this.#state === "ready";
  }

  set name(name) {
    this.#name = name;
    this.#show(this.#state);
  }

  /** Polls now, and then regularly while the page is visible. */
  async look() {
    clearTimeout(this.#timer);
    if (document.visibilityState !== "visible" || this.#state === "key") return; // the key's prompt comes first
    const number = ++this.#look;
    const state = await this.#read();
    if (number !== this.#look) return; // a later poll is running
    if (state === "key") {
      this.needKey();
      return;
    }
    const isNew = state !== this.#state;
    this.#show(state);
    if (isNew && state === "ready") this.on.ready();
    this.#timer = setTimeout(() => this.look(), state === "ready" ? READY_MS : UNREADY_MS);
  }

  /** Polls as for the first time: with another key. */
  lookAnew() {
    this.#state = null;
    return this.look();
  }

  /** The server answers, but not without a key. */
  needKey() {
    clearTimeout(this.#timer);
    this.#look += 1;
    this.#show("key");
    this.on.needsKey();
  }

  async #read() {
    try {
      const { state } = await readiness();
      switch (state) {
        case "ready":
          this.#wasReady = true;
          return "ready";
        case "starting":
          return this.#wasReady ? "restarting" : "starting";
        case "down":
          return (await isAlive()) ? "restarting" : "failed";
        default:
          return "ending"; // "closing", "draining"
      }
    } catch (error) {
      if (!(error instanceof ApiFailure)) throw error;
      return error.needsKey ? "key" : "gone";
    }
  }

  #show(state) {
    this.#state = state;
    if (state === null) return;
    const word = WORDS[state];
    // A long name is cut off at its end, so the word comes first.
    const text = !word ? this.#name : this.#name && state !== "key" ? `${word} · ${this.#name}` : word;
    if (this.place.textContent !== text) this.place.textContent = text;
    this.place.title = text;
    this.place.dataset.state = KINDS[state] ?? "failed";
  }
}

/** Whether the engine is restarting; else only a new server helps. */
async function isAlive() {
  try {
    await getJson("health");
    return true;
  } catch (error) {
    if (error instanceof ApiFailure) return false;
    throw error;
  }
}
