// The box that messages are written in. An unsent draft is kept with its conversation for this tab, and survives a
// reload.

import { Attachments } from "./attachments.js";
import { byId } from "./dom.js";
import { keep, parseJson, stored } from "./storage.js";

const DRAFT = "xserv.draft.";
const LINE_HEIGHT = 24;
const PADDING = 16;

export class Composer {
  #id = null; // of the conversation

  /**
   * on  {send(text, files), stop(), editLast(), canSend(): whether a message may be sent now, readsImages(): whether the
   *     model does}
   */
  constructor(on) {
    this.on = on;
    this.message = byId("message");
    this.attachments = new Attachments(() => this.#changed(), on.readsImages);
    this.message.addEventListener("input", () => this.#changed());
    this.message.addEventListener("keydown", (event) => this.#key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => {
      on.stop();
      this.message.focus();
    });
  }

  /** Shows the draft of this conversation. */
  open(conversation) {
    this.#id = conversation.id;
    const { text, files } = readDraft(this.#id);
    this.message.value = text;
    this.attachments.files = files;
    this.show();
  }

  /** Updates the button and the height of the box. */
  show() {
    const { message } = this;
    const isEmpty = !message.value.trim() && !this.attachments.files.length;
    byId("send").disabled = isEmpty || !this.on.canSend();
    message.rows = 1;
    message.rows = Math.max(1, Math.min(10, Math.floor((message.scrollHeight - PADDING) / LINE_HEIGHT)));
  }

  focus() {
    this.message.focus();
  }

  /** Sends this text without touching the draft; while nothing can be sent, it waits in the box. */
  suggest(text) {
    if (this.on.canSend()) {
      this.on.send(text, []);
      return;
    }
    this.message.value = text;
    this.#changed();
  }

  #changed() {
    keepDraft(this.#id, { text: this.message.value, files: this.attachments.files });
    this.show();
  }

  #key(event) {
    const isEmpty = !this.message.value && !this.attachments.files.length;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && isEmpty && this.on.canSend()) {
      event.preventDefault();
      this.on.editLast();
    }
  }

  #send() {
    const text = this.message.value.trim();
    const { files } = this.attachments;
    if ((!text && !files.length) || !this.on.canSend()) return;
    this.message.value = "";
    this.attachments.files = [];
    this.#changed();
    this.on.send(text, files);
  }
}

function readDraft(id) {
  const { text, files } = parseJson(stored("sessionStorage", DRAFT + id)) ?? {};
  return { text: String(text ?? ""), files: Array.isArray(files) ? files : [] };
}

function keepDraft(id, draft) {
  keep("sessionStorage", DRAFT + id, draft.text || draft.files.length ? JSON.stringify(draft) : "");
}
