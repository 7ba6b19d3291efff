// Files that go with a message: picked, dropped or pasted. Texts are shown as chips, and sent as text; pictures, for a
// model that reads them, are shown small, and sent as they are or made smaller.

import { byId, h, icon, iconButton, toast } from "./dom.js";
import { bytes } from "./numbers.js";

export const MAX_FILE_BYTES = 256 * 1024;
export const MAX_FILES = 8;
const MAX_NAME = 120;
const MAX_PICTURE_BYTES = 20 * 1024 * 1024;
const PICTURE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/avif"];
const MAX_SIDE = 1536; // pixels of a picture that is made smaller

/** A message's text as the model gets it: each text file in a fence, under its name, then the typed text. */
export function contentOf({ content, files = [] }) {
  const texts = files.filter((file) => !file.image);
  return [...texts.map(fenced), content].filter(Boolean).join("\n\n");
}

/** A message's content as a request has it: its pictures, if any, and its text. */
export function partsOf(node) {
  const text = contentOf(node);
  const pictures = (node.files ?? []).filter((file) => file.image);
  if (!pictures.length) return text;
  const parts = pictures.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([A-Za-z0-9]{1,10})$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The file as {name, text}. Throws an `Error` in words. */
async function readText(file) {
  const name = nameOf(file);
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

/** The picture as {name, image: data URI}; a large one is drawn smaller, so that conversations can be kept. */
async function readPicture(file) {
  const name = nameOf(file);
  if (file.size > MAX_PICTURE_BYTES) {
    throw new Error(`${name} has ${bytes(file.size)}; a picture may have up to ${bytes(MAX_PICTURE_BYTES)}.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} cannot be read as a picture.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_FILE_BYTES) return { name, image: await dataUri(file) };
  const canvas = h("canvas", {});
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { name, image: canvas.toDataURL("image/jpeg", 0.9) };
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${nameOf(file)} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

const nameOf = (file) => file.name.replace(/[\u0000-\u001f\u007f]/g, " ").slice(-MAX_NAME);

const sizeOf = ({ text }) => bytes(new TextEncoder().encode(text).length);

/** A file of a sent message; it opens to show its content. */
export function fileElement(file) {
  if (file.image) return h("img", { class: "file picture", src: file.image, alt: file.name, title: file.name });
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

  /**
   * changed      called when a file has come or gone
   * readsImages  whether the model reads pictures
   */
  constructor(changed, readsImages) {
    this.changed = changed;
    this.readsImages = readsImages;
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

  /** Updates the button's label by the allowed kinds of files. */
  showButton() {
    const limit = `up to ${bytes(MAX_FILE_BYTES)} each`;
    byId("attach").title = this.readsImages() ? `Attach pictures, or text files, ${limit}` : `Attach text files, ${limit}`;
    byId("attach").setAttribute("aria-label", this.readsImages() ? "Attach pictures or text files" : "Attach text files");
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
        const isPicture = this.readsImages() && PICTURE_TYPES.includes(file.type);
        const read = await (isPicture ? readPicture(file) : readText(file)); // files may be added meanwhile
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
          file.image ? h("img", { src: file.image, alt: "" }) : icon("file"),
          h("span", { title: file.name }, file.name),
          file.image ? "" : h("small", {}, sizeOf(file)),
          iconButton("close", `Remove ${file.name}`, () => remove(file)),
        ),
      ),
    );
    this.place.hidden = !this.#files.length;
  }
}
