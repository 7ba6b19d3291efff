// Markdown → elements, for a model's text: no HTML, no images, links to http and https only.
//
// Text becomes blocks (`parse`), blocks become elements (`render`). `MarkdownView` shows a text that grows: blocks
// whose source has not changed keep their elements. Nesting is bounded, and failed searches are not repeated, so that
// time is linear in the text.

import { h } from "./dom.js";
import { inline } from "./inline.js";
import { codeElement, mathElement, updateCode } from "./rendering.js";
import { MAX_LATEX, spanAround, spansOf } from "./spans.js";

const MAX_DEPTH = 12;
const MAX_COLUMNS = 64;
const MAX_MATH_LINES = 60;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const DELIMITER_CELL = /^:?-+:?$/;
const MATH = /^ *(\$\$(?!\$)|\\\[)/;
const DISPLAY_MARK = /\\\\|\$\$|\\[[\]]/g;
const TASK = /^\[([ xX])\](?:\s+|$)/;

/**
 * The blocks of a text: `{kind, raw, grows, …}`, where only `raw` and `grows` determine its look.
 * grows  more may follow, which continues the last block
 */
export function parse(text, grows = false) {
  return parseLines(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0, grows);
}

function parseLines(lines, depth, grows) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] =
      fence(lines, at) ??
      math(lines, at, grows) ??
      heading(lines, at) ??
      rule(lines, at) ??
      (depth < MAX_DEPTH ? quote(lines, at, depth, grows) ?? list(lines, at, depth, grows) : null) ??
      table(lines, at) ??
      paragraph(lines, at, depth, grows);
    block.raw = lines.slice(at, next).join("\n");
    block.grows = grows && next === lines.length;
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

/** A formula with lines of its own. */
function math(lines, at, grows) {
  const opening = MATH.exec(lines[at]);
  if (!opening) return null;
  const mark = opening[1] === "$$" ? "$$" : "\\]";
  let latex = "";
  let next = at;
  for (; next < lines.length && next < at + MAX_MATH_LINES; next += 1) {
    const line = next === at ? lines[at].slice(opening[0].length) : lines[next];
    const end = line.indexOf(mark);
    if (end === -1) {
      latex += `${line}\n`;
      continue;
    }
    const behind = line.slice(end + 2).trim();
    latex += line.slice(0, end);
    if (!latex.trim() || latex.length > MAX_LATEX || !/^[.,;:]?$/.test(behind)) return null; // of a paragraph
    return [{ kind: "math", latex: latex + behind }, next + 1];
  }
  return grows && next === lines.length ? [{ kind: "pending" }, next] : null;
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

function quote(lines, at, depth, grows) {
  const inner = [];
  let next = at;
  for (; next < lines.length && QUOTE.test(lines[next]); next += 1) inner.push(lines[next].replace(QUOTE, ""));
  return next === at ? null : [{ kind: "quote", blocks: parseLines(inner, depth + 1, grows && next === lines.length) }, next];
}

function list(lines, at, depth, grows) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const isOrdered = first[3] !== undefined;
  const indent = first[1].length;
  const items = [];
  let inner = null;
  let offset = 0; // the beginning of the item's own text
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
      inner.push(line); // a continuation line without indent
    }
    isAfterBlank = false;
  }
  while (next > at + 1 && !lines[next - 1].trim()) next -= 1; // blank lines after the list are not its own
  return [
    {
      kind: "list",
      isOrdered,
      isLoose,
      start: isOrdered ? Number(first[3]) : 1,
      items: items.map((item, index) =>
        parseLines(item, depth + 1, grows && next === lines.length && index === items.length - 1),
      ),
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

/** A row's cells; a bar after a backslash, or inside a formula, does not separate cells. */
function cells(line) {
  const found = [];
  let cell = "";
  const text = line.trim();
  const formulas = spansOf(text).filter((span) => span.kind === "math");
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    const formula = spanAround(formulas, at);
    if (formula) {
      cell += text.slice(at, formula.end);
      at = formula.end - 1;
    } else if (text[at] === "\\" && text[at + 1] === "|") cell += text[++at];
    else if (text[at] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += text[at];
  }
  if (cell.trim() || !text.endsWith("|")) found.push(cell.trim());
  return found;
}

function paragraph(lines, at, depth, grows) {
  let next = at + 1;
  let open = openMark(lines[at], null);
  while (next < lines.length) {
    const last = open === null ? -1 : lineOfMark(lines, next, open, grows);
    if (last === -1 && (!lines[next].trim() || (depth < MAX_DEPTH && startsBlock(lines[next])))) break;
    for (const end = Math.max(last, next) + 1; next < end; next += 1) open = openMark(lines[next], open);
  }
  const text = lines.slice(at, next).map((line) => line.trim()).join("\n");
  return [{ kind: "paragraph", text }, next];
}

/** The mark that would close the formula open at the end of this line, or null. */
function openMark(line, open) {
  for (const [mark] of line.matchAll(DISPLAY_MARK)) {
    if (open === null && mark === "$$") open = "$$";
    else if (open === null && mark === "\\[") open = "\\]";
    else if (mark === open) open = null;
  }
  return open;
}

/** The line with the mark, if it is near and no blank line precedes it; else -1. */
function lineOfMark(lines, from, mark, grows) {
  const limit = Math.min(lines.length, from + MAX_MATH_LINES);
  for (let at = from; at < limit; at += 1) {
    if (lines[at].includes(mark)) return at;
    if (!lines[at].trim() && !(grows && at === lines.length - 1)) return -1;
  }
  return grows && limit === lines.length ? limit - 1 : -1;
}

function startsBlock(line) {
  if ([FENCE, MATH, HEADING, RULE, QUOTE].some((opening) => opening.test(line))) return true;
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
      return codeElement(block.language, block.text);
    case "math":
      return h("p", {}, mathElement(block.latex, true, block.raw));
    case "pending":
      return h("p", {}, h("span", { class: "math display source" }, block.raw));
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, { class: `level-${block.level}` }, inline(block.text, 0, block.grows));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, block.blocks.map(render));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return h("p", {}, inline(block.text, 0, block.grows));
  }
}

function listElement(block) {
  const items = block.items.map((blocks) => {
    const [first, ...others] = blocks;
    if (first?.kind !== "paragraph") return h("li", {}, blocks.map(render));
    const task = TASK.exec(first.text);
    const box = task && taskBox(task[1] !== " ");
    const text = inline(task ? first.text.slice(task[0].length) : first.text, 0, first.grows);
    return h("li", { class: task ? "task" : null }, block.isLoose ? h("p", {}, box, text) : [box, text], others.map(render));
  });
  if (!block.isOrdered) return h("ul", {}, items);
  return h("ol", block.start === 1 ? {} : { start: block.start }, items);
}

const taskBox = (isDone) =>
  h("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" });

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
    const last = this.#shown[same];
    if (last?.kind === "code" && blocks[same]?.kind === "code" && last.language === blocks[same].language) {
      // a code block that grows keeps its scroll position and its button
      updateCode(this.#element.children[same], blocks[same].text);
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
