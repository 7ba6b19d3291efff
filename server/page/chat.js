// The chat: shows the branch of a conversation, asks the server for answers, and follows them as they come.

import { ApiFailure, postJson, stream } from "./api.js";
import { partsOf } from "./attachments.js";
import { announce, byId, h, toast } from "./dom.js";
import { MessageView } from "./message.js";
import { Clock } from "./numbers.js";
import { addNode, choose, path, pathTo, removeNode, siblings } from "./store.js";
import { Writing } from "./writing.js";

const MOST_RESERVED_TOKENS = 256; // kept free for the answer, if no limit of tokens is set
const MESSAGE_TOKENS = 64; // at most, for the template's text around a message
const SUGGESTIONS = ["What is 17 plus 25?", "Reverse the word planet", "Sort these words: pear, apple, fig", "What is the capital of France?"];

export class Chat extends Writing {
  #views = new Map(); // by node id
  #running = new Map(); // by conversation id: {node, controller}
  #frame = 0;

  /** As `Writing`'s; `on` also has suggested(text). */
  constructor(store, settings, on) {
    super(store, settings, on);
    this.log = byId("log");
    this.follower = new Follower(byId("scroll"), byId("to-latest"));
    this.actions = {
      retry: (node) => this.retry(node),
      resume: (node) => this.resume(node),
      edit: (node, text) => this.edit(node, text),
      remove: (node) => this.remove(node),
      show: (node) => this.show(node),
      openKey: () => this.on.needsKey(),
      focusComposer: () => byId("message").focus(),
    };
  }

  get isRunning() {
    return this.#running.has(this.conversation.id);
  }

  open(conversation) {
    this.conversation = conversation;
    this.#views.clear();
    this.log.replaceChildren();
    this.follower.start();
    this.render();
  }

  /** Updates the screen to the conversation. */
  render() {
    const shown = path(this.conversation);
    const run = this.#running.get(this.conversation.id);
    const views = shown.map((node) => this.#views.get(node.id) ?? new MessageView(node, this.actions));
    this.#views = new Map(views.map((view) => [view.node.id, view]));
    const elements = shown.length ? views.map((view) => view.element) : [this.#welcome()];
    const isSame = elements.length === this.log.children.length && elements.every((e, i) => e === this.log.children[i]);
    if (!isSame) this.log.replaceChildren(...elements);
    for (const view of views) {
      view.update({ isRunning: run?.node === view.node, branches: siblings(this.conversation, view.node) });
    }
    byId("send").hidden = Boolean(run);
    byId("stop").hidden = !run;
    this.follower.follow();
  }

  #welcome() {
    const suggest = (text) =>
      h("button", { type: "button", class: "suggestion", click: () => this.on.suggested(text) }, text);
    return h(
      "div",
      { class: "welcome" },
      h("h2", {}, "What would you like to know?"),
      h("p", {}, "Conversations stay in this browser."),
      h("div", { class: "suggestions" }, SUGGESTIONS.map(suggest)),
    );
  }

  send(text, files = []) {
    const last = path(this.conversation).at(-1) ?? null;
    const fields = files.length ? { files } : {};
    const node = addNode(this.conversation, last, { role: "user", content: text, ...fields });
    this.follower.start();
    return this.#answer(node);
  }

  /** Another answer to the same message, beside this one. */
  retry(node) {
    const parent = this.conversation.nodes.find((each) => each.id === node.parent);
    return parent ? this.#answer(parent) : undefined;
  }

  /** The same answer, from where it stopped. */
  resume(node) {
    return this.#generate(this.conversation, node, true);
  }

  edit(node, text) {
    const parent = this.conversation.nodes.find((each) => each.id === node.parent) ?? null;
    const files = node.files ? { files: node.files } : {};
    const edited = addNode(this.conversation, parent, { role: node.role, content: text, ...files });
    return this.#answer(edited);
  }

  editLast() {
    const views = [...this.#views.values()];
    views.findLast((view) => view.node.role === "user")?.edit();
  }

  remove(node) {
    const { conversation } = this;
    this.stop();
    const undo = removeNode(conversation, node);
    this.keep(conversation);
    this.render();
    toast("Deleted.", {
      label: "Undo",
      run: () => {
        undo();
        this.keep(conversation);
        this.render();
      },
    });
  }

  show(node) {
    choose(this.conversation, node);
    this.keep(this.conversation);
    this.render();
  }

  /** Ends the answer that is being written, if there is one. */
  stop(conversation = this.conversation) {
    this.#running.get(conversation.id)?.controller.abort();
  }

  #answer(parent) {
    return this.#generate(this.conversation, addNode(this.conversation, parent, { role: "assistant" }), false);
  }

  async #generate(conversation, node, resumes) {
    if (this.#running.has(conversation.id)) return;
    const controller = new AbortController();
    this.#running.set(conversation.id, { node, controller });
    for (const name of ["finish", "failure", "numDropped"]) delete node[name];
    const clock = new Clock(node, resumes);
    this.keep(conversation);
    this.render();
    announce("Answering");
    const chunks = this.#chunks(conversation, node, resumes, controller.signal);
    const end = await this.follow(node, chunks, controller.signal, (chunk) => {
      if (chunk.id !== node.requestId) this.on.asked((node.requestId = chunk.id));
      absorb(node, chunk);
      clock.note(chunk);
      this.#changed(conversation);
    });
    if (end) node.finish = end;
    else if (!node.finish) node.failure ??= { title: "The answer broke off", message: "The server ended it early." };
    delete node.requestId;
    this.#running.delete(conversation.id);
    this.keep(conversation);
    if (conversation === this.conversation) this.render();
    this.report(node, node.content);
  }

  /** The chunks of the answer; without the oldest turns, if the whole is too long. */
  async *#chunks(conversation, node, resumes, signal) {
    const settings = this.settings();
    const { maxModelLen } = settings;
    const whole = requestOf(conversation, node, settings, resumes);
    const shortened = async () => {
      const { request, numDropped } = await fit(whole, maxModelLen, signal);
      if (numDropped) node.numDropped = numDropped;
      return request;
    };
    const isSure = !maxModelLen || surelyFits(whole, maxModelLen);
    try {
      yield* stream("v1/chat/completions", isSure ? whole : await shortened(), signal);
    } catch (error) {
      const isTooLong = error instanceof ApiFailure && error.code === "context_length_exceeded";
      if (!isTooLong || !isSure || !maxModelLen) throw error;
      yield* stream("v1/chat/completions", await shortened(), signal);
    }
  }

