// Markdown → elements, for a model's text: markdown-it parses, and the elements are made here of its tokens, with text
// nodes only. No HTML, no images, links to http and https only.
//
// Each formula is one private character while markdown-it reads the text, so that nothing in it is Markdown.
// `MarkdownView` shows a text that grows: blocks whose source has not changed keep their elements.

import { h } from "./dom.js";
import { codeElement, mathElement, updateCode } from "./rendering.js";
import { spansOf } from "./spans.js";

const FIRST = 0xe000;
const MAX_HIDDEN = 0xf8ff - FIRST;
const HIDDEN = /([\ue000-\uf8ff])/;
const MAX_URL_LENGTH = 2000;
const TASK = /^\[([ xX])\](?:\s+|$)/;

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true, maxNesting: 40 });
parser.disable(["code", "lheading", "reference"]);
parser.validateLink = (address) => safeUrl(address) !== null;
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
for (const scheme of ["ftp:", "mailto:", "//"]) parser.linkify.add(scheme, null);

/**
 * The blocks of a text: `{kind, raw, grows, …}`, where only these three determine a block's look.
 * grows  more may follow, which continues the last block
 */
export function parse(text, grows = false) {
  const source = text.replaceAll("\r\n", "\n");
  const spans = [];
  let hidden = "";
  let at = 0;
  for (const span of spansOf(source, grows)) {
    if (span.kind === "code" || spans.length > MAX_HIDDEN) continue;
    hidden += source.slice(at, span.begin) + String.fromCharCode(FIRST + spans.length);
    spans.push({ ...span, source: source.slice(span.begin, span.end) });
    at = span.end;
  }
  hidden += source.slice(at);
  const lines = hidden.split("\n");
  const found = [];
  let block = null;
  for (const token of parser.parse(hidden, {})) {
    if (block === null) {
      block = { kind: token.type, raw: shown(lines.slice(...token.map).join("\n"), spans), tokens: [], spans, grows: false };
      found.push(block);
    }
    block.tokens.push(token);
    if (token.level === 0 && token.nesting !== 1) block = null;
  }
  if (found.length) found.at(-1).grows = grows;
  return found;
}

const spanOf = (character, spans) => spans[character.charCodeAt(0) - FIRST];

/** The text with the sources of its formulas. */
const shown = (text, spans) =>
  text.split(HIDDEN).map((part, at) => (at % 2 ? spanOf(part, spans)?.source ?? part : part)).join("");

/** A block's element. */
export function render(block) {
  const root = h("div");
  append(root, block.tokens, block.spans);
  return root.firstChild;
}

function append(root, tokens, spans) {
  const open = [root]; // each element within the one before it
  for (const token of tokens) {
    if (token.nesting === -1) {
      if (!token.hidden) open.pop();
      continue;
    }
    if (token.hidden) continue; // a paragraph of a list without blank lines
    const element = elementOf(token, open.at(-1), spans);
    if (element) open.at(-1).append(element);
    if (token.nesting === 1) open.push(token.type === "table_open" ? element.firstChild : element);
  }
}

function elementOf(token, parent, spans) {
  switch (token.type) {
    case "inline":
      return void inline(parent, token, spans);
    case "text":
      return void parent.append(...nodesOf(token.content, spans));
    case "softbreak":
    case "hardbreak":
      return h("br");
    case "code_inline":
      return h("code", {}, shown(token.content, spans));
    case "image":
      return linkElement(shown(token.attrGet("src"), spans), shown(token.content, spans));
    case "link_open":
      return linkElement(shown(token.attrGet("href"), spans));
    case "fence":
      return codeElement(languageOf(token, spans), codeOf(token, spans));
    case "heading_open":
      return h(`h${Math.min(6, Number(token.tag[1]) + 2)}`, { class: `level-${token.tag[1]}` });
    case "table_open":
      return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table"));
    case "th_open":
    case "td_open":
      return h(token.tag, {
        scope: token.tag === "th" ? "col" : null,
        class: token.attrGet("style")?.replace("text-align:", ""),
      });
    case "ordered_list_open":
      return h("ol", { start: token.attrGet("start") });
    case "s_open":
      return h("del");
    default:
      return token.tag ? h(token.tag) : null;
  }
}

/** The text of one block; the first of a list's item may begin with a task's box. */
function inline(parent, token, spans) {
  const [first] = token.children;
  const item = parent.tagName === "P" ? parent.parentElement : parent;
  const task = item?.tagName === "LI" && item.textContent === "" && first?.type === "text" && TASK.exec(first.content);
  if (task) {
    first.content = first.content.slice(task[0].length);
    item.className = "task";
    const isDone = task[1] !== " ";
    const label = isDone ? "done" : "to do";
    parent.append(h("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": label }));
  }
  append(parent, token.children, spans);
}

/** A text's nodes: its words, and its formulas as elements. */
function nodesOf(text, spans) {
  return text.split(HIDDEN).map((part, at) => {
    const span = at % 2 ? spanOf(part, spans) : undefined;
    if (!span || span.kind === "private") return part;
    if (span.kind === "math") return mathElement(span.content, span.isDisplay, span.source);
    return h("span", { class: /^(?:\$\$|\\\[)/.test(span.source) ? "math display source" : "math source" }, span.source);
  });
}

const languageOf = (token, spans) => shown(token.info, spans).trim().split(/\s/)[0].slice(0, 40);
const codeOf = (token, spans) => shown(token.content, spans).replace(/\n$/, "");

function linkElement(address, label = null) {
  const { href } = safeUrl(address);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, label === "" ? href : label);
}

/** The address as a URL when it is one of http or https, else null. */
export function safeUrl(address) {
  try {
    const url = new URL(address);
    const isSafe = (url.protocol === "https:" || url.protocol === "http:") && url.host;
    return isSafe && address.length <= MAX_URL_LENGTH ? url : null;
  } catch {
    return null;
  }
}

/** A text that grows, shown in `element`. */
export class MarkdownView {
  #element;
  #shown = [];
  #text = null;
  #grows = false;

  constructor(element) {
    this.#element = element;
  }

  /** grows  more of the text may follow */
  update(text, grows = false) {
    if (text === this.#text && grows === this.#grows) return;
    this.#text = text;
    this.#grows = grows;
    const blocks = parse(text, grows);
    let same = 0;
    while (same < blocks.length && isSame(this.#shown[same], blocks[same])) same += 1;
    if (areOneCode(this.#shown[same], blocks[same])) {
      // a code block that grows keeps its scroll position and its button
      updateCode(this.#element.children[same], codeOf(blocks[same].tokens[0], blocks[same].spans));
      same += 1;
    }
    while (this.#element.children.length > same) this.#element.lastChild.remove();
    this.#element.append(...blocks.slice(same).map(render));
    this.#shown = blocks;
  }
}

function isSame(shown, block) {
  return shown !== undefined && shown.kind === block.kind && shown.raw === block.raw && shown.grows === block.grows;
}

function areOneCode(shown, block) {
  if (shown?.kind !== "fence" || block?.kind !== "fence") return false;
  return languageOf(shown.tokens[0], shown.spans) === languageOf(block.tokens[0], block.spans);
}
