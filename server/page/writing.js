// What chats and texts share: they follow an answer as it comes, and keep it in the browser.

import { ApiFailure, wordsOf } from "./api.js";
import { announce } from "./dom.js";

const SAVE_INTERVAL_MS = 1500;

export class Writing {
  #saveTimer = 0;
  #isLeaving = false;

  /**
   * store     where conversations are kept
   * settings  () → {model, maxModelLen, system, sampling}
   * on        {changed(), needsKey(), asked(request id), failed(): a request found no server or no engine, …}: events
   *           for the rest of the page
   */
  constructor(store, settings, on) {
    this.store = store;
    this.settings = settings;
    this.on = on;
    for (const type of ["beforeunload", "pagehide"]) addEventListener(type, () => this.#leave(true));
    addEventListener("pageshow", () => this.#leave(false));
  }

  #leave(isLeaving) {
    this.#isLeaving = isLeaving;
    if (isLeaving) this.#save();
  }

  #save() {
    clearTimeout(this.#saveTimer);
    this.#saveTimer = 0;
    this.save();
  }

  saveSoon() {
    this.#saveTimer ||= setTimeout(() => this.#save(), SAVE_INTERVAL_MS);
  }

  keep(conversation) {
    conversation.updated = Date.now();
    this.store.save(conversation);
    this.on.changed();
  }

  /** Hands each chunk to `take`. Returns how the answer broke off, if it did: "stopped", or "interrupted"; a failure is
   * the node's. */
  async follow(node, chunks, signal, take) {
    try {
      for await (const chunk of chunks) take(chunk);
    } catch (error) {
      if (error instanceof ApiFailure && (error.status === 0 || error.status === 503)) this.on.failed();
      if (signal.aborted) return "stopped";
      if (this.#isLeaving) return "interrupted"; // the browser has cut the connection
      node.failure = wordsOf(error);
    }
    return null;
  }

  /** Reads the end of an answer out. */
  report({ failure }, text) {
    announce(failure ? `${failure.title}. ${failure.message}` : text);
    if (failure?.needsKey) this.on.needsKey();
  }
}
