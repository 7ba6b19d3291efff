// The server's rendering of a text: formulas as MathML, the colours of code. It sends trees and lengths of runs; the
// elements are made here, with text nodes only. Until there is an answer, the source is shown.

import { ApiFailure, postJson } from "./api.js";
import { copyButton, h } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_KEPT = 2000; // answers
const MAX_ENTRIES = 64; // of one request
const MAX_CODE = 40_000;
const GATHER_MS = 20;
const RECOLOUR_MS = 400; // between two looks at code that grows
const RETRY_MS = 1500;
const MAX_TRIES = 4;

const kept = new Map(); // by key: the answer, or null
const asked = new Map(); // by key: {kind, entry, tries, listeners}
let timer = 0;

/** Calls `done` with the answer to an entry of `POST /page/render`: at once if it is known. */
function ask(kind, entry, done) {
  const key = JSON.stringify([kind, entry]);
  if (kept.has(key)) {
    done(kept.get(key));
    return;
  }
  const waiting = asked.get(key);
  if (waiting) {
    waiting.listeners.push(done);
    return;
  }
  asked.set(key, { kind, entry, tries: 0, isSent: false, listeners: [done] });
  timer ||= setTimeout(send, GATHER_MS);
}

async function send() {
  timer = 0;
  const batch = [...asked].filter(([, each]) => !each.isSent).slice(0, MAX_ENTRIES);
  if (!batch.length) return;
  for (const [, each] of batch) {
    each.isSent = true;
    each.tries += 1;
  }
  const of = (kind) => batch.filter(([, each]) => each.kind === kind);
  try {
    const answer = await postJson("page/render", {
      math: of("math").map(([, each]) => each.entry),
      code: of("code").map(([, each]) => each.entry),
    });
    for (const kind of ["math", "code"]) of(kind).forEach(([key], at) => take(key, answer[kind][at]));
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
    for (const [key, each] of batch) {
      each.isSent = false;
      const comesAgain = (error.status === 429 || error.status === 0 || error.status === 503) && each.tries < MAX_TRIES;
      if (!comesAgain) asked.delete(key); // the source stays; the next look retries
    }
    if (asked.size) timer ||= setTimeout(send, RETRY_MS);
    return;
  }
  if ([...asked.values()].some((each) => !each.isSent)) timer ||= setTimeout(send, 0);
}

function take(key, answer) {
  kept.set(key, answer);
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  const { listeners } = asked.get(key);
  asked.delete(key);
  for (const done of listeners) done(answer);
}

/** A formula. `source` is the original text, with its marks. */
export function mathElement(latex, isDisplay, source) {
  const element = h("span", { class: isDisplay ? "math display" : "math" }, source);
  ask("math", { latex: latex.trim(), display: isDisplay }, (tree) => {
    if (tree === null) return;
    const math = build(tree);
    math.setAttribute("alttext", latex.trim());
    element.replaceChildren(math);
    if (isDisplay) requestAnimationFrame(() => letScroll(element));
  });
  return element;
}

/** A formula that is wider than its place can be scrolled by keyboard. */
function letScroll(element) {
  if (element.scrollWidth <= element.clientWidth) return;
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Formula"]]) {
    element.setAttribute(name, value);
  }
}

function build([tag, attributes, children]) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (typeof children === "string") element.textContent = children;
  else element.append(...children.map(build));
  return element;
}

const views = new WeakMap(); // by figure

/** A block of code, with its language and a button that copies it. */
export function codeElement(language, text) {
  const view = new CodeView(language);
  views.set(view.element, view);
  view.update(text);
  return view.element;
}

/** Shows another text in a block of code; its scroll position and its button stay. */
export const updateCode = (element, text) => views.get(element).update(text);

class CodeView {
  #text = "";
  #coloured = ""; // the coloured part
  #isAsking = false;
  #isPlain = false;
  #rest = document.createTextNode("");

  constructor(language) {
    this.language = language;
    this.code = h("code", {}, this.#rest);
    this.element = h(
      "figure",
      { class: "code" },
      h("figcaption", {}, h("span", {}, language || "text"), copyButton(() => this.code.textContent, "Copy code")),
      h("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, this.code),
    );
  }

  update(text) {
    this.#text = text;
    if (!text.startsWith(this.#coloured)) this.#colour("", []);
    this.#rest.data = text.slice(this.#coloured.length);
    this.#look();
  }

  #look() {
    if (this.#isAsking || this.#isPlain || !this.language) return;
    if (this.#text === this.#coloured || !this.#text.trim() || this.#text.length > MAX_CODE) return;
    this.#isAsking = true;
    const text = this.#text;
    ask("code", { language: this.language, text }, (runs) => {
      if (runs === null) {
        this.#isPlain = true;
        return;
      }
      if (this.#text.startsWith(text)) this.#colour(text, runs);
      const again = () => {
        this.#isAsking = false;
        this.#look();
      };
      if (this.#text === text) again();
      else setTimeout(again, RECOLOUR_MS);
    });
  }

  #colour(text, runs) {
    const pieces = [];
    let at = 0;
    for (let index = 0; index < runs.length; index += 2) {
      const piece = text.slice(at, (at += runs[index + 1]));
      pieces.push(runs[index] ? h("span", { class: `token-${runs[index]}` }, piece) : piece);
    }
    this.#coloured = text;
    this.#rest.data = this.#text.slice(text.length);
    this.code.replaceChildren(...pieces, this.#rest);
  }
}
