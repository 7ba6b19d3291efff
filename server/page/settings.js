// The settings sheet: key, model, system prompt, sampling. An empty field is not sent: then the server decides.

import { apiKey, setApiKey } from "./api.js";
import { byId, h } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Settings {
  /** keyChanged  called when another API key has been entered */
  constructor(keyChanged) {
    this.sheet = byId("settings");
    this.form = byId("settings-form");
    this.key = byId("set-key");
    this.model = byId("set-model");
    this.stored = loadSettings();
    this.#fill();
    this.form.addEventListener("input", () => this.#keep());
    byId("reset-settings").addEventListener("click", () => {
      this.stored = {};
      this.#fill();
      this.#keep();
    });
    this.sheet.addEventListener("click", (event) => {
      if (event.target === this.sheet) this.sheet.close(); // beside the sheet
    });
    this.sheet.addEventListener("close", () => {
      const key = this.key.value.trim();
      if (key === apiKey()) return;
      setApiKey(key);
      keyChanged();
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

  setModels(names) {
    const chosen = names.includes(this.stored.model) ? this.stored.model : names[0];
    this.model.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    this.model.disabled = names.length < 2;
  }

  /** What a request is made with. */
  get values() {
    const sampling = {};
    for (const name of NUMBERS) {
      const field = this.form.elements[name];
      if (field.value !== "" && field.validity.valid) sampling[name] = field.valueAsNumber;
    }
    return { model: this.model.value, system: this.form.elements.system.value.trim(), sampling };
  }

  #fill() {
    for (const name of [...NUMBERS, "system"]) this.form.elements[name].value = this.stored[name] ?? "";
  }

  #keep() {
    const stored = { model: this.model.value };
    for (const name of [...NUMBERS, "system"]) {
      const { value } = this.form.elements[name];
      if (value !== "") stored[name] = value;
    }
    this.stored = stored;
    saveSettings(stored);
  }
}
