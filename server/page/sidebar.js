// The list of conversations: searched, opened, renamed, deleted; exported and imported. On narrow screens it
// is a drawer.

import { byId, h, iconButton, toast } from "./dom.js";
import { MAX_CHARACTERS, matches, rename } from "./store.js";

const MAX_LISTED = 200;
const NARROW = matchMedia("(max-width: 860px)");

export class Sidebar {
  #renaming = null;

  /**
   * store    the conversations
   * current  () → the open one
   * on       {open(conversation), remove(conversation), restore(conversation)}
   */
  constructor(store, current, on) {
    this.store = store;
    this.current = current;
    this.on = on;
    byId("search").addEventListener("input", () => this.show());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !event.target.value) return;
      event.stopPropagation();
      event.target.value = "";
      this.show();
    });
    byId("export").addEventListener("click", () => {
      const name = `xserv-conversations-${new Date().toISOString().slice(0, 10)}.json`;
      download(name, "application/json", store.exported());
    });
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target));
    byId("open-sidebar").addEventListener("click", () => (this.slide(true), byId("close-sidebar").focus()));
    byId("close-sidebar").addEventListener("click", () => (this.slide(false), byId("open-sidebar").focus()));
    byId("scrim").addEventListener("click", () => this.slide(false));
    NARROW.addEventListener("change", () => this.slide(false));
    this.slide(false);
  }

  get isOpen() {
    return byId("sidebar").classList.contains("open");
  }

  /** Opens or closes the drawer. */
  slide(isOpen) {
    const isDrawer = NARROW.matches;
    byId("sidebar").classList.toggle("open", isOpen && isDrawer);
    byId("sidebar").inert = isDrawer && !isOpen;
    byId("main").inert = isDrawer && isOpen;
    byId("scrim").hidden = !(isDrawer && isOpen);
    byId("open-sidebar").setAttribute("aria-expanded", String(isOpen && isDrawer));
  }

  show() {
    const query = byId("search").value.trim().toLowerCase();
    const all = this.store.list();
    const found = query ? all.filter((conversation) => matches(conversation, query)) : all;
    const items = found.slice(0, MAX_LISTED).map((conversation) => this.#item(conversation));
    if (query && !items.length) items.push(h("li", { class: "nothing" }, "Nothing found."));
    byId("conversations").replaceChildren(...items);
    byId("export").disabled = !all.length;
    byId("search").hidden = !all.length;
    const place = byId("storage");
    const share = this.store.numCharacters / MAX_CHARACTERS;
    place.hidden = !this.store.isFull && share < 0.8;
    place.classList.toggle("full", this.store.isFull);
    place.textContent = this.store.isFull
      ? "The browser’s storage for this page is full: the latest messages are not kept. Export or delete conversations."
      : `${Math.round(share * 100)} % of the room for conversations is taken.`;
  }

  #item(conversation) {
    const isCurrent = conversation === this.current();
    const title = conversation.title || "New chat";
    if (conversation.id === this.#renaming) return h("li", {}, this.#field(conversation));
    return h(
      "li",
      { class: isCurrent ? "current" : null },
      h(
        "button",
        {
          type: "button",
          class: "conversation",
          "aria-current": isCurrent ? "true" : null,
          "aria-keyshortcuts": "F2",
          click: () => this.on.open(conversation),
          keydown: (event) => event.key === "F2" && this.#rename(conversation),
        },
        h("span", {}, title),
        h("time", { datetime: new Date(conversation.updated).toISOString() }, ago(Date.now() - conversation.updated)),
      ),
      h(
        "span",
        { class: "tools" },
        iconButton("edit", `Rename “${title}”`, () => this.#rename(conversation)),
        iconButton("trash", `Delete “${title}”`, () => this.#remove(conversation)),
      ),
    );
  }

  #rename(conversation) {
    this.#renaming = conversation.id;
    this.show();
    const field = byId("rename");
    field?.focus();
    field?.select();
  }

  #field(conversation) {
    const end = (isKept) => {
      if (this.#renaming !== conversation.id) return;
      this.#renaming = null;
      if (isKept && rename(conversation, field.value)) this.store.save(conversation);
      this.show();
      this.on.renamed(conversation);
    };
    const field = h("input", {
      id: "rename",
      "aria-label": "Name of the conversation",
      maxlength: "200",
      autocomplete: "off",
      blur: () => end(true),
      keydown: (event) => {
        if (event.key === "Enter" && !event.isComposing) end(true);
        if (event.key === "Escape") {
          event.stopPropagation();
          end(false);
        }
      },
    });
    field.value = conversation.title;
    return field;
  }

  #remove(conversation) {
    this.on.remove(conversation);
    this.show();
    toast(`“${conversation.title || "New chat"}” was deleted.`, {
      label: "Undo",
      run: () => {
        this.store.restore(conversation);
        this.on.open(conversation);
      },
    });
  }

  async #import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const number = this.store.import(await file.text());
      toast(number === 1 ? "One conversation was imported." : `${number} conversations were imported.`);
    } catch (error) {
      toast(error.message);
    }
    this.show();
  }
}

/** Downloads a file through the browser. */
export function download(name, mediaType, text) {
  const address = URL.createObjectURL(new Blob([text], { type: mediaType }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function ago(milliseconds) {
  const minutes = Math.floor(milliseconds / 60000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h`;
  return `${Math.floor(minutes / 1440)} d`;
}
