// Markdown → elements, for text that a model wrote: no HTML, no images, links to http and https alone.
//
// Text becomes blocks (`parse`), blocks become elements (`render`). `MarkdownView` shows a text that grows: blocks whose
// source has not changed keep their elements. Nesting is bounded, and no search is repeated that has failed once, so
// that time stays in proportion to the text.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12;
const MAX_URL_LENGTH = 2000;
const MAX_COLUMNS = 64;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const DELIMITER_CELL = /^:?-+:?$/;

/** The blocks of a text: `{kind, raw, …}`, where `raw` is the source that alone decides how it looks. */
export function parse(text) {
  return parseLines(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

function parseLines(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] =
      fence(lines, at) ??
      heading(lines, at) ??
      rule(lines, at) ??
      (depth < MAX_DEPTH ? quote(lines, at, depth) ?? list(lines, at, depth) : null) ??
      table(lines, at) ??
      paragraph(lines, at, depth);
    block.raw = lines.slice(at, next).join("\n");
    found.push(block);
    at = next;
  }
  return found;
}

function fence(lines, at) {
  const opening = FENCE.exec(lines[at]);
  if (!opening) return null;
  const mark = opening[1];
  const indent = lines[at].indexOf(mark);
  const content = [];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) {
      next += 1;
      break;
    }
    content.push(dedent(lines[next], indent));
  }
  return [{ kind: "code", language: opening[2].trim().split(/\s/)[0].slice(0, 40), text: content.join("\n") }, next];
}

function heading(lines, at) {
  const opening = HEADING.exec(lines[at]);
  if (!opening) return null;
  const text = lines[at].slice(opening[0].length).trim().replace(/(^|\s)#+$/, "").trim();
  return [{ kind: "heading", level: opening[1].length, text }, at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [{ kind: "rule" }, at + 1] : null;
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length && QUOTE.test(lines[next]); next += 1) inner.push(lines[next].replace(QUOTE, ""));
  return next === at ? null : [{ kind: "quote", blocks: parseLines(inner, depth + 1) }, next];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const isOrdered = first[3] !== undefined;
  const indent = first[1].length;
  const items = [];
  let inner = null;
  let offset = 0; // where the item's own text begins
  let isLoose = false;
  let isAfterBlank = false;
  let next = at;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) {
      isAfterBlank = true;
      inner.push("");
      continue;
    }
    const margin = line.length - line.trimStart().length;
    const marker = ITEM.exec(line);
    if (marker && margin <= indent + 1 && !RULE.test(line)) {
      if ((marker[3] !== undefined) !== isOrdered || margin < indent) break;
      isLoose ||= isAfterBlank;
      inner = [line.slice(marker[0].length)];
      offset = marker[0].length;
      items.push(inner);
    } else if (margin > indent) {
      inner.push(dedent(line, offset));
    } else if (isAfterBlank || startsBlock(line)) {
      break;
    } else {
      inner.push(line); // a line that goes on without its indent
    }
    isAfterBlank = false;
  }
  while (next > at + 1 && !lines[next - 1].trim()) next -= 1; // blank lines behind the list are not its own
  return [
    {
      kind: "list",
      isOrdered,
      isLoose,
      start: isOrdered ? Number(first[3]) : 1,
      items: items.map((item) => parseLines(item, depth + 1)),
    },
    next,
  ];
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const header = cells(lines[at]);
  const delimiters = cells(lines[at + 1]);
  if (header.length !== delimiters.length || header.length > MAX_COLUMNS) return null;
  if (!delimiters.every((cell) => DELIMITER_CELL.test(cell))) return null;
  const align = delimiters.map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : cell.startsWith(":") ? "left" : null,
  );
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) {
    const row = cells(lines[next]);
    rows.push(header.map((_, column) => row[column] ?? ""));
  }
  return [{ kind: "table", align, header, rows }, next];
}

/** A row's cells; a bar behind a backslash is none between cells. */
function cells(line) {
  const found = [];
  let cell = "";
  const text = line.trim();
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") cell += text[++at];
    else if (text[at] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += text[at];
  }
  if (cell.trim() || !text.endsWith("|")) found.push(cell.trim());
  return found;
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !(depth < MAX_DEPTH && startsBlock(lines[next]))) next += 1;
  const text = lines.slice(at, next).map((line) => line.trim()).join("\n");
  return [{ kind: "paragraph", text }, next];
}

function startsBlock(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && (item[3] === undefined || item[3] === "1") && item[0].length < line.length;
}

function dedent(line, width) {
  let at = 0;
  while (at < width && line[at] === " ") at += 1;
  return line.slice(at);
}

