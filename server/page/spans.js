// The parts of a text that Markdown leaves alone: formulas and code.
//
// Formulas stand in \( … \), \[ … \], $$ … $$ or $ … $. A single dollar sign opens one only if no space follows it and
// no word precedes it; the next one closes it, if it follows no space and stands at the end of a word. So amounts of
// money stay text. A blank line ends the search for a closing mark, except in a display formula that begins a line.

const MAX_LATEX = 4000;
const MAX_DOLLAR = 1000;
const MAX_PENDING = 300; // after a lone dollar sign, which may not belong to a formula

const OPENER = /[\\`$\ue000-\uf8ff]|~{3,}/g;
const BLANK_LINE = /\n[ \t>]*\n/g;
const MARGIN = /^[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*$/; // of a line whose text begins: quotes and items of lists
const BLOCK = /\n[ \t]*(?:[-+*>#|]|\d{1,9}[.)])/;
const WORD = /[\p{L}\p{N}_$]/u;
const GOES_ON = /^(?!(?:th|st|nd|rd|s|d)\b)[\p{L}\p{N}_$]/u; // "the $n$th" is a formula, "$HOME/$USER" is none
const PROSE = /[€£¥]|[A-Za-z]{2,}\s|\s[A-Za-z]{2,}|[A-Za-z]{4,}/;
const NOTATION = /[\\^_={}]/;
const LINE_END = /^([.,;:]?)[ \t]*(?:\n|$)/;

/**
 * The spans of a text, in their order: {kind, begin, end, content, isDisplay}; kind is "math", "code", "pending", or
 * "private" for a character of private use.
 * grows  more may follow: an unclosed mark is a pending formula up to the end
 */
export function spansOf(text, grows = false) {
  return [...new Scanner(text, grows).spans()];
}

class Scanner {
  #missing = new Set(); // marks that the paragraph does not close
  #paragraphEnd = 0;

  constructor(text, grows) {
    this.text = text;
    this.grows = grows;
  }

  *spans() {
    for (let at = 0; ; ) {
      OPENER.lastIndex = at;
      const opener = OPENER.exec(this.text);
      if (!opener) return;
      const span = this.#spanAt(opener.index, opener[0]);
      if (span.kind) yield { ...span, begin: opener.index };
      at = span.end;
    }
  }

  #spanAt(begin, opener) {
    const { text } = this;
    if (begin >= this.#paragraphEnd) this.#enterParagraph(begin);
    switch (opener) {
      case "\\":
        if (text[begin + 1] === "(") return this.#delimited(begin, "\\)", false);
        if (text[begin + 1] === "[") return this.#delimited(begin, "\\]", true);
        return { end: begin + 2 };
      case "$":
        if (text.startsWith("$$$", begin)) return { end: begin + runLength(text, begin) }; // the price of a restaurant
        return text[begin + 1] === "$" ? this.#delimited(begin, "$$", true) : this.#dollars(begin);
      case "`":
        return this.#code(begin, "`".repeat(runLength(text, begin)));
      default:
        return opener[0] === "~" ? this.#code(begin, opener) : { kind: "private", end: begin + 1, content: opener };
    }
  }

  #enterParagraph(begin) {
    BLANK_LINE.lastIndex = begin;
    this.#paragraphEnd = BLANK_LINE.exec(this.text)?.index ?? this.text.length;
    this.#missing.clear();
  }

  /** What stands in the line before this place. */
  #margin(at) {
    const before = this.text.slice(Math.max(0, at - 200), at);
    return before.slice(before.lastIndexOf("\n") + 1);
  }

  #find(mark, from, limit) {
    if (this.#missing.has(mark)) return -1;
    const found = this.text.slice(from, limit).indexOf(mark);
    if (found === -1 && limit >= this.#paragraphEnd) this.#missing.add(mark);
    return found === -1 ? -1 : from + found;
  }

  /** A formula between marks of two characters. */
  #delimited(begin, mark, isDisplay) {
    const { text } = this;
    const from = begin + 2;
    const limit = from + MAX_LATEX + mark.length;
    const margin = isDisplay ? this.#margin(begin) : "x";
    const isAlone = MARGIN.test(margin);
    let close = this.#find(mark, from, Math.min(limit, this.#paragraphEnd));
    let tail = close === -1 ? null : LINE_END.exec(text.slice(close + 2, close + 10));
    if (close === -1 && isAlone) {
      close = text.slice(from, limit).indexOf(mark);
      if (close !== -1) {
        close += from;
        tail = LINE_END.exec(text.slice(close + 2, close + 10));
        if (!tail) return { end: from };
      }
    }
    if (close === -1) return this.#unclosed(begin, from, isAlone ? text.length : this.#paragraphEnd, MAX_LATEX);
    const quoted = margin.includes(">") ? /\n[ \t]*(?:> ?)+/g : null;
    const content = quoted ? text.slice(from, close).replace(quoted, "\n") : text.slice(from, close);
    if (!content.trim()) return { end: from };
    const stop = isAlone && tail ? tail[1] : ""; // a full stop stands in the formula's line
    return { kind: "math", end: close + 2 + stop.length, content: content + stop, isDisplay };
  }

  #dollars(begin) {
    const { text } = this;
    const nothing = { end: begin + 1 };
    const next = text[begin + 1] ?? " ";
    if (/\s/.test(next) || WORD.test(text[begin - 1] ?? " ")) return nothing;
    const limit = Math.min(begin + MAX_DOLLAR + 2, this.#paragraphEnd);
    const rest = text.slice(begin + 1, limit);
    let length = rest.indexOf("$");
    while (length > 0 && rest[length - 1] === "\\") length = rest.indexOf("$", length + 1);
    if (length === -1) return /\d/.test(next) ? nothing : this.#unclosed(begin, begin + 1, this.#paragraphEnd, MAX_PENDING);
    const content = rest.slice(0, length);
    const end = begin + length + 2;
    const isClosed = !/\s$/.test(content) && !GOES_ON.test(text.slice(end, end + 3)) && !BLOCK.test(content);
    const isAmount = /^\d/.test(content) && !NOTATION.test(content) && PROSE.test(content);
    return isClosed && !isAmount ? { kind: "math", end, content, isDisplay: false } : nothing;
  }

  #unclosed(begin, end, limit, most) {
    const { text, grows } = this;
    if (!grows || limit < text.length || text.length - begin > most) return { end };
    return { kind: "pending", end: text.length, content: text.slice(begin) };
  }

  /** A span of code, or a block of it if the mark has three characters and begins a line. */
  #code(begin, mark) {
    const { text } = this;
    const from = begin + mark.length;
    if (mark.length >= 3 && MARGIN.test(this.#margin(begin))) {
      const closing = new RegExp(`\\n[ \\t>]*${mark}${mark[0]}*[ \\t]*(?=\\n|$)`, "g");
      closing.lastIndex = from;
      const found = closing.exec(text);
      return { kind: "code", end: found ? closing.lastIndex : text.length };
    }
    if (mark[0] === "~" || this.#missing.has(mark)) return { end: from };
    let close = text.indexOf(mark, from);
    while (close !== -1 && close < this.#paragraphEnd && runLength(text, close) !== mark.length) {
      close = text.indexOf(mark, close + runLength(text, close));
    }
    if (close !== -1 && close < this.#paragraphEnd) return { kind: "code", end: close + mark.length };
    this.#missing.add(mark);
    return { end: from };
  }
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}
