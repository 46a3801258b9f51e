// Chat: conversations on the left, the open one in the middle, settings on the right.

import { asked, write } from "./answer.js";
import { attachButton, attachedRow, hasAttached, shownPicture, takeAttached } from "./attached.js";
import { announce, copy, h, icon, iconButton } from "./dom.js";
import { count, decode, ms, soon } from "./format.js";
import { drawHistory, forgetDeleted, isDeleted } from "./history.js";
import { onStatus } from "./live.js";
import { show } from "./markdown.js";
import { chosen, selector } from "./selector.js";
import * as store from "./store.js";

const ENDS = { length: "cut at the limit", stopped: "stopped" };
const SAMPLING = [
  ["temperature", "Temperature", "0 to 2; 0 always takes the likeliest token"],
  ["top_p", "Top p", "0 to 1"],
  ["top_k", "Top k", "0 takes all"],
  ["min_p", "Min p", "0 to 1"],
  ["max_tokens", "Max tokens", "limit of a response"],
  ["seed", "Seed", "the same seed gives the same response"],
];

let chat = store.fresh();
let stopping = null;
let parts = {};
/** The element of each message, kept so that what its reader opened or scrolled in it stays so. */
const boxes = new WeakMap();

export function startChat(panel) {
  const served = h("span", {});
  parts = {
    served,
    list: h("ul", { class: "chats" }),
    log: h("div", { class: "log", id: "log" }),
    input: h("textarea", {
      id: "question",
      rows: 1,
      placeholder: "Ask something",
      "aria-label": "Message",
      oninput: grow,
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          send();
        }
      },
    }),
    send: h("button", { class: "send", type: "submit" }),
    failed: h("div", {}),
    model: h("p", { class: "hint", id: "model-line" }, selector(), served, h("span", { class: "keys" }, "Shift+Enter starts a new line")),
  };
  const history = h(
    "aside",
    { class: "history", id: "history", "aria-label": "Conversations" },
    h("button", { class: "wide", type: "button", onclick: begin }, icon("plus"), "New conversation"),
    parts.list,
  );
  const settings = h("aside", { class: "settings", id: "settings", "aria-label": "Settings", hidden: true }, form());
  const composer = h(
    "form",
    {
      class: "composer",
      onsubmit: (event) => {
        event.preventDefault();
        if (stopping) stopping.abort();
        else send();
      },
    },
    attachButton(),
    parts.input,
    parts.send,
  );
  const bar = h(
    "div",
    { class: "chat-bar" },
    toggle("list", "Conversations", history, "open"),
    h("p", { class: "title", id: "chat-title" }),
    toggle("sliders", "Settings", settings, "hidden"),
  );
  panel.append(
    history,
    h("div", { class: "talk" }, bar, parts.log, h("div", { class: "foot" }, parts.failed, attachedRow(panel), composer, parts.model)),
    settings,
  );
  addEventListener("pagehide", () => {
    if (stopping && (chat.messages.at(-1).content || chat.messages.at(-1).thought)) store.keep(chat);
  });
  const latest = store.chats()[0];
  showChat(latest ?? chat);
  onStatus(({ status }) => {
    if (!status?.model || status.models?.length) return;
    const line = `${status.model}${status.devices.length > 1 ? ` on ${status.devices.length} devices` : ""} `;
    if (parts.served.textContent !== line) parts.served.textContent = line;
  });
}

/** Shows or hides `target`: by its attribute, or by a class where narrow screens hide it by default. */
function toggle(name, label, target, how) {
  const isShown = () => (how === "hidden" ? !target.hidden : target.classList.contains("open"));
  const button = iconButton(
    name,
    label,
    () => {
      if (how === "hidden") target.hidden = !target.hidden;
      else target.classList.toggle("open");
      button.setAttribute("aria-expanded", String(isShown()));
    },
    { "aria-expanded": String(isShown()), "aria-controls": target.id, class: `icon toggle-${name}` },
  );
  target.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isShown()) return;
    button.click();
    button.focus();
  });
  return button;
}

function form() {
  const values = store.settings();
  const change = ({ target }) => store.keepSettings({ ...store.settings(), [target.name]: target.value });
  const area = (name, label, rows, hint) => [
    h("label", { for: `set-${name}` }, label),
    h("textarea", { id: `set-${name}`, name, rows, onchange: change, spellcheck: "false", placeholder: hint }, values[name]),
  ];
  return h(
    "form",
    { onsubmit: (event) => event.preventDefault() },
    h("h2", {}, "Settings"),
    area("system", "System prompt", 4, "Instructions for the model"),
    SAMPLING.map(([name, label, hint]) =>
      h(
        "div",
        { class: "field" },
        h("label", { for: `set-${name}` }, label),
        h("input", {
          id: `set-${name}`,
          name,
          inputmode: "decimal",
          autocomplete: "off",
          placeholder: "default",
          title: hint,
          value: values[name],
          onchange: change,
        }),
      ),
    ),
    area("tools", "Tools (JSON)", 5, '[{"type": "function", "function": {"name": …}}]'),
    h("p", { class: "hint" }, "Empty fields use the model's defaults. Tool calls are shown; you type their results."),
  );
}