/** A block's element. */
export function render(block) {
  switch (block.kind) {
    case "code":
      return codeElement(block);
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, { class: `level-${block.level}` }, inline(block.text));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, block.blocks.map(render));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return h("p", {}, inline(block.text));
  }
}

function codeElement(block) {
  const code = h("code", {}, block.text);
  const figure = h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, block.language || "text"), copyButton(() => code.textContent, "Copy code")),
    h("pre", { tabindex: "0", "aria-label": block.language ? `Code, ${block.language}` : "Code" }, code),
  );
  return figure;
}

function listElement(block) {
  const items = block.items.map((blocks) => {
    const [first, ...others] = blocks;
    const isTight = !block.isLoose && first?.kind === "paragraph";
    return h("li", {}, isTight ? [inline(first.text), others.map(render)] : blocks.map(render));
  });
  if (!block.isOrdered) return h("ul", {}, items);
  return h("ol", block.start === 1 ? {} : { start: block.start }, items);
}

function tableElement(block) {
  const row = (tag, texts) =>
    h("tr", {}, texts.map((text, column) => {
      const attributes = tag === "th" ? { scope: "col" } : {};
      return h(tag, { ...attributes, class: block.align[column] }, inline(text));
    }));
  return h(
    "div",
    { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", block.header)), h("tbody", {}, block.rows.map((r) => row("td", r)))),
  );
}

const SPECIAL = /[\\`*_~[!<h\n]/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const AUTOLINK = /https?:\/\/[^\s<>"'`|\\^{}]{1,2001}/y;
const WORD = /[\p{L}\p{N}_]/u;
const ELEMENTS = { "*": ["em"], _: ["em"], "**": ["strong"], __: ["strong"], "***": ["strong", "em"], "~~": ["del"] };

/** The text of one block as nodes. */
export function inline(text, depth = 0) {
  return new Inline(text, depth).nodes();
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.found = [];
    this.plain = "";
    this.at = 0;
    this.missing = new Set(); // closing marks that do not come any more
    this.nextBracket = -1; // where the next "](" is, as far as looked
    this.noLinkBefore = 0; // the end of what looked like an address and was none
  }

  nodes() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const special = SPECIAL.exec(this.text);
      const end = special ? special.index : this.text.length;
      this.plain += this.text.slice(this.at, end);
      this.at = end;
      if (special && !this.take(special[0])) {
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

  /** Whether something begins here; then it has been taken. */
  take(character) {
    switch (character) {
      case "\\":
        if (!PUNCTUATION.test(this.text[this.at + 1] ?? "")) return false;
        this.plain += this.text[this.at + 1];
        this.at += 2;
        return true;
      case "`":
        return this.codeSpan();
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

  codeSpan() {
    const length = runLength(this.text, this.at);
    const mark = "`".repeat(length);
    const begin = this.at + length;
    let end = this.missing.has(mark) ? -1 : this.text.indexOf(mark, begin);
    while (end !== -1 && runLength(this.text, end) !== length) {
      end = this.text.indexOf(mark, end + runLength(this.text, end));
    }
    if (end === -1) {
      this.missing.add(mark);
      this.plain += mark;
      this.at = begin;
      return true;
    }
    const content = this.text.slice(begin, end).replaceAll("\n", " ");
    const isPadded = content.startsWith(" ") && content.endsWith(" ") && content.trim();
    return this.add(h("code", {}, isPadded ? content.slice(1, -1) : content), end + length);
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

  /** Where the mark that closes is, or -1. It follows no space, and is no part of a longer run. */
  closing(mark, begin) {
    if (this.missing.has(mark)) return -1;
    let end = this.text.indexOf(mark, begin + 1);
    while (end !== -1) {
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

  /** The label of a link holds no further links. */
  get isInLabel() {
    return this.depth >= MAX_DEPTH;
  }
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

/** Without the full stop, comma or bracket that belongs to the sentence around it. */
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

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** A text that grows, shown in `element`. */
export class MarkdownView {
  #element;
  #shown = [];
  #text = null;

  constructor(element) {
    this.#element = element;
  }

  update(text) {
    if (text === this.#text) return;
    this.#text = text;
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && isSame(this.#shown[same], blocks[same])) same += 1;
    const last = this.#shown[same];
    if (last?.kind === "code" && blocks[same]?.kind === "code" && last.language === blocks[same].language) {
      // a code block that grows keeps its scroll position and its button
      this.#element.children[same].querySelector("code").textContent = blocks[same].text;
      same += 1;
    }
    while (this.#element.children.length > same) this.#element.lastChild.remove();
    this.#element.append(...blocks.slice(same).map(render));
    this.#shown = blocks;
  }
}

function isSame(shown, block) {
  return shown !== undefined && shown.kind === block.kind && shown.raw === block.raw;
}
