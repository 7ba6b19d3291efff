// Formulas, drawn by KaTeX, and blocks of code, whose colours come from the server as lengths of runs. Elements are made
// here and by KaTeX, with text nodes only. Until code has its colours, its text is shown.

import { ApiFailure, postJson } from "./api.js";
import { copyButton, h } from "./dom.js";

const MAX_FORMULAS = 500; // drawn ones that are kept
const MAX_EM = 4; // sizes that a formula may ask for
const WIDE = /-\s*(?:(?:\d{2,}|[5-9])(?:\.\d*)?\s*(?:em|ex|cm|in|pc)|\d{3,}(?:\.\d*)?\s*[a-z]{2})/;
const LABEL = /\\label\s*\{[^{}]*\}/g;
const ENVIRONMENT = /\\(begin|end)\s*\{(flalign|eqnarray|multline|displaymath|math)(\*?)\}/g;
const ENVIRONMENTS = { flalign: "align", eqnarray: "align", multline: "gather" }; // that KaTeX does not know

const MAX_CODE = 40_000;
const MAX_ENTRIES = 64; // of one request
const MAX_KEPT = 2000; // answers
const GATHER_MS = 20;
const RECOLOUR_MS = 400; // between two looks at code that grows
const RETRY_MS = 1500;
const MAX_TRIES = 4;

const formulas = new Map(); // by key: drawn formula, or null

/** A formula. `source` is the original text, with its marks, which is shown if it is none. */
export function mathElement(latex, isDisplay, source) {
  const key = `${isDisplay}${latex}`;
  if (!formulas.has(key)) formulas.set(key, draw(latex.trim(), isDisplay));
  const drawn = formulas.get(key);
  if (formulas.size > MAX_FORMULAS) formulas.delete(formulas.keys().next().value);
  const element = h("span", { class: isDisplay ? "math display" : "math" }, drawn?.cloneNode(true) ?? source);
  if (isDisplay && drawn) requestAnimationFrame(() => letScroll(element));
  return element;
}

function draw(latex, isDisplay) {
  if (!latex || WIDE.test(latex)) return null; // it would be drawn over its surroundings
  let known = latex.replace(LABEL, "");
  known = known.replace(ENVIRONMENT, (_, end, name, star) => (name in ENVIRONMENTS ? `\\${end}{${ENVIRONMENTS[name]}${star}}` : ""));
  if (known.includes("\\\\") && !/\\(?:begin|substack)/.test(known)) {
    const name = known.includes("&") ? "aligned" : "gathered"; // lines without an environment, as in answers
    known = `\\begin{${name}}${known}\\end{${name}}`;
  }
  const options = { displayMode: isDisplay, throwOnError: true, strict: "ignore", trust: false, maxSize: MAX_EM };
  try {
    const tree = globalThis.katex.__renderToDomTree(known, options);
    allowStyles(tree);
    return tree.toNode();
  } catch {
    return null; // not a formula, or one that is nested too deeply
  }
}

/** Lets a tree's styles be set as properties: the page's policy forbids the attribute. */
function allowStyles(node) {
  const style = node.attributes?.style;
  if (style) {
    delete node.attributes.style;
    const toNode = node.toNode.bind(node);
    node.toNode = () => {
      const element = toNode();
      element.style.cssText = style;
      return element;
    };
  }
  node.children?.forEach(allowStyles);
}

/** A formula that is wider than its place can be scrolled by keyboard. */
function letScroll(element) {
  if (element.scrollWidth <= element.clientWidth) return;
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Formula"]]) {
    element.setAttribute(name, value);
  }
}

const kept = new Map(); // by key: the runs of code, or null
const asked = new Map(); // by key: {entry, tries, isSent, listeners}
let timer = 0;

/** Calls `done` with the answer to an entry of `POST /page/render`: at once if it is known. */
function ask(entry, done) {
  const key = JSON.stringify(entry);
  if (kept.has(key)) return void done(kept.get(key));
  const waiting = asked.get(key);
  if (waiting) return void waiting.listeners.push(done);
  asked.set(key, { entry, tries: 0, isSent: false, listeners: [done] });
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
  try {
    const { code } = await postJson("page/render", { code: batch.map(([, each]) => each.entry) });
    batch.forEach(([key], at) => take(key, code[at]));
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
    for (const [key, each] of batch) {
      each.isSent = false;
      const comesAgain = (error.status === 429 || error.status === 0 || error.status === 503) && each.tries < MAX_TRIES;
      if (!comesAgain) asked.delete(key); // the text stays; the next look retries
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
    ask({ language: this.language, text }, (runs) => {
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
