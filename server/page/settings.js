// The settings sheet: key, model, mode, system prompt, sampling. Empty fields use the server's defaults.

import { apiKey, setApiKey } from "./api.js";
import { byId, h } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
  "max_tokens", "seed",
];
const FIELDS = [...NUMBERS, "system", "stop"];
const MAX_STOPS = 64;

export class Settings {
  /** on  {keyChanged(): another API key has been entered, modeChanged()} */
  constructor(on) {
    this.maxModelLen = 0; // not known
    this.hasChatTemplate = true;
    this.readsImages = false;
    this.sheet = byId("settings");
    this.form = byId("settings-form");
    this.key = byId("set-key");
    this.model = byId("set-model");
    this.mode = byId("set-mode");
    this.stored = loadSettings();
    this.#fill();
    this.mode.addEventListener("change", () => {
      this.#keep();
      on.modeChanged();
    });
    this.form.addEventListener("input", () => this.#keep());
    byId("reset-settings").addEventListener("click", () => {
      this.stored = {};
      this.#fill();
      this.#keep();
      on.modeChanged();
    });
    this.sheet.addEventListener("click", (event) => {
      if (event.target === this.sheet) this.sheet.close(); // outside of the sheet
    });
    this.sheet.addEventListener("close", () => {
      const key = this.key.value.trim();
      if (key === apiKey()) return;
      setApiKey(key);
      on.keyChanged();
    });
  }

  open(needsKey = false) {
    this.key.value = apiKey();
    const note = byId("key-note");
    note.hidden = !needsKey;
    note.textContent = apiKey() ? "The server does not know this key." : "This server asks for a key.";
    if (!this.sheet.open) this.sheet.showModal();
    if (needsKey) this.key.focus();
  }

  setModels(models) {
    const names = models.map((model) => model.id);
    const shown = ({ id, status }) => (status && status.value !== "loaded" ? `${id} (${status.value})` : id);
    const chosen = names.includes(this.stored.model) ? this.stored.model : names[0];
    this.model.replaceChildren(
      ...models.map((model) => h("option", { value: model.id, selected: model.id === chosen }, shown(model))),
    );
    this.model.disabled = names.length < 2;
  }

  /** Sets the server's description of its model. */
  setAbout({ max_model_len, has_chat_template, reads_images }) {
    this.readsImages = reads_images;
    this.maxModelLen = max_model_len;
    this.hasChatTemplate = has_chat_template;
    this.mode.disabled = !has_chat_template;
    byId("mode-note").hidden = has_chat_template;
    this.mode.value = this.isText ? "text" : "chat";
  }

  /** Whether a new conversation is a text to be continued, not a chat. */
  get isText() {
    return !this.hasChatTemplate || this.stored.mode === "text";
  }

  /** The settings of a request. */
  get values() {
    const sampling = {};
    for (const name of NUMBERS) {
      const field = this.form.elements[name];
      if (field.value !== "" && field.validity.valid) sampling[name] = field.valueAsNumber;
    }
    const stop = this.form.elements.stop.value.split("\n").filter(Boolean).slice(0, MAX_STOPS).map(unescaped);
    if (stop.length) sampling.stop = stop;
    const system = this.form.elements.system.value.trim();
    return { model: this.model.value, maxModelLen: this.maxModelLen, system, sampling };
  }

  #fill() {
    for (const name of FIELDS) this.form.elements[name].value = this.stored[name] ?? "";
    this.mode.value = this.isText ? "text" : "chat";
  }

  #keep() {
    const stored = { model: this.model.value };
    const mode = this.hasChatTemplate ? this.mode.value : this.stored.mode; // no choice without a template
    if (mode === "text") stored.mode = mode;
    for (const name of FIELDS) {
      const { value } = this.form.elements[name];
      if (value !== "") stored[name] = value;
    }
    this.stored = stored;
    saveSettings(stored);
  }
}

/** A stop string as it was typed: \n, \t and \\ are written with a backslash. */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t" })[letter] ?? "\\");
}