function begin() {
  open(store.fresh());
  parts.input.focus();
}

/** Shows only `other`; if the list of conversations covers it, the list is closed. */
function open(other) {
  forgetDeleted();
  document.getElementById("history").classList.remove("open");
  showChat(other);
}

function showChat(other) {
  stopping?.abort();
  stopping = null;
  chat = other;
  showFailed();
  draw();
  toEnd();
}

function toEnd() {
  parts.log.scrollTop = parts.log.scrollHeight;
}

function grow() {
  parts.input.style.height = "auto";
  parts.input.style.height = `${Math.min(parts.input.scrollHeight, 220)}px`;
}

function titled(text) {
  return text.length > 60 ? `${text.slice(0, 59).trimEnd()}…` : text;
}

function send() {
  const text = parts.input.value.trim();
  if ((!text && !hasAttached()) || stopping) return;
  parts.input.value = "";
  grow();
  chat.messages.push({ role: "user", content: text, pictures: takeAttached() });
  chat.title ||= titled(text) || "An image";
  answer();
}

async function answer() {
  const mine = chat;
  let body;
  forgetDeleted();
  showFailed();
  try {
    body = asked(mine, store.settings(), chosen());
  } catch (error) {
    draw();
    toEnd();
    showFailed(error.message);
    return;
  }
  store.keep(mine); // so that the message survives if the page is closed meanwhile
  const message = { role: "assistant", content: "", thought: "", calls: [], stats: {} };
  mine.messages.push(message);
  const own = new AbortController();
  stopping = own;
  draw();
  toEnd();
  const box = boxes.get(message);
  box.setAttribute("aria-busy", "true");
  let due = false;
  let isWriting = true;
  const refresh = () => {
    due = false;
    if (mine === chat && isWriting) following(() => fill(box, message, true));
  };
  const changed = () => {
    if (!due) requestAnimationFrame(refresh);
    due = true;
  };
  let error = null;
  try {
    await write(body, message, changed, own.signal);
  } catch (failure) {
    error = failure;
  }
  if (stopping === own) stopping = null;
  isWriting = false;
  message.calls = message.calls.filter(Boolean);
  if (!message.content && !message.thought && !message.calls.length) mine.messages.pop();
  delete message.stats.prompt;
  delete message.stats.load;
  if (!isDeleted(mine)) store.keep(mine);
  if (mine !== chat) return;
  following(() => {
    draw();
    showFailed(error?.message);
  });
  announce(error ? `The response ended with an error: ${error.message}` : "The response is complete.");
}

/** Does `change`. A reader at the end keeps following it, and a reader elsewhere stays there. */
function following(change) {
  const { log } = parts;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const before = log.scrollTop;
  change();
  if (atEnd) toEnd();
  else log.scrollTop = before;
}

/** Shows what failed below the conversation, where it is visible at any scroll position; clears it by default. */
function showFailed(text = "") {
  const again = h("button", { type: "button", class: "quiet", onclick: answer }, "Try again");
  parts.failed.replaceChildren(text ? h("p", { class: "failed", role: "alert" }, text, " ", again) : "");
}

function draw() {
  document.getElementById("chat-title").textContent = chat.title || "New conversation";
  const before = parts.log.scrollTop;
  parts.log.replaceChildren(...chat.messages.map(drawn));
  if (!chat.messages.length) {
    parts.log.append(
      h("div", { class: "empty" }, h("p", { class: "big" }, "What would you like to know?"), h("p", {}, "Your devices compute the response; nothing leaves your network.")),
    );
  }
  parts.send.replaceChildren(icon(stopping ? "stop" : "send"));
  parts.send.setAttribute("aria-label", stopping ? "Stop" : "Send");
  parts.send.title = stopping ? "Stop" : "Send";
  drawHistory(parts.list, chat, { open, show: showChat, draw });
  parts.log.scrollTop = before;
}

