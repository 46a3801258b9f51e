// The list of conversations, and the undo of the latest deletion.

import { announce, h, iconButton } from "./dom.js";
import * as store from "./store.js";

const deleted = new Set();
let latest = null;

/** Whether `chat` was deleted and not restored: a conversation with a running response must not be kept then. */
export function isDeleted(chat) {
  return deleted.has(chat.id);
}

/** From now on the latest deletion is final. */
export function forgetDeleted() {
  latest = null;
}

/** Shows all conversations in `list`. `shown` is the open one; `page` can `open` one, `show` one next to this list, `draw`. */
export function drawHistory(list, shown, page) {
  const lines = store.chats().map((chat, place) => drawn(list, chat, place, shown, page));
  if (latest) lines.splice(latest.place, 0, drawnDeleted(shown, page));
  list.replaceChildren(...lines);
}

function drawn(list, chat, place, shown, page) {
  const isShown = chat.id === shown.id;
  const title = chat.title || "untitled";
  const remove = () => {
    store.forget(chat.id);
    deleted.add(chat.id);
    latest = { chat: isShown ? shown : chat, place };
    if (isShown) page.show(store.fresh());
    else page.draw();
    list.querySelector(".deleted button").focus();
    announce(`"${title}" is deleted.`);
  };
  return h(
    "li",
    { class: isShown ? "here" : null },
    h("button", { type: "button", class: "quiet", "aria-current": isShown ? "true" : null, onclick: () => page.open(chat) }, title),
    iconButton("bin", `Delete "${title}"`, remove),
  );
}

function drawnDeleted(shown, page) {
  const { chat, place } = latest;
  const title = chat.title || "untitled";
  const undo = () => {
    store.restore(chat, place);
    deleted.delete(chat.id);
    latest = null;
    if (shown.messages.length) page.draw();
    else page.show(chat);
    announce(`"${title}" is back.`);
  };
  return h(
    "li",
    { class: "deleted" },
    h("span", {}, `Deleted: ${title}`),
    h("button", { type: "button", "aria-label": `Undo: "${title}" is deleted`, onclick: undo }, "Undo"),
  );
}
