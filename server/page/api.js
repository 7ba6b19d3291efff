// The server's HTTP API for the page: requests with the key, event streams, and readable errors.

import { keep, stored } from "./storage.js";

const BASE = new URL("../", import.meta.url);
const KEY_NAME = "xserv.key";

let memoryKey = ""; // if the browser has no session storage

export const apiKey = () => stored("sessionStorage", KEY_NAME) ?? memoryKey;

/** Kept for this tab only. */
export function setApiKey(key) {
  memoryKey = key;
  keep("sessionStorage", KEY_NAME, key);
}

/** A failed request. `title` and `message` are for people; `code` is OpenAI's; status 0: the server was not reached. */
export class ApiFailure extends Error {
  constructor(status, message, code = null, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
    this.title = titleOf(status, code);
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

const TITLES = {
  0: "The server cannot be reached",
  401: "This server asks for an API key",
  403: "This server asks for an API key",
  404: "The server does not know this",
  408: "The request took too long to arrive",
  413: "The message is too large",
  429: "The server is busy",
  503: "The engine is not available",
};

function titleOf(status, code) {
  if (code === "context_length_exceeded") return "This conversation is too long for the model";
  return TITLES[status] ?? (status >= 500 ? "The server failed" : "The server did not accept this");
}

/** A response with a body, or an `ApiFailure`; a request that was aborted throws as `fetch` does. */
async function request(path, options = {}) {
  const response = await fetchOf(path, options);
  if (response.ok) return response;
  throw await failureOf(response);
}

async function fetchOf(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  try {
    // Without a key of the page's own, the browser sends the one that its user entered.
    const credentials = key ? "omit" : "same-origin";
    return await fetch(new URL(path, BASE), { ...options, headers, credentials, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header|ByteString|ISO-8859-1/i.test(error.message)) {
      throw new ApiFailure(401, "The API key holds a character that no key can have.");
    }
    throw new ApiFailure(0, "No answer came. Is it still running, and are you online?");
  }
}

async function failureOf(response) {
  const retryAfterS = Number(response.headers.get("Retry-After")) || null;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: the answer of something between the page and the server
  }
  return toFailure(error, response.status, retryAfterS);
}

function toFailure(error, status, retryAfterS) {
  const given = typeof error.message === "string" ? error.message : `it answered with status ${status}.`;
  return new ApiFailure(status, given.charAt(0).toUpperCase() + given.slice(1), error.code ?? null, retryAfterS);
}

export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

export async function postJson(path, body, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  return (await request(path, options)).json();
}

/** The data of each event of `GET path`, decoded. */
export async function* getEvents(path, signal) {
  yield* eventsOf(await request(path, { signal }));
}

/** The answer of `GET /ready`, whether it is ready or not. */
export async function readiness() {
  const response = await fetchOf("ready");
  if (response.ok || response.status === 503) {
    const answer = await response.json().catch(() => ({}));
    if (typeof answer.state === "string") return answer;
    if (response.ok) return { state: "ready" };
    return { state: answer.error?.code === "draining" ? "draining" : "down" };
  }
  throw await failureOf(response);
}

/** The error as a message for people. */
export function wordsOf(error) {
  if (!(error instanceof ApiFailure)) {
    console.error(error);
    return { title: "The page failed", message: "This should not happen; the browser’s console says more." };
  }
  const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return { title: error.title, message: `${error.message}${wait}`, needsKey: error.needsKey };
}

/** The chunks of a streamed answer, up to `[DONE]`. Throws `ApiFailure` for an error inside the stream, too. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  for await (const chunk of eventsOf(response)) {
    if (chunk.error) throw toFailure(chunk.error, chunk.error.code === "engine_unavailable" ? 503 : 500, null);
    yield chunk;
  }
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isDone = false;
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) break;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") {
          isDone = true;
          return;
        }
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    if (!isDone) reader.cancel().catch(() => {}); // leaving the loop cancels the request at the server
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The connection broke off in the middle of the answer.");
  }
}