function drawn(message, place) {
  const box = boxes.get(message) ?? h("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] });
  boxes.set(message, box);
  if (message.role === "assistant") fill(box, message, stopping && place === chat.messages.length - 1);
  else if (message.role === "tool") box.replaceChildren(h("p", { class: "who" }, "Result"), h("pre", { tabindex: 0 }, message.content));
  else box.replaceChildren(...(message.pictures ?? []).map(shownPicture), h("div", { class: "said" }, message.content), actionsOfQuestion(box, message, place));
  return box;
}

const NAMES = { user: "You", assistant: "The model", tool: "A tool" };

function actionsOfQuestion(box, message, place) {
  return h(
    "div",
    { class: "actions" },
    iconButton("edit", "Edit", () => edit(box, message, place)),
    iconButton("copy", "Copy", () => copy(message.content)),
    !stopping && message === chat.messages.at(-1) ? iconButton("again", "Answer", answer) : null,
  );
}

function edit(box, message, place) {
  if (stopping) return;
  const input = h("textarea", { rows: 4, "aria-label": "Edit the message" }, message.content);
  box.replaceChildren(
    input,
    h(
      "p",
      { class: "row end" },
      h("button", { type: "button", class: "quiet", onclick: draw }, "Cancel"),
      h(
        "button",
        {
          type: "button",
          class: "main",
          onclick: () => {
            const text = input.value.trim();
            if (!text) return;
            chat.messages.splice(place, Infinity, { role: "user", content: text, pictures: message.pictures });
            if (place === 0) chat.title = titled(text);
            answer();
          },
        },
        "Send again",
      ),
    ),
  );
  input.focus();
}

/** A response in its current state; what the reader folded or opened stays so. */
function fill(box, message, isWriting) {
  const wasOpen = box.querySelector("details.thoughts")?.open;
  const rest = [];
  if (message.thought) rest.push(thoughts(message, isWriting, wasOpen));
  if (message.content) {
    const text = h("div", { class: "text" });
    show(text, message.content);
    rest.push(text);
  }
  rest.push(...message.calls.filter(Boolean).map((call) => drawnCall(call, message)));
  if (isWriting && !message.content && !message.thought) {
    const { prompt, load } = message.stats;
    rest.push(prompt ? reading(prompt) : load ? loading(load) : waiting());
  }
  rest.push(h("footer", {}, statsLine(message.stats), isWriting ? null : actionsOfAnswer(message)));
  box.replaceChildren(...rest);
  if (!isWriting) box.removeAttribute("aria-busy");
}

function waiting() {
  return h("p", { class: "waiting" }, h("span", {}), h("span", {}), h("span", {}), h("span", { class: "unseen" }, "waiting for the first token"));
}

/** The loading progress of the model. */
function loading(load) {
  return h("p", { class: "reading" }, h("progress", { max: 1, value: load.value, "aria-label": "Model" }), `The model is loading. ${soon(load)}`);
}

/** The progress of the prompt. */
function reading({ processed, total }) {
  return h("p", { class: "reading" }, h("progress", { max: total, value: processed, "aria-label": "Prompt" }), `${processed} of ${count(total, "token")} of the prompt`);
}

function thoughts(message, isWriting, wasOpen) {
  const isThinking = isWriting && !message.content;
  const text = h("div", { class: "text" });
  show(text, message.thought);
  const took = message.stats.thoughtMs ? ` for ${ms(message.stats.thoughtMs)}` : "";
  return h("details", { class: "thoughts", open: wasOpen ?? false }, h("summary", {}, isThinking ? "Thinking…" : `Thought${took}`), text);
}

function drawnCall(call, message) {
  let said = call.arguments;
  try {
    said = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // still being written, or cut off
  }
  const box = h("div", { class: "call" }, h("p", { class: "who" }, "Calls ", h("code", {}, call.name)), h("pre", { tabindex: 0 }, said));
  const at = chat.messages.indexOf(message);
  const isAnswered = chat.messages.some((each) => each.call === call.id);
  if (stopping || isAnswered || at < 0 || !call.id) return box;
  const input = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Result" });
  const answered = () => {
    chat.messages.push({ role: "tool", call: call.id, content: input.value });
    const open = message.calls.filter((each) => !chat.messages.some((other) => other.call === each.id));
    if (open.length) draw();
    else answer();
  };
  box.append(input, h("p", { class: "row end" }, h("button", { type: "button", class: "main", onclick: answered }, "Send result")));
  return box;
}

function statsLine(stats) {
  const words = [];
  if (stats.tokens) words.push(count(stats.tokens, "token"));
  if (stats.perSecond) words.push(decode(stats.perSecond));
  if (stats.firstMs) words.push(`TTFT ${ms(stats.firstMs)}`);
  if (ENDS[stats.end]) words.push(ENDS[stats.end]);
  return h("span", { class: "stats" }, words.join(" · "));
}

function actionsOfAnswer(message) {
  const isLast = message === chat.messages.at(-1);
  const regenerate = () => {
    chat.messages.pop();
    answer();
  };
  return h(
    "span",
    { class: "actions" },
    iconButton("copy", "Copy", () => copy(message.content)),
    isLast ? iconButton("again", "Regenerate", regenerate) : null,
  );
}
