// The text of one block of Markdown as nodes: emphasis, code, formulas, links to http and https alone.

import { h } from "./dom.js";
import { mathElement } from "./rendering.js";
import { runLength, spanAround, spansOf } from "./spans.js";

const MAX_DEPTH = 12;
const MAX_URL_LENGTH = 2000;
const SPECIAL = /[\\`$*_~[!<h\n]/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const AUTOLINK = /https?:\/\/[^\s<>"'`|\\^{}]{1,2001}/y;
const WORD = /[\p{L}\p{N}_]/u;
const ELEMENTS = { "*": ["em"], _: ["em"], "**": ["strong"], __: ["strong"], "***": ["strong", "em"], "~~": ["del"] };

/** The text of one block as nodes. `grows`: more of it may follow. */
export function inline(text, depth = 0, grows = false) {
  return new Inline(text, depth, grows).nodes();
}

class Inline {
  constructor(text, depth, grows) {
    this.text = text;
    this.depth = depth;
    this.spans = spansOf(text, grows);
    this.nextSpan = 0;
    this.found = [];
    this.plain = "";
    this.at = 0;
    this.missing = new Set(); // marks that are known not to be closed
    this.nextBracket = -1; // the next "](", as far as searched
    this.noLinkBefore = 0; // the end of text that looked like an address
  }

  nodes() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const special = SPECIAL.exec(this.text);
      const end = special ? special.index : this.text.length;
      this.plain += this.text.slice(this.at, end);
      this.at = end;
      if (special && !this.span() && !this.take(special[0])) {
        this.plain += special[0];
        this.at += 1;
      }
    }
    this.flush();
    return this.found;
  }

  flush() {
    if (this.plain) this.found.push(this.plain);
    this.plain = "";
  }

  add(node, end) {
    this.flush();
    this.found.push(node);
    this.at = end;
    return true;
  }

  /** Takes a formula or code if one begins here; returns whether it did. */
  span() {
    const { spans, at } = this;
    while (this.nextSpan < spans.length && spans[this.nextSpan].begin < at) this.nextSpan += 1;
    const span = spans[this.nextSpan];
    if (span?.begin !== at) return false;
    return this.add(spanElement(span, this.text), span.end);
  }

  /** Takes another element if one begins here; returns whether it did. */
  take(character) {
    switch (character) {
      case "\\":
        if (!PUNCTUATION.test(this.text[this.at + 1] ?? "")) return false;
        this.plain += this.text[this.at + 1];
        this.at += 2;
        return true;
      case "`":
        return this.unclosed();
      case "$":
        return false;
      case "\n":
        return this.add(h("br"), this.at + 1);
      case "[":
        return this.link(this.at);
      case "!":
        return this.text[this.at + 1] === "[" && this.link(this.at + 1);
      case "<":
        return this.autolink(this.at + 1);
      case "h":
        return !WORD.test(this.text[this.at - 1] ?? " ") && this.autolink(this.at);
      default:
        return this.emphasis(character);
    }
  }

  unclosed() {
    const length = runLength(this.text, this.at);
    this.plain += "`".repeat(length);
    this.at += length;
    return true;
  }

  emphasis(character) {
    const run = runLength(this.text, this.at);
    const isWordBefore = WORD.test(this.text[this.at - 1] ?? " ");
    const lengths = character === "~" ? [2] : [3, 2, 1];
    for (const length of this.depth < MAX_DEPTH ? lengths : []) {
      const mark = character.repeat(length);
      const begin = this.at + length;
      if (length > run || !ELEMENTS[mark] || /\s|^$/.test(this.text[begin] ?? "")) continue;
      if (character === "_" && isWordBefore) continue;
      const end = this.closing(mark, begin);
      if (end === -1) continue;
      const children = inline(this.text.slice(begin, end), this.depth + 1);
      const node = ELEMENTS[mark].reduceRight((inside, tag) => [h(tag, {}, inside)], children)[0];
      return this.add(node, end + length);
    }
    this.plain += character.repeat(run);
    this.at += run;
    return true;
  }

  /** The index of the closing mark, or -1. It follows no space, and is not part of a longer run. */
  closing(mark, begin) {
    if (this.missing.has(mark)) return -1;
    let end = this.text.indexOf(mark, begin + 1);
    while (end !== -1) {
      const span = spanAround(this.spans, end); // a closing mark inside a formula or code belongs to it
      if (span) {
        end = this.text.indexOf(mark, span.end);
        continue;
      }
      const run = runLength(this.text, end);
      const before = this.text[end - 1];
      const fits = run === mark.length || (mark.length === 2 && run === 3) || (mark.length === 1 && run === 3);
      const isInWord = mark[0] === "_" && WORD.test(this.text[end + run] ?? " ");
      if (fits && !/\s/.test(before) && before !== "\\" && !isInWord) return end + run - mark.length;
      end = this.text.indexOf(mark, end + run);
    }
    this.missing.add(mark);
    return -1;
  }

  /** `[label](url)`; an image is shown as a link to it. */
  link(bracket) {
    if (this.nextBracket < bracket) {
      const next = this.text.indexOf("](", bracket);
      this.nextBracket = next === -1 ? Infinity : next;
    }
    const middle = this.nextBracket;
    if (middle === Infinity || middle - bracket > MAX_URL_LENGTH || this.depth >= MAX_DEPTH) return false;
    const label = this.text.slice(bracket + 1, middle);
    if (label.includes("[") || label.includes("]")) return false;
    const end = closingParenthesis(this.text, middle + 2);
    if (end === -1) return false;
    const url = safeUrl(this.text.slice(middle + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, ""));
    if (url === null) return false;
    return this.add(linkElement(url, label.trim() ? inline(label, MAX_DEPTH) : [url.href]), end + 1);
  }

  autolink(begin) {
    if (begin < this.noLinkBefore || this.isInLabel) return false;
    AUTOLINK.lastIndex = begin;
    let address = AUTOLINK.exec(this.text)?.[0];
    if (!address) return false;
    const end = begin + address.length;
    const isBracketed = begin > this.at;
    if (!isBracketed) address = trimAddress(address);
    const isClosed = !isBracketed || this.text[end] === ">";
    const url = isClosed && address.length <= MAX_URL_LENGTH ? safeUrl(address) : null;
    if (url === null) {
      if (!isBracketed) this.noLinkBefore = end;
      return false;
    }
    return this.add(linkElement(url, [address]), begin + address.length + (isBracketed ? 1 : 0));
  }

  /** A link's label holds no further links. */
  get isInLabel() {
    return this.depth >= MAX_DEPTH;
  }
}

