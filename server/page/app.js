// Puts the page together: conversations, chat and text, the bar, the keys that work everywhere.

import { ApiFailure, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { TextDocument } from "./document.js";
import { byId, placeIcons } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { Sidebar, download } from "./sidebar.js";
import { Status } from "./status.js";
import { keep, stored } from "./storage.js";
import { Store, asMarkdown, newConversation } from "./store.js";

const OPEN = "xserv.open"; // the conversation that this tab shows
const NARROW = matchMedia("(max-width: 860px)");

placeIcons(document);
const store = new Store();
const settings = new Settings({
  keyChanged: () => {
    status.lookAnew();
    if (live.isShown) live.reconnect();
  },
  modeChanged: () => {
    if (isEmpty(current)) open(newConversation(settings.isText));
    showMode();
  },
});
const status = new Status({ ready: () => loadModel(), needsKey: () => settings.open(true) });
const live = new Live(() => settings.open(true));
const on = {
  changed: () => showConversation(),
  needsKey: () => status.needKey(),
  asked: (id) => live.model.addMine(id),
  failed: () => status.look(),
};
const chat = new Chat(store, () => settings.values, { ...on, suggested: (message) => composer.suggest(message) });
const text = new TextDocument(store, () => settings.values, { ...on, canSend: () => Boolean(settings.values.model) });
const composer = new Composer({
  send: (message, files) => chat.send(message, files),
  stop: () => chat.stop(),
  editLast: () => chat.editLast(),
  readsImages: () => settings.readsImages,
  canSend: () => Boolean(settings.values.model) && settings.hasChatTemplate && !chat.isRunning,
});
const sidebar = new Sidebar(store, () => current, {
  open: (conversation) => open(conversation),
  remove: (conversation) => {
    viewOf(conversation).stop(conversation);
    store.remove(conversation);
    if (conversation === current) open(newConversation(settings.isText));
  },
  renamed: () => showConversation(),
});
let current = null; // the conversation that is shown

// The model

async function loadModel() {
  try {
    const [{ data }, about] = await Promise.all([getJson("v1/models"), getJson("page/about")]);
    settings.setModels(data);
    settings.setAbout(about);
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
    if (error.needsKey) status.needKey();
    else setTimeout(loadModel, 3000);
    return;
  }
  if (settings.isText && isEmpty(current) && current.text === undefined) open(newConversation(true));
  showModel();
  showMode();
}

function showModel() {
  status.name = settings.values.model;
  byId("message").placeholder = `Ask ${settings.values.model}`;
}

function showMode() {
  byId("new-label").textContent = settings.isText ? "New text" : "New chat";
  const isChat = current.text === undefined;
  byId("no-chat").hidden = !isChat || settings.hasChatTemplate;
  byId("composer").hidden = !settings.hasChatTemplate;
  composer.attachments.showButton();
  composer.show();
  if (!isChat) text.show();
}

byId("set-model").addEventListener("change", showModel);

// The conversation that is shown: a chat, or a text

const viewOf = (conversation) => (conversation.text === undefined ? chat : text);
const isEmpty = (conversation) => !conversation.nodes.length && !conversation.text && !store.conversations.has(conversation.id);

function open(conversation) {
  current = conversation;
  keep("sessionStorage", OPEN, conversation.id);
  const isChat = conversation.text === undefined;
  for (const id of ["scroll", "composer-place"]) byId(id).hidden = !isChat;
  byId("document").hidden = isChat;
  viewOf(conversation).open(conversation);
  if (isChat) composer.open(conversation);
  showMode();
  showConversation();
  sidebar.slide(false);
  if (isChat) composer.focus();
  else text.focus();
}

function showConversation() {
  sidebar.show();
  byId("title").textContent = current.title || (current.text === undefined ? "New chat" : "New text");
  byId("export-one").disabled = isEmpty(current);
  composer.show();
}

byId("new-chat").addEventListener("click", () => open(newConversation(settings.isText)));

function exportAs(ending, mediaType, content) {
  byId("export-menu").hidePopover();
  const name = current.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  download(`${name || "conversation"}.${ending}`, mediaType, content);
}

byId("export-markdown").addEventListener("click", () => exportAs("md", "text/markdown", asMarkdown(current)));
byId("export-json").addEventListener("click", () => exportAs("json", "application/json", store.exported([current])));

// The bar

byId("open-settings").addEventListener("click", () => settings.open());

function showLive(isShown) {
  live.isShown = isShown;
  document.body.classList.toggle("with-live", isShown);
  byId("toggle-live").setAttribute("aria-pressed", String(isShown));
  history.replaceState(null, "", isShown ? "#engine" : location.pathname + location.search);
}

byId("toggle-live").addEventListener("click", () => showLive(!live.isShown));

const THEMES = ["auto", "light", "dark"];

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").title = `Theme: ${theme}`;
  byId("theme").setAttribute("aria-label", `Theme: ${theme}. Change it`);
  live.redraw();
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  keep("localStorage", "xserv.theme", next === "auto" ? "" : next);
  showTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.redraw());

// Keys that work everywhere

document.addEventListener("keydown", (event) => {
  const isInDialog = document.querySelector("dialog[open]") !== null;
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    if (!isInDialog) open(newConversation(settings.isText));
  } else if (event.key === "Escape" && !isInDialog) {
    if (sidebar.isOpen) sidebar.slide(false);
    else if (viewOf(current).isRunning) viewOf(current).stop();
  }
});

addEventListener("storage", (event) => {
  // Another tab has changed the conversations; the one on the screen stays as it is here.
  if (!event.key?.startsWith("xserv.conversation.") || chat.isRunning || text.isRunning) return;
  store.conversations.clear();
  store.sizes.clear();
  store.load();
  if (store.conversations.has(current.id)) store.conversations.set(current.id, current);
  sidebar.show();
});

/** The conversation that this tab showed last, or the latest. */
function firstConversation() {
  const id = stored("sessionStorage", OPEN);
  const found = id === null ? store.list()[0] : store.conversations.get(id);
  return found ?? { ...newConversation(settings.isText), ...(id === null ? {} : { id }) };
}

open(firstConversation());
showTheme(document.documentElement.dataset.theme ?? "auto");
showLive(location.hash === "#engine");
status.look();
if (NARROW.matches) document.activeElement?.blur();