  /** Schedules showing new text with the next frame, and storing it soon. */
  #changed(conversation) {
    if (conversation === this.conversation) {
      this.#frame ||= requestAnimationFrame(() => {
        this.#frame = 0;
        this.render();
      });
    }
    this.saveSoon();
  }

  /** Stores the answers that are being written. */
  save() {
    for (const id of this.#running.keys()) {
      const conversation = this.store.conversations.get(id);
      if (conversation) this.store.save(conversation);
    }
  }
}

// The oldest turns that do not fit the model's context are left out, as in `xserv chat`.

/** How many tokens the prompt may have. */
function roomFor(request, maxModelLen) {
  return maxModelLen - Math.min(request.max_tokens ?? MOST_RESERVED_TOKENS, Math.floor(maxModelLen / 2));
}

/** Whether it surely fits: a token takes a byte or more. */
function surelyFits(request, maxModelLen) {
  if (request.messages.some(({ content }) => typeof content !== "string")) return false; // the server counts pictures
  const encoder = new TextEncoder();
  const sizes = request.messages.map(({ content }) => encoder.encode(content).length + MESSAGE_TOKENS);
  return sizes.reduce((sum, size) => sum + size, 0) <= roomFor(request, maxModelLen);
}

/**
 * The request without the oldest turns that do not fit, and their number. The system message and the last turn
 * stay. The server counts.
 */
async function fit(request, maxModelLen, signal) {
  const system = request.messages.filter((message) => message.role === "system");
  const rest = request.messages.slice(system.length);
  const begins = rest.flatMap((message, at) => (message.role === "user" ? [at] : []));
  if (begins.length < 2) return { request, numDropped: 0 };
  const from = (turn) => [...system, ...rest.slice(turn === 0 ? 0 : begins[turn])];
  const room = roomFor(request, maxModelLen);
  const { model, add_generation_prompt, continue_final_message } = request;
  const fits = async (turn) => {
    const asked = { model, messages: from(turn), add_generation_prompt, continue_final_message };
    return (await postJson("tokenize", asked, signal)).count <= room;
  };
  let [low, high] = [0, begins.length - 1]; // the first kept turn lies between them
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(middle)) high = middle;
    else low = middle + 1;
  }
  return { request: { ...request, messages: from(low) }, numDropped: low };
}

/** The request for an answer at this place of the conversation. */
function requestOf(conversation, node, settings, resumes) {
  const turns = pathTo(conversation, node);
  if (!resumes) turns.pop();
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    if (turn.role === "assistant" && !turn.content) continue; // an answer that failed
    messages.push({ role: turn.role, content: partsOf(turn) });
  }
  const request = { model: settings.model, messages, ...settings.sampling };
  return resumes ? { ...request, continue_final_message: true, add_generation_prompt: false } : request;
}

/** Adds a chunk of a streamed answer to the node. */
function absorb(node, chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) node.content += delta.content;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const call = (node.calls[part.index ?? node.calls.length] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name += part.function.name;
    if (part.function?.arguments) call.arguments += part.function.arguments;
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

/** Keeps the end in view while an answer grows, unless the reader has scrolled up. */
class Follower {
  #lastTop = 0;

  constructor(scroll, button) {
    this.scroll = scroll;
    this.button = button;
    this.isFollowing = true;
    scroll.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    button.addEventListener("click", () => {
      this.start();
      this.follow();
      byId("message").focus();
    });
    const observer = new ResizeObserver(() => this.follow());
    observer.observe(scroll);
    observer.observe(byId("log"));
  }

  get #distance() {
    return this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight;
  }

  /** Follow from now on, wherever the reader has been. */
  start() {
    this.isFollowing = true;
    this.#lastTop = 0;
  }

  #scrolled() {
    this.#look();
    this.#showButton();
  }

  /** The reader's first pixels upwards end the following: an animated scroll that is put to the end goes no further. */
  #look() {
    const top = this.scroll.scrollTop;
    if (top < this.#lastTop - 1 && this.#distance > 1) this.isFollowing = false;
    else if (this.#distance < 24) this.isFollowing = true;
    this.#lastTop = top;
  }

  follow() {
    this.#look(); // a scroll that has happened may not have been told yet
    if (this.isFollowing) {
      this.scroll.scrollTop = this.scroll.scrollHeight;
      this.#lastTop = this.scroll.scrollTop;
    }
    this.#showButton();
  }

  #showButton() {
    this.button.hidden = this.isFollowing || this.#distance < 24;
  }
}
