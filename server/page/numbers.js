// Numbers as people read them, and those of one answer.

/** 1,234 */
export const count = (value) => value.toLocaleString("en-US");

/** 85 ms, 1.24 s, 12.4 s */
export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** 85 bytes, 12 KB, 1.2 MB */
export function bytes(value) {
  if (value < 1024) return `${value} bytes`;
  return value < 1 << 20 ? `${Math.round(value / 1024)} KB` : `${(value / (1 << 20)).toFixed(1)} MB`;
}

/** 0, 48.3, 512, 12.3k */
export function rate(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || value === 0 ? count(Math.round(value)) : value.toFixed(1);
}

/** How an answer was generated, in a few phrases. */
export function describeStats({ ttftS, rate: perSecond, tokens }) {
  const parts = [];
  if (ttftS !== undefined) parts.push(`first token ${seconds(ttftS)}`);
  if (perSecond) parts.push(`${rate(perSecond)} tokens/s`);
  if (tokens) parts.push(`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
  return parts;
}

/** Measures one answer: the time to its first token, and its tokens a second after it. */
export class Clock {
  #begin = performance.now();
  #first = null;
  #tokensBefore;
  #tokensAtFirst = 0;

  /** node  holds `stats`; `resumes`: the answer continues an earlier one */
  constructor(node, resumes) {
    this.node = node;
    this.#tokensBefore = resumes ? (node.stats?.tokens ?? 0) : 0;
    if (!resumes) node.stats = {};
    node.stats ??= {};
  }

  note(chunk) {
    const { stats } = this.node;
    const now = performance.now();
    const tokens = chunk.usage?.completion_tokens ?? 0;
    const choice = chunk.choices?.[0] ?? {};
    const delta = choice.delta ?? {};
    const hasText = Boolean(
      choice.text || delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls?.length,
    );
    if (hasText && this.#first === null) {
      this.#first = now;
      this.#tokensAtFirst = tokens;
      stats.ttftS = (now - this.#begin) / 1000;
    }
    if (delta.content && this.node.reasoning && stats.thoughtS === undefined) {
      stats.thoughtS = (now - this.#begin) / 1000 - stats.ttftS;
    }
    if (tokens) stats.tokens = this.#tokensBefore + tokens;
    if (chunk.usage) {
      stats.promptTokens = chunk.usage.prompt_tokens;
      stats.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    const took = this.#first === null ? 0 : (now - this.#first) / 1000;
    if (hasText && tokens > this.#tokensAtFirst && took > 0.02) stats.rate = (tokens - this.#tokensAtFirst) / took;
  }
}
