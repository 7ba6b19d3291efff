// One message on the screen: its text, how the answer was generated, and its actions.

import { fileElement } from "./attachments.js";
import { copyButton, failureElements, h, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { count, describeStats, seconds } from "./numbers.js";

const ENDS = {
  length: "Stopped at the token limit.",
  stopped: "Stopped.",
  interrupted: "Interrupted: the page was left while this was being written.",
};
const CONTINUABLE = new Set(Object.keys(ENDS));

/**
 * actions  the chat's handlers of buttons: retry, resume, edit, remove, show (another branch)
 */
export class MessageView {
  #actions;
  #isEditing = false;

  constructor(node, actions) {
    this.node = node;
    this.#actions = actions;
    this.body = h("div", { class: "body" });
    this.foot = h("footer", { class: "foot" });
    this.element = h("article", { class: `message ${node.role}`, "data-id": node.id }, this.body, this.foot);
    this.element.addEventListener("click", () => this.#touch());
    if (node.role === "assistant") this.#buildAnswer();
  }

  #buildAnswer() {
    this.element.setAttribute("aria-label", "Answer");
    this.summary = h("span", {});
    const thoughts = h("div", { class: "prose" });
    this.thoughts = new MarkdownView(thoughts);
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, icon("right"), this.summary), thoughts);
    this.calls = h("div", { class: "calls" });
    const prose = h("div", { class: "prose" });
    this.prose = new MarkdownView(prose);
    this.notice = h("p", { class: "notice", hidden: true });
    this.pending = h("div", { class: "pending", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
    this.failure = h("div", { class: "failure", hidden: true });
    this.body.append(this.notice, this.reasoning, prose, this.calls, this.pending, this.failure);
  }

  /** Shows the node as it is now. `branches`: its siblings, itself among them. */
  update({ isRunning, branches }) {
    if (this.node.role === "assistant") this.#showAnswer(isRunning);
    else if (!this.#isEditing) this.#showUser();
    const footKey = JSON.stringify([
      isRunning, branches.length, branches.indexOf(this.node), this.node.finish, Boolean(this.node.failure),
    ]);
    if (footKey !== this.footKey || isRunning) {
      this.footKey = footKey;
      this.#showFoot(isRunning, branches);
    }
  }

  /** Without hover, a tap on a message shows its actions. */
  #touch() {
    for (const each of this.element.parentElement?.children ?? []) each.classList.toggle("touched", each === this.element);
  }

  #showUser() {
    if (this.body.querySelector(".bubble, .file")) return; // a message never changes; an edited one is another
    const { content, files = [] } = this.node;
    this.element.setAttribute("aria-label", "You");
    this.body.replaceChildren(...files.map(fileElement), content ? h("div", { class: "bubble" }, content) : "");
  }

  #showAnswer(isRunning) {
    const { node } = this;
    this.element.setAttribute("aria-busy", String(isRunning));
    this.notice.hidden = !node.numDropped;
    if (node.numDropped) {
      const turns = node.numDropped === 1 ? "the oldest turn was" : `the oldest ${node.numDropped} turns were`;
      this.notice.textContent = `The context is full: ${turns} left out.`;
    }
    this.reasoning.hidden = !node.reasoning;
    if (node.reasoning) {
      const isThinking = isRunning && !node.content && !node.calls?.length;
      const took = node.stats?.thoughtS;
      this.summary.textContent = isThinking ? "Thinking…" : took ? `Thought for ${seconds(took)}` : "Thoughts";
      this.reasoning.classList.toggle("thinking", isThinking);
      this.thoughts.update(node.reasoning, isThinking);
    }
    this.prose.update(node.content, isRunning);
    this.#showCalls();
    this.pending.hidden = !isRunning || Boolean(node.content || node.reasoning || node.calls?.length);
    this.failure.hidden = !node.failure;
    if (node.failure) {
      this.failure.replaceChildren(...failureElements(node.failure));
      if (node.failure.needsKey) {
        this.failure.append(h("button", { type: "button", class: "button", click: this.#actions.openKey }, "Enter the key"));
      }
    }
  }

  #showCalls() {
    const calls = this.node.calls ?? [];
    const text = JSON.stringify(calls);
    if (text === this.callsText) return;
    this.callsText = text;
    this.calls.replaceChildren(
      ...calls.map((call) => {
        const code = pretty(call.arguments);
        return h(
          "figure",
          { class: "call", "aria-label": `Tool call: ${call.name}` },
          h("figcaption", {}, icon("tool"), h("span", {}, call.name || "…"), copyButton(() => code, "Copy arguments")),
          h("pre", { tabindex: "0", "aria-label": "Arguments" }, h("code", {}, code)),
        );
      }),
    );
  }

  #showFoot(isRunning, branches) {
    const { node } = this;
    const parts = [];
    if (branches.length > 1) parts.push(this.#branchSwitch(branches));
    if (node.role === "assistant") {
      if (!isRunning && node.content) parts.push(copyButton(() => node.content, "Copy answer"));
      if (!isRunning) parts.push(iconButton("retry", "Answer again", () => this.#actions.retry(node)));
    } else {
      parts.push(copyButton(() => node.content, "Copy message"));
      if (!isRunning) parts.push(iconButton("edit", "Edit message", () => this.edit()));
    }
    if (!isRunning) parts.push(iconButton("trash", "Delete from here", () => this.#actions.remove(node)));
    if (!isRunning && node.role === "assistant" && node.content && (CONTINUABLE.has(node.finish) || node.failure)) {
      const label = h("span", {}, "Continue");
      const resume = () => this.#actions.resume(node);
      parts.unshift(h("button", { type: "button", class: "button small", click: resume }, icon("resume"), label));
    }
    const meta = h("span", { class: "meta" }, describe(node, isRunning));
    const buttons = h("span", { class: "buttons" }, parts);
    this.foot.replaceChildren(...(meta.childNodes.length ? [meta, buttons] : [buttons]));
  }

  #branchSwitch(branches) {
    const at = branches.indexOf(this.node);
    const step = (by, name, label) =>
      iconButton(name, label, () => this.#actions.show(branches[at + by]), { disabled: !branches[at + by] });
    return h(
      "span",
      { class: "branches", role: "group", "aria-label": "Versions" },
      step(-1, "left", "Previous version"),
      h("span", {}, `${at + 1}/${branches.length}`),
      step(1, "right", "Next version"),
    );
  }

  /** Turns the message into a text field; sending it adds a branch beside this one. */
  edit() {
    if (this.#isEditing) return;
    this.#isEditing = true;
    const area = h("textarea", { "aria-label": "Edit message", rows: "1" });
    area.value = this.node.content;
    const grow = () => {
      area.rows = Math.min(12, area.value.split("\n").length + Math.floor(area.value.length / 70));
    };
    const end = () => {
      this.#isEditing = false;
      this.body.replaceChildren();
      this.#showUser();
      this.foot.hidden = false;
    };
    const send = () => {
      const text = area.value.trim();
      if (!text) return;
      end();
      this.#actions.edit(this.node, text);
    };
    const cancel = () => {
      end();
      this.#actions.focusComposer();
    };
    area.addEventListener("input", grow);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    const buttons = h(
      "div",
      { class: "edit-buttons" },
      h("button", { type: "button", class: "button", click: cancel }, "Cancel"),
      h("button", { type: "button", class: "button primary", click: send }, "Send"),
    );
    this.body.replaceChildren(h("div", { class: "editing" }, area, buttons));
    this.foot.hidden = true;
    grow();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** How the answer was generated, in one line. */
function describe(node, isRunning) {
  const { stats } = node;
  const parts = [];
  if (node.finish && ENDS[node.finish] && !isRunning) parts.push(ENDS[node.finish]);
  parts.push(...describeStats(stats ?? {}));
  if (stats?.cachedTokens) parts.push(`${count(stats.cachedTokens)} of ${count(stats.promptTokens)} cached`);
  return parts.map((part) => h("span", {}, part));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}
