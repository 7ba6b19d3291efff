// Fits a conversation into the model's context: the oldest turns are left out, as in `xserv chat`.

import { postJson } from "./api.js";

const MOST_RESERVED_TOKENS = 256; // kept free for the answer, if no limit of tokens is set
const MESSAGE_TOKENS = 64; // at most, for the template's text around a message

/** How many tokens the prompt may have. */
function roomFor(request, maxModelLen) {
  return maxModelLen - Math.min(request.max_tokens ?? MOST_RESERVED_TOKENS, Math.floor(maxModelLen / 2));
}

/** Whether it surely fits: a token takes a byte or more. */
export function surelyFits(request, maxModelLen) {
  if (request.messages.some(({ content }) => typeof content !== "string")) return false; // the server counts pictures
  const encoder = new TextEncoder();
  const sizes = request.messages.map(({ content }) => encoder.encode(content).length + MESSAGE_TOKENS);
  return sizes.reduce((sum, size) => sum + size, 0) <= roomFor(request, maxModelLen);
}

/**
 * The request without the oldest turns that do not fit, and their number. The system message and the last turn
 * stay. The server counts.
 */
export async function fit(request, maxModelLen, signal) {
  const system = request.messages.filter((message) => message.role === "system");
  const rest = request.messages.slice(system.length);
  const begins = rest.flatMap((message, at) => (message.role === "user" ? [at] : []));
  if (begins.length < 2) return { request, numDropped: 0 };
  const from = (turn) => [...system, ...rest.slice(turn === 0 ? 0 : begins[turn])];
  const room = roomFor(request, maxModelLen);
  const { model, add_generation_prompt, continue_final_message } = request;
  const fits = async (turn) => {
    const asked = { model, messages: from(turn), add_generation_prompt, continue_final_message };
    return (await postJson("tokenize", asked, signal)).count <= room;
  };
  let [low, high] = [0, begins.length - 1]; // the first kept turn lies between them
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(middle)) high = middle;
    else low = middle + 1;
  }
  return { request: { ...request, messages: from(low) }, numDropped: low };
}