function spanElement(span, text) {
  if (span.kind === "code") return h("code", {}, span.content);
  if (span.kind === "pending") return h("span", { class: "math source" }, span.content);
  return mathElement(span.content, span.isDisplay, text.slice(span.begin, span.end));
}

function linkElement(url, children) {
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href };
  return h("a", attributes, children);
}

/** The address as a URL when it is one of http or https, else null. */
export function safeUrl(address) {
  try {
    const url = new URL(address);
    return (url.protocol === "https:" || url.protocol === "http:") && url.host ? url : null;
  } catch {
    return null;
  }
}

/** Without the full stop, comma or bracket of the surrounding sentence. */
function trimAddress(address) {
  let end = address.length;
  while (end > 0) {
    const last = address[end - 1];
    const isOpened = last === ")" && address.lastIndexOf("(", end - 1) !== -1;
    if (!".,;:!?)*_~]".includes(last) || isOpened) break;
    end -= 1;
  }
  return address.slice(0, end);
}

function closingParenthesis(text, begin) {
  let depth = 0;
  const limit = Math.min(text.length, begin + MAX_URL_LENGTH);
  for (let at = begin; at < limit; at += 1) {
    if (text[at] === "(") depth += 1;
    else if (text[at] === ")" && depth-- === 0) return at;
    else if (text[at] === "\n") return -1;
  }
  return -1;
}
