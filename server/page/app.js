// Puts the page together: the list of conversations, the bar, the composer, the keys.

import { ApiFailure, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h, iconButton, placeIcons, toast } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { MAX_CHARACTERS, Store, newConversation } from "./store.js";

const MAX_LISTED = 200;
const NARROW = matchMedia("(max-width: 860px)");

placeIcons(document);
const store = new Store();
const settings = new Settings(() => {
  loadModels();
  if (live.isShown) live.reconnect();
});
const chat = new Chat(store, () => settings.values, {
  changed: () => showList(),
  needsKey: () => settings.open(true),
  asked: (id) => live.model.addMine(id),
});
const live = new Live(() => settings.open(true));

// The model

async function loadModels() {
  const place = byId("model");
  try {
    const { data } = await getJson("v1/models");
    settings.setModels(data.map((model) => model.id));
    place.textContent = settings.values.model;
    place.dataset.state = "ready";
    byId("message").placeholder = `Ask ${settings.values.model}`;
    showSend();
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
    place.textContent = error.needsKey ? "key needed" : error.title.toLowerCase();
    place.dataset.state = "failed";
    if (error.needsKey) settings.open(true);
    else setTimeout(loadModels, 3000);
  }
}

byId("set-model").addEventListener("change", () => (byId("model").textContent = settings.values.model));

// The list of conversations

function showList() {
  const now = Date.now();
  const items = store.list().slice(0, MAX_LISTED).map((conversation) => {
    const isCurrent = conversation === chat.conversation;
    const title = conversation.title || "New chat";
    return h(
      "li",
      { class: isCurrent ? "current" : null },
      h(
        "button",
        { type: "button", class: "conversation", "aria-current": isCurrent ? "true" : null, click: () => open(conversation) },
        h("span", {}, title),
        h("time", { datetime: new Date(conversation.updated).toISOString() }, ago(now - conversation.updated)),
      ),
      iconButton("trash", `Delete “${title}”`, () => remove(conversation)),
    );
  });
  byId("conversations").replaceChildren(...items);
  byId("export").disabled = items.length === 0;
  const place = byId("storage");
  const share = store.numCharacters / MAX_CHARACTERS;
  place.hidden = !store.isFull && share < 0.8;
  place.classList.toggle("full", store.isFull);
  place.textContent = store.isFull
    ? "The browser’s storage for this page is full: the latest messages are not kept. Export or delete conversations."
    : `${Math.round(share * 100)} % of the room for conversations is taken.`;
}

function ago(milliseconds) {
  const minutes = Math.floor(milliseconds / 60000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h`;
  return `${Math.floor(minutes / 1440)} d`;
}

function open(conversation) {
  chat.open(conversation);
  showList();
  showSidebar(false);
  byId("message").focus();
}

function remove(conversation) {
  chat.stop(conversation);
  store.remove(conversation);
  if (conversation === chat.conversation) chat.open(newConversation());
  showList();
  toast(`“${conversation.title || "New chat"}” was deleted.`, {
    label: "Undo",
    run: () => {
      store.restore(conversation);
      open(conversation);
    },
  });
}

byId("new-chat").addEventListener("click", () => open(newConversation()));

byId("export").addEventListener("click", () => {
  const address = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  h("a", { href: address, download: `xserv-conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
});

byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const number = store.import(await file.text());
    toast(number === 1 ? "One conversation was imported." : `${number} conversations were imported.`);
  } catch (error) {
    toast(error.message);
  }
  showList();
});

// The list as a drawer on narrow screens

function showSidebar(isOpen) {
  const isDrawer = NARROW.matches;
  byId("sidebar").classList.toggle("open", isOpen && isDrawer);
  byId("sidebar").inert = isDrawer && !isOpen;
  byId("main").inert = isDrawer && isOpen;
  byId("scrim").hidden = !(isDrawer && isOpen);
  byId("open-sidebar").setAttribute("aria-expanded", String(isOpen && isDrawer));
}

byId("open-sidebar").addEventListener("click", () => (showSidebar(true), byId("close-sidebar").focus()));
byId("close-sidebar").addEventListener("click", () => (showSidebar(false), byId("open-sidebar").focus()));
byId("scrim").addEventListener("click", () => showSidebar(false));
NARROW.addEventListener("change", () => showSidebar(false));

// The composer

const message = byId("message");

function showSend() {
  byId("send").disabled = !message.value.trim() || !settings.values.model;
  message.rows = 1;
  message.rows = Math.max(1, Math.min(10, Math.floor((message.scrollHeight - 16) / 24)));
}

function send() {
  const text = message.value.trim();
  if (!text || chat.isRunning || !settings.values.model) return;
  message.value = "";
  showSend();
  chat.send(text);
}

message.addEventListener("input", showSend);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !message.value && !chat.isRunning) {
    event.preventDefault();
    chat.editLast();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => (chat.stop(), message.focus()));

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
  try {
    if (next === "auto") localStorage.removeItem("xserv.theme");
    else localStorage.setItem("xserv.theme", next);
  } catch {
    // it holds until the page is left
  }
  showTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.redraw());

// Keys that work everywhere

document.addEventListener("keydown", (event) => {
  const isInDialog = document.querySelector("dialog[open]") !== null;
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    if (!isInDialog) open(newConversation());
  } else if (event.key === "Escape" && !isInDialog) {
    if (byId("sidebar").classList.contains("open")) showSidebar(false);
    else if (chat.isRunning) chat.stop();
  }
});

addEventListener("storage", (event) => {
  // Another tab has changed the conversations; the one on the screen stays as it is here.
  if (!event.key?.startsWith("xserv.conversation.") || chat.isRunning) return;
  const current = chat.conversation;
  store.conversations.clear();
  store.sizes.clear();
  store.load();
  if (store.conversations.has(current.id)) store.conversations.set(current.id, current);
  showList();
});

const latest = store.list()[0];
if (latest) chat.open(latest);
showTheme(document.documentElement.dataset.theme ?? "auto");
showSidebar(false);
showList();
showLive(location.hash === "#engine");
loadModels();
if (!NARROW.matches) message.focus();
