// Conversations, kept in the browser. A conversation is a tree of messages: editing a message or asking again adds a
// branch beside the old one, and `chosen` selects the branch that is shown.
//
//   conversation  {id, title, created, updated, nodes: [node], chosen: {parent id or "root": node id}}; one that is a
//                 text to be continued has `text`, and no nodes
//   node          {id, parent, role, content, …}; a user's may have files: [{name, text} or {name, image: data URI}];
//                 an assistant's also has reasoning, calls, stats, finish, failure, numDropped (omitted turns)

import { contentOf } from "./attachments.js";
import { keep, parseJson, stored, storedKeys } from "./storage.js";

const PREFIX = "xserv.conversation.";
const SETTINGS = "xserv.settings";
const FORMAT = "xserv-conversations-1";

/** Characters that all conversations may take together; browsers give a page about five million. */
export const MAX_CHARACTERS = 4_000_000;
const MAX_IMPORTED_BYTES = 16_000_000;
const MAX_TITLE = 200;
const ROLES = new Set(["user", "assistant"]);

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).reduce((id, part) => id + part.toString(36), "");

/** isText  whether it is a text to be continued */
export function newConversation(isText = false) {
  const text = isText ? { text: "" } : {};
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), nodes: [], chosen: {}, ...text };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent: parent?.id ?? null, content: "", ...fields };
  conversation.nodes.push(node);
  choose(conversation, node);
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content || (node.files?.[0]?.name ?? ""));
  return node;
}

/** Renames it; returns whether the title changed. */
export function rename(conversation, text) {
  const title = text.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE);
  if (!title || title === conversation.title) return false;
  conversation.title = title;
  return true;
}

/** Whether the title or a message holds the words; `query` is in lower case. */
export function matches(conversation, query) {
  const has = (text) => text.toLowerCase().includes(query);
  if (has(conversation.title) || has(conversation.text ?? "")) return true;
  return conversation.nodes.some((node) => has(node.content) || node.files?.some((file) => has(file.name)));
}

export function choose(conversation, node) {
  conversation.chosen[node.parent ?? "root"] = node.id;
}

/** The first line, shortened. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** The branch that is shown, from the first message to the last. */
export function path(conversation) {
  const children = Map.groupBy(conversation.nodes, (node) => node.parent);
  const shown = [];
  let parent = null;
  for (let next = children.get(parent); next; next = children.get(parent)) {
    const wanted = conversation.chosen[parent ?? "root"];
    const node = next.find((candidate) => candidate.id === wanted) ?? next.at(-1);
    shown.push(node);
    parent = node.id;
  }
  return shown;
}

/** The path from the first message down to this one. */
export function pathTo(conversation, node) {
  const byId = new Map(conversation.nodes.map((each) => [each.id, each]));
  const found = [];
  for (let each = node; each; each = byId.get(each.parent)) found.unshift(each);
  return found;
}

/** The alternatives to a message, itself among them. */
export const siblings = (conversation, node) => conversation.nodes.filter((each) => each.parent === node.parent);

/** Removes a message and its descendants; returns a function that undoes it. */
export function removeNode(conversation, node) {
  const gone = new Set([node.id]);
  for (const each of conversation.nodes) if (gone.has(each.parent)) gone.add(each.id); // parents come before children
  const before = conversation.nodes;
  const chosen = { ...conversation.chosen };
  conversation.nodes = before.filter((each) => !gone.has(each.id));
  for (const [parent, child] of Object.entries(chosen)) {
    if (gone.has(parent) || gone.has(child)) delete conversation.chosen[parent];
  }
  return () => {
    const known = new Set(before);
    conversation.nodes = [...before, ...conversation.nodes.filter((each) => !known.has(each))];
    Object.assign(conversation.chosen, chosen);
  };
}

export class Store {
  constructor() {
    this.conversations = new Map();
    this.sizes = new Map(); // characters of each stored conversation
    this.removed = new Set(); // an answer still being written does not bring them back
    this.isFull = false;
    this.load();
  }

  /** The latest first. */
  list() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  get numCharacters() {
    return [...this.sizes.values()].reduce((sum, size) => sum + size, 0);
  }

  load() {
    for (const key of storedKeys("localStorage", PREFIX)) {
      const text = stored("localStorage", key);
      const conversation = readConversation(parseJson(text));
      if (!conversation) continue;
      this.conversations.set(conversation.id, conversation);
      this.sizes.set(conversation.id, text.length);
    }
  }

  /** Stores it; returns whether that worked. Unstored conversations stay until the page is left. */
  save(conversation) {
    if (this.removed.has(conversation)) return true;
    this.conversations.set(conversation.id, conversation);
    const text = JSON.stringify(conversation);
    const others = this.numCharacters - (this.sizes.get(conversation.id) ?? 0);
    this.isFull = others + text.length > MAX_CHARACTERS || !keep("localStorage", PREFIX + conversation.id, text);
    if (!this.isFull) this.sizes.set(conversation.id, text.length);
    return !this.isFull;
  }

