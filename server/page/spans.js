// The parts of a text that Markdown leaves alone: formulas and code.
//
// Formulas stand in \( … \), \[ … \], $$ … $$ or $ … $. A single dollar sign opens one only if no space follows it and
// no word precedes it; the next one closes it, if it follows no space and stands at the end of a word. So amounts of
// money stay text.

export const MAX_LATEX = 4000;
const MAX_DOLLAR = 1000;
const MAX_PENDING = 300; // after a lone dollar sign, which may not belong to a formula

const OPENER = /[\\`$]/g;
const WORD = /[\p{L}\p{N}_$]/u;
const GOES_ON = /^(?!(?:th|st|nd|rd|s|d)\b)[\p{L}\p{N}_$]/u; // "the $n$th" is a formula, "$HOME/$USER" is none
const PROSE = /[€£¥]|[A-Za-z]{2,}\s|\s[A-Za-z]{2,}|[A-Za-z]{4,}/;
const NOTATION = /[\\^_={}]/;

/**
 * The spans of a text, in their order: {kind, begin, end, content, isDisplay}; kind is "math", "code", or "pending".
 * grows  more may follow: an unclosed mark is a pending formula up to the end
 */
export function spansOf(text, grows = false) {
  const found = [];
  const missing = new Set(); // marks that are known not to be closed
  for (let at = 0; ; ) {
    OPENER.lastIndex = at;
    const opener = OPENER.exec(text);
    if (!opener) return found;
    const span = spanAt(text, opener.index, missing, grows);
    if (span.kind) found.push({ ...span, begin: opener.index });
    at = span.end;
  }
}

function spanAt(text, begin, missing, grows) {
  switch (text[begin]) {
    case "\\":
      if (text[begin + 1] === "(") return delimited(text, begin, "\\)", false, missing, grows);
      if (text[begin + 1] === "[") return delimited(text, begin, "\\]", true, missing, grows);
      return { end: begin + 2 };
    case "`":
      return codeSpan(text, begin, missing);
    default:
      if (text.startsWith("$$$", begin)) return { end: begin + runLength(text, begin) }; // the price of a restaurant
      if (text[begin + 1] === "$") return delimited(text, begin, "$$", true, missing, grows);
      return dollarSpan(text, begin, grows);
  }
}

/** A formula between marks of two characters. */
function delimited(text, begin, mark, isDisplay, missing, grows) {
  const from = begin + 2;
  const close = missing.has(mark) ? -1 : text.indexOf(mark, from);
  if (close === -1) {
    missing.add(mark);
    return grows && text.length - begin <= MAX_LATEX ? pending(text, begin) : { end: from };
  }
  const content = text.slice(from, close);
  if (!content.trim() || content.length > MAX_LATEX) return { end: from };
  return { kind: "math", end: close + 2, content, isDisplay };
}

function dollarSpan(text, begin, grows) {
  const nothing = { end: begin + 1 };
  const next = text[begin + 1] ?? " ";
  if (/\s/.test(next) || WORD.test(text[begin - 1] ?? " ")) return nothing;
  let close = text.indexOf("$", begin + 1);
  while (close !== -1 && text[close - 1] === "\\") close = text.indexOf("$", close + 1);
  if (close === -1) {
    const isFormula = grows && !/\d/.test(next) && text.length - begin <= MAX_PENDING;
    return isFormula ? pending(text, begin) : nothing;
  }
  const content = text.slice(begin + 1, close);
  const isClosed = !/\s$/.test(content) && !GOES_ON.test(text.slice(close + 1, close + 4));
  const isAmount = /^\d/.test(content) && !NOTATION.test(content) && PROSE.test(content);
  if (!isClosed || isAmount || content.length > MAX_DOLLAR) return nothing;
  return { kind: "math", end: close + 1, content, isDisplay: false };
}

function codeSpan(text, begin, missing) {
  const length = runLength(text, begin);
  const mark = "`".repeat(length);
  const from = begin + length;
  let close = missing.has(mark) ? -1 : text.indexOf(mark, from);
  while (close !== -1 && runLength(text, close) !== length) {
    close = text.indexOf(mark, close + runLength(text, close));
  }
  if (close === -1) {
    missing.add(mark);
    return { end: from };
  }
  const content = text.slice(from, close).replaceAll("\n", " ");
  const isPadded = content.startsWith(" ") && content.endsWith(" ") && content.trim();
  return { kind: "code", end: close + length, content: isPadded ? content.slice(1, -1) : content };
}

const pending = (text, begin) => ({ kind: "pending", end: text.length, content: text.slice(begin) });

/** The span that this place lies in, or undefined. */
export function spanAround(spans, at) {
  let low = 0;
  let high = spans.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    const span = spans[middle];
    if (at < span.begin) high = middle - 1;
    else if (at >= span.end) low = middle + 1;
    else return span;
  }
  return undefined;
}

export function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}
