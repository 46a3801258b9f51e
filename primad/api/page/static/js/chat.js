// Chat: conversations on the left, the one that is open in the middle, settings on the right.

import { asked, write } from "./answer.js";
import { announce, copy, h, icon, iconButton } from "./dom.js";
import { count, ms, speed } from "./format.js";
import { onStatus } from "./live.js";
import { show } from "./markdown.js";
import * as store from "./store.js";

const ENDS = { length: "cut at the limit", stopped: "stopped" };
const SAMPLING = [
  ["temperature", "Temperature", "0 to 2; 0 always takes the likeliest token"],
  ["top_p", "Top p", "0 to 1"],
  ["top_k", "Top k", "0 takes all"],
  ["min_p", "Min p", "0 to 1"],
  ["max_tokens", "Most tokens", "of an answer"],
  ["seed", "Seed", "the same seed gives the same answer"],
];

let chat = fresh();
let stopping = null;
let parts = {};

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
}

export function startChat(panel) {
  parts = {
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
    model: h("p", { class: "hint", id: "model-line" }, "Shift+Enter begins a new line"),
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
    h("div", { class: "talk" }, bar, parts.log, h("div", { class: "foot" }, composer, parts.model)),
    settings,
  );
  addEventListener("pagehide", () => {
    if (stopping && (chat.messages.at(-1).content || chat.messages.at(-1).thought)) store.keep(chat);
  });
  const latest = store.chats()[0];
  if (latest) chat = latest;
  draw();
  onStatus(({ status }) => {
    if (!status?.model) return;
    const line = `${status.model}${status.devices.length > 1 ? ` on ${status.devices.length} devices` : ""} · Shift+Enter begins a new line`;
    if (parts.model.textContent !== line) parts.model.textContent = line;
  });
}

/** Shows or hides `target`: by its attribute, or by a class where narrow screens hide it by themselves. */
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
    area("system", "System prompt", 4, "How the model is to answer"),
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
          placeholder: "model's",
          title: hint,
          value: values[name],
          onchange: change,
        }),
      ),
    ),
    area("tools", "Tools (JSON)", 5, '[{"type": "function", "function": {"name": …}}]'),
    h("p", { class: "hint" }, "What is empty is as the model has it. Calls of tools are shown; you answer them by hand."),
  );
}

function begin() {
  stopping?.abort();
  chat = fresh();
  document.getElementById("history").classList.remove("open");
  draw();
  parts.input.focus();
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
  if (!text || stopping) return;
  parts.input.value = "";
  grow();
  chat.messages.push({ role: "user", content: text });
  chat.title ||= titled(text);
  answer();
}

async function answer() {
  const mine = chat;
  let body;
  try {
    body = asked(mine, store.settings());
  } catch (error) {
    draw();
    parts.log.append(failed(error.message));
    return;
  }
  store.keep(mine); // what was asked outlives a page that is closed meanwhile
  const message = { role: "assistant", content: "", thought: "", calls: [], stats: {} };
  mine.messages.push(message);
  stopping = new AbortController();
  draw();
  const place = parts.log.lastElementChild;
  place.setAttribute("aria-busy", "true");
  let due = false;
  const refresh = () => {
    due = false;
    if (mine !== chat) return;
    const atEnd = parts.log.scrollHeight - parts.log.scrollTop - parts.log.clientHeight < 80;
    fill(place, message, true);
    if (atEnd) parts.log.scrollTop = parts.log.scrollHeight;
  };
  const changed = () => {
    if (!due) requestAnimationFrame(refresh);
    due = true;
  };
  let error = null;
  try {
    await write(body, message, changed, stopping.signal);
  } catch (failure) {
    error = failure;
  }
  stopping = null;
  message.calls = message.calls.filter(Boolean);
  if (!message.content && !message.thought && !message.calls.length) mine.messages.pop();
  store.keep(mine);
  if (mine !== chat) return;
  draw();
  if (error) parts.log.append(failed(error.message));
  announce(error ? `The answer ended with an error: ${error.message}` : "The answer is complete.");
}

function failed(text) {
  const line = h("p", { class: "failed", role: "alert" }, text, " ");
  line.append(h("button", { type: "button", class: "quiet", onclick: answer }, "Try again"));
  return line;
}

function draw() {
  document.getElementById("chat-title").textContent = chat.title || "New conversation";
  parts.log.replaceChildren(...chat.messages.map(drawn));
  if (!chat.messages.length) {
    parts.log.append(
      h("div", { class: "empty" }, h("p", { class: "big" }, "What would you like to know?"), h("p", {}, "Your devices answer; nothing leaves your network.")),
    );
  }
  parts.send.replaceChildren(icon(stopping ? "stop" : "send"));
  parts.send.setAttribute("aria-label", stopping ? "Stop the answer" : "Send");
  parts.send.title = stopping ? "Stop the answer" : "Send";
  parts.list.replaceChildren(...store.chats().map(listed));
  parts.log.scrollTop = parts.log.scrollHeight;
}

function listed(each) {
  const isOpen = each.id === chat.id;
  return h(
    "li",
    { class: isOpen ? "here" : null },
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-current": isOpen ? "true" : null,
        onclick: () => {
          stopping?.abort();
          chat = each;
          document.getElementById("history").classList.remove("open");
          draw();
        },
      },
      each.title || "untitled",
    ),
    iconButton("bin", `Delete "${each.title || "untitled"}"`, () => {
      store.forget(each.id);
      if (isOpen) begin();
      else draw();
    }),
  );
}

function drawn(message, place) {
  const box = h("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] });
  if (message.role === "assistant") fill(box, message, stopping && place === chat.messages.length - 1);
  else if (message.role === "tool") box.append(h("p", { class: "who" }, "Tool's answer"), h("pre", { tabindex: 0 }, message.content));
  else box.append(h("div", { class: "said" }, message.content), actionsOfQuestion(box, message, place));
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
            chat.messages.splice(place, Infinity, { role: "user", content: text });
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

/** An answer as it stands; what the reader folded or opened stays so. */
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
    rest.push(h("p", { class: "waiting" }, h("span", {}), h("span", {}), h("span", {}), h("span", { class: "unseen" }, "waiting for the first token")));
  }
  rest.push(h("footer", {}, statsLine(message.stats), isWriting ? null : actionsOfAnswer(message)));
  box.replaceChildren(...rest);
  if (!isWriting) box.removeAttribute("aria-busy");
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
    // it is being written, or was cut
  }
  const box = h("div", { class: "call" }, h("p", { class: "who" }, "Calls ", h("code", {}, call.name)), h("pre", { tabindex: 0 }, said));
  const at = chat.messages.indexOf(message);
  const isAnswered = chat.messages.some((each) => each.call === call.id);
  if (stopping || isAnswered || at < 0 || !call.id) return box;
  const input = h("textarea", { rows: 2, "aria-label": `What ${call.name} gave`, placeholder: "What it gave" });
  const answered = () => {
    chat.messages.push({ role: "tool", call: call.id, content: input.value });
    const open = message.calls.filter((each) => !chat.messages.some((other) => other.call === each.id));
    if (open.length) draw();
    else answer();
  };
  box.append(input, h("p", { class: "row end" }, h("button", { type: "button", class: "main", onclick: answered }, "Give this answer")));
  return box;
}

function statsLine(stats) {
  const words = [];
  if (stats.tokens) words.push(count(stats.tokens, "token"));
  if (stats.perSecond) words.push(`${speed(stats.perSecond)} tokens/s`);
  if (stats.firstMs) words.push(`first token ${ms(stats.firstMs)}`);
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
