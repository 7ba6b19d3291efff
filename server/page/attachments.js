// Text files that go with a message: picked, dropped or pasted; shown as chips, and sent as text.

import { byId, h, icon, iconButton, toast } from "./dom.js";
import { bytes } from "./numbers.js";

export const MAX_FILE_BYTES = 256 * 1024;
export const MAX_FILES = 8;
const MAX_NAME = 120;

/** A message's text as the model gets it: each file in a fence, under its name, then what was written. */
export function contentOf({ content, files = [] }) {
  return [...files.map(fenced), content].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([A-Za-z0-9]{1,10})$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The file as {name, text}. Throws an `Error` in words. */
async function readText(file) {
  const name = file.name.replace(/[\u0000-\u001f\u007f]/g, " ").slice(-MAX_NAME);
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${name} has ${bytes(file.size)}; a file may have up to ${bytes(MAX_FILE_BYTES)}.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${name} is no text: it can only be read as UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${name} is no text: it holds zero bytes.`);
  return { name, text };
}

const sizeOf = ({ text }) => bytes(new TextEncoder().encode(text).length);

/** A file of a message that was sent; it opens to show what it holds. */
export function fileElement(file) {
  return h(
    "details",
    { class: "file" },
    h("summary", {}, icon("file"), h("span", {}, file.name), h("small", {}, sizeOf(file))),
    h("pre", { tabindex: "0", "aria-label": file.name }, file.text),
  );
}

/** The files of the message that is being written. */
export class Attachments {
  #files = [];

  /** changed  called when a file has come or gone */
  constructor(changed) {
    this.changed = changed;
    this.place = byId("files");
    const input = byId("file-input");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = "";
    });
    const chat = byId("chat");
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files") && !byId("composer").hidden;
    chat.addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
    for (const type of ["dragleave", "drop"]) chat.addEventListener(type, () => chat.classList.remove("dropping"));
    chat.addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    byId("message").addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
  }

  get files() {
    return this.#files;
  }

  set files(files) {
    this.#files = files;
    this.#show();
  }

  async add(files) {
    for (const file of files) {
      try {
        const read = await readText(file); // others may come meanwhile
        if (this.#files.length >= MAX_FILES) throw new Error(`A message takes up to ${MAX_FILES} files.`);
        this.#files = [...this.#files, read];
      } catch (error) {
        toast(error.message);
      }
    }
    this.#show();
    this.changed();
    byId("message").focus();
  }

  #show() {
    const remove = (file) => {
      this.files = this.#files.filter((each) => each !== file);
      this.changed();
      byId("message").focus();
    };
    this.place.replaceChildren(
      ...this.#files.map((file) =>
        h(
          "li",
          { class: "file" },
          icon("file"),
          h("span", { title: file.name }, file.name),
          h("small", {}, sizeOf(file)),
          iconButton("close", `Remove ${file.name}`, () => remove(file)),
        ),
      ),
    );
    this.place.hidden = !this.#files.length;
  }
}
