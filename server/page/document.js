// A text that the model continues: for models without a chat template, and for writing with a model.

import { ApiFailure, stream } from "./api.js";
import { announce, byId, failureElements, h } from "./dom.js";
import { Clock, describeStats } from "./numbers.js";
import { titleOf } from "./store.js";
import { Writing } from "./writing.js";

const MAX_TOKENS = 256; // if the settings give no number
const ENDS = { length: "Stopped at the token limit.", stopped: "Stopped.", stop: "The model ended the text here." };

export class TextDocument extends Writing {
  #run = null; // {conversation, controller}
  #undo = []; // texts before the model's, of the conversation that is open

  /** As `Writing`'s; `on` also has canSend(): whether a request may be sent now. */
  constructor(store, settings, on) {
    super(store, settings, on);
    this.area = byId("text");
    this.meta = byId("text-meta");
    this.failure = byId("text-failure");
    this.area.addEventListener("input", () => this.#written());
    this.area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.continue();
      }
    });
    byId("text-continue").addEventListener("click", () => this.continue());
    byId("text-again").addEventListener("click", () => this.again());
    byId("text-undo").addEventListener("click", () => this.undo());
    byId("text-stop").addEventListener("click", () => this.stop());
  }

  get isRunning() {
    return this.#run !== null && this.#run.conversation === this.conversation;
  }

  open(conversation) {
    if (conversation !== this.conversation) this.#undo = [];
    this.conversation = conversation;
    this.area.value = conversation.text;
    this.#note({}, "");
    this.show();
    this.area.scrollTop = this.area.scrollHeight;
  }

  focus() {
    this.area.focus();
    this.area.setSelectionRange(this.area.value.length, this.area.value.length);
  }

  /** Updates the buttons. */
  show() {
    const { isRunning } = this;
    this.area.readOnly = isRunning;
    this.area.setAttribute("aria-busy", String(isRunning));
    byId("text-continue").hidden = isRunning;
    byId("text-stop").hidden = !isRunning;
    byId("text-continue").disabled = !this.conversation?.text || this.#run !== null || !this.on.canSend();
    byId("text-undo").disabled = byId("text-again").disabled = isRunning || !this.#undo.length;
  }

  stop(conversation = this.conversation) {
    if (this.#run?.conversation === conversation) this.#run.controller.abort();
  }

  undo() {
    if (this.isRunning || !this.#undo.length) return;
    this.#set(this.#undo.pop());
    this.#note({}, "");
    this.keep(this.conversation);
    this.show();
    this.focus();
  }

  /** Another continuation of the same text. */
  again() {
    this.undo();
    return this.continue();
  }

  async continue() {
    const { conversation } = this;
    if (!conversation.text || this.#run !== null || !this.on.canSend()) return;
    const before = conversation.text;
    const controller = new AbortController();
    this.#run = { conversation, controller };
    this.#undo.push(before);
    this.#note({}, "");
    this.show();
    announce("Writing");
    const node = { stats: {} };
    const clock = new Clock(node, false);
    const settings = this.settings();
    const request = { model: settings.model, prompt: before, max_tokens: MAX_TOKENS, ...settings.sampling };
    let end = "";
    const chunks = this.#chunks(request, node, controller.signal);
    const broken = await this.follow(node, chunks, controller.signal, (chunk) => {
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) end = choice.finish_reason;
      if (choice?.text) conversation.text += choice.text;
      if (chunk.id) this.on.asked(chunk.id);
      clock.note(chunk);
      if (conversation === this.conversation) {
        if (choice?.text) this.#append(choice.text);
        this.#note(node, "");
      }
      this.saveSoon();
    });
    if (broken) end = "stopped";
    this.#run = null;
    this.keep(conversation);
    if (conversation === this.conversation) {
      if (conversation.text === before) this.#undo.pop();
      this.#note(node, ENDS[end] ?? "");
      this.show();
      if (document.activeElement === document.body || document.activeElement === this.area) this.focus();
    }
    this.report(node, conversation.text.slice(before.length));
  }

  /** The chunks of the answer; without the text's beginning, if all of it is too long. */
  async *#chunks(request, node, signal) {
    try {
      yield* stream("v1/completions", request, signal);
    } catch (error) {
      if (!(error instanceof ApiFailure) || error.code !== "context_length_exceeded") throw error;
      node.isCut = true;
      yield* stream("v1/completions", { ...request, truncate_prompt_tokens: -1 }, signal);
    }
  }

  #set(text) {
    this.conversation.text = text;
    this.area.value = text;
  }

  #append(text) {
    const { area } = this;
    const isAtEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 40;
    area.value += text;
    if (isAtEnd) area.scrollTop = area.scrollHeight;
  }

  #written() {
    const { conversation } = this;
    conversation.text = this.area.value;
    this.#undo = [];
    this.saveSoon();
    if (!conversation.title && conversation.text.includes("\n")) this.keep(conversation);
    this.show();
  }

  save() {
    const changed = this.#run?.conversation ?? this.conversation;
    if (changed?.text && !this.store.removed.has(changed)) this.keep(changed);
  }

  keep(conversation) {
    if (!conversation.title) conversation.title = titleOf(conversation.text);
    super.keep(conversation);
  }

  #note({ stats = {}, failure = null, isCut = false }, end) {
    const parts = [];
    if (isCut) parts.push("The context is full: the beginning of the text was left out.");
    if (end) parts.push(end);
    parts.push(...describeStats(stats));
    this.meta.replaceChildren(...parts.map((part) => h("span", {}, part)));
    this.failure.hidden = !failure;
    if (failure) this.failure.replaceChildren(...failureElements(failure));
  }
}