  remove(conversation) {
    this.removed.add(conversation);
    this.conversations.delete(conversation.id);
    this.sizes.delete(conversation.id);
    this.isFull = false;
    keep("localStorage", PREFIX + conversation.id, "");
  }

  restore(conversation) {
    this.removed.delete(conversation);
    return this.save(conversation);
  }

  /** These conversations, or all, as a file for `import`. */
  exported(conversations = this.list()) {
    return JSON.stringify({ format: FORMAT, conversations }, null, 1);
  }

  /** Adds the conversations of an exported file; gives their number. Throws an `Error` in words. */
  import(text) {
    if (text.length > MAX_IMPORTED_BYTES) throw new Error("The file is larger than 16 MB.");
    const file = parseJson(text);
    if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
      throw new Error("This is not a file of conversations that this page has exported.");
    }
    const found = file.conversations.map(readConversation);
    if (found.includes(null)) throw new Error("The file holds a conversation that cannot be read.");
    for (const conversation of found) {
      if (this.conversations.has(conversation.id)) conversation.id = newId();
      if (!this.save(conversation)) {
        this.remove(conversation);
        throw new Error("There is no room for all of them: delete conversations, then import again.");
      }
    }
    return found.length;
  }
}

/** The branch that is shown, as readable text. */
export function asMarkdown(conversation) {
  if (conversation.text !== undefined) return conversation.text;
  const parts = [`# ${conversation.title || "Chat"}`];
  for (const node of path(conversation)) {
    parts.push(node.role === "user" ? "## You" : "## Answer");
    if (node.role === "user") parts.push(...picturesOf(node), contentOf(node));
    else parts.push(node.content, ...(node.calls ?? []).map((call) => `Tool call: \`${call.name}(${call.arguments})\``));
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

const picturesOf = ({ files = [] }) => files.filter((file) => file.image).map((file) => `(picture: ${file.name})`);

export function loadSettings() {
  const found = parseJson(stored("localStorage", SETTINGS));
  return found && typeof found === "object" && !Array.isArray(found) ? found : {};
}

export const saveSettings = (settings) => keep("localStorage", SETTINGS, JSON.stringify(settings));

/** A stored or imported conversation with every field of its type, or null. */
function readConversation(value) {
  if (!value || typeof value.id !== "string" || !Array.isArray(value.nodes)) return null;
  const known = new Set([null]);
  const nodes = [];
  for (const node of value.nodes) {
    const isGood =
      typeof node?.id === "string" &&
      !known.has(node.id) &&
      known.has(node.parent ?? null) &&
      ROLES.has(node.role) &&
      typeof node.content === "string";
    if (!isGood) return null;
    known.add(node.id);
    nodes.push(readNode(node));
  }
  const chosen = {};
  for (const [parent, child] of Object.entries(value.chosen ?? {})) if (known.has(child)) chosen[parent] = child;
  return {
    id: value.id.slice(0, 64),
    ...(typeof value.text === "string" ? { text: value.text } : {}),
    title: typeof value.title === "string" ? value.title.slice(0, MAX_TITLE) : "",
    created: Number(value.created) || 0,
    updated: Number(value.updated) || 0,
    nodes,
    chosen,
  };
}

function readNode(node) {
  const read = { id: node.id, parent: node.parent ?? null, role: node.role, content: node.content };
  if (typeof node.reasoning === "string") read.reasoning = node.reasoning;
  if (Array.isArray(node.files)) {
    read.files = node.files.map((file) => {
      const name = String(file?.name ?? "");
      const isPicture = typeof file?.image === "string" && /^data:image\/[\w.+-]+;base64,/.test(file.image);
      return isPicture ? { name, image: file.image } : { name, text: String(file?.text ?? "") };
    });
  }
  if (Number.isInteger(node.numDropped) && node.numDropped > 0) read.numDropped = node.numDropped;
  if (Array.isArray(node.calls)) {
    read.calls = node.calls.map((call) => ({
      id: String(call?.id ?? ""),
      name: String(call?.name ?? ""),
      arguments: String(call?.arguments ?? ""),
    }));
  }
  if (typeof node.finish === "string") read.finish = node.finish;
  if (typeof node.failure?.title === "string") {
    read.failure = { title: node.failure.title, message: String(node.failure.message ?? "") };
  }
  if (node.stats && typeof node.stats === "object") {
    read.stats = Object.fromEntries(Object.entries(node.stats).filter(([, value]) => Number.isFinite(value)));
  }
  if (read.role === "assistant" && !read.finish && !read.failure) read.finish = "interrupted"; // the page was left
  return read;
}
