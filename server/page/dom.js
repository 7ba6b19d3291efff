// Elements, icons and the clipboard. Text is inserted as text nodes only; nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes, listeners (functions, by event name), then children: nodes or strings. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

// 20 × 20, stroked with the text's colour.
const ICONS = {
  menu: "M3 5.5h14M3 10h14M3 14.5h9",
  plus: "M10 4v12M4 10h12",
  send: "M10 16V4.5M5 9.2l5-5 5 5",
  stop: "M6 6h8v8H6z",
  copy: "M7.5 7.5h8v8h-8zM12.5 7.5V4.5h-8v8h3",
  check: "M4.5 10.5l3.7 3.7 7.3-8",
  retry: "M15.5 8.5A6 6 0 1 0 16 11.5M16 4.5v4h-4",
  edit: "M4.5 15.5l.7-3.2 7.8-7.8 2.5 2.5-7.8 7.8zM11.5 6l2.5 2.5",
  trash: "M4.5 6h11M8 6V4h4v2M6 6l.7 10h6.6L14 6M8.8 9v4.2M11.2 9v4.2",
  settings: "M3.5 6.5h7M14.5 6.5h2M3.5 13.5h2M9.5 13.5h7M12.5 4.5v4M7.5 11.5v4",
  activity: "M2.5 10.5h3.3L8 4.5l4 11 2.2-5h3.3",
  theme: "M10 3.5a6.5 6.5 0 1 0 0 13zM10 3.5a6.5 6.5 0 0 1 0 13",
  close: "M5 5l10 10M15 5L5 15",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M10 4v11.5M5 10.8l5 5 5-5",
  export: "M10 12.5v-9M6.5 7L10 3.5 13.5 7M4 12.5v4h12v-4",
  import: "M10 3.5v9M6.5 9L10 12.5 13.5 9M4 12.5v4h12v-4",
  pause: "M7.5 5v10M12.5 5v10",
  play: "M7 4.5l8 5.5-8 5.5z",
  resume: "M4 5v10M8 5l7.5 5L8 15z",
  attach: "M16.2 9.4l-6.3 6.3a4 4 0 0 1-5.7-5.7l6.7-6.7a2.7 2.7 0 0 1 3.8 3.8L8 13.8a1.3 1.3 0 0 1-1.9-1.9l5.9-5.9",
  file: "M5.5 3h6l3 3v11h-9zM11.5 3v3h3",
  undo: "M7.5 4.5L4 8l3.5 3.5M4 8h7.5a4 4 0 0 1 0 8H8",
  download: "M10 3.5v9M6.5 9L10 12.5 13.5 9M4 16.5h12",
  tool: "M12.2 7.8L16 4a4 4 0 0 1-5.3 5.3l-5.4 5.9a1.6 1.6 0 0 1-2.3-2.3l5.9-5.4A4 4 0 0 1 14 2.2z",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon alone; its label is read out and shown as a tip. */
export function iconButton(name, label, onClick, attributes = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, click: onClick, ...attributes },
    icon(name),
  );
}

/** Gives the elements of index.html that name an icon (`data-icon`) that icon. */
export function placeIcons(root) {
  for (const element of root.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
}

export function setIcon(button, name) {
  button.querySelector(".icon").replaceWith(icon(name));
}

/** Whether the text reached the clipboard. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not a secure context (plain http from another machine), or not allowed: the older way.
    const area = h("textarea", { class: "off-screen", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A button that copies the result of `text()` and confirms it for a moment. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(text());
    setIcon(button, done ? "check" : "close");
    announce(done ? "Copied" : "Could not copy");
    setTimeout(() => setIcon(button, "copy"), 1600);
  });
  return button;
}

export const failureElements = ({ title, message }) => [h("strong", {}, title), h("p", {}, message)];

/** Reads a text out with a screen reader. */
export function announce(text) {
  byId("announcer").textContent = text;
}

let toastTimer = 0;

/** A note at the foot of the page for some seconds, with at most one action. */
export function toast(text, action = null) {
  const place = byId("toast");
  clearTimeout(toastTimer);
  const hide = () => place.replaceChildren();
  const button =
    action &&
    h("button", { type: "button", class: "link", click: () => (hide(), action.run()) }, action.label);
  place.replaceChildren(h("div", { class: "toast" }, h("span", {}, text), button));
  toastTimer = setTimeout(hide, 8000);
}

export const reducesMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
