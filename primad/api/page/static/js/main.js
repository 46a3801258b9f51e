// The frame of the page: views, the head's state, the key, the theme.

import { startChat } from "./chat.js";
import { letOwnerIn, startDevices } from "./devices.js";
import { icon } from "./dom.js";
import { onStatus, watch } from "./live.js";
import { letOwnerPull, startModels } from "./models.js";
import { startRing } from "./ring.js";
import { becomeOwner, keys, onKeyWanted } from "./server.js";

const THEME = "primad.theme";
const VIEWS = ["chat", "models", "ring", "devices"];
const by = (id) => document.getElementById(id);

function showView(name, focus = false) {
  for (const view of VIEWS) {
    const tab = by(`tab-${view}`);
    const isShown = view === name;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    by(view).hidden = !isShown;
    if (isShown && focus) tab.focus();
  }
  document.title = `primad · ${by(`tab-${name}`).textContent}`;
}

function startTabs() {
  for (const view of VIEWS) by(`tab-${view}`).addEventListener("click", () => (location.hash = view));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const views = VIEWS.filter((view) => !by(`tab-${view}`).hidden);
    const at = views.findIndex((view) => by(`tab-${view}`) === document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
    if (next === undefined || at < 0) return;
    event.preventDefault();
    location.hash = views[(next + views.length) % views.length];
    by(`tab-${location.hash.slice(1)}`).focus();
  });
  const follow = () => showView(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
  addEventListener("hashchange", follow);
  follow();
}

function startTheme() {
  const themes = ["auto", "light", "dark"];
  const button = by("theme-button");
  button.append(icon("theme"));
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  apply(localStorage.getItem(THEME) ?? "auto");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
    localStorage.setItem(THEME, next);
    apply(next);
  });
}

function startKey() {
  const dialog = by("key-dialog");
  const input = by("key-input");
  const wrong = by("key-wrong");
  const open = (isWrong = false) => {
    if (dialog.open) return;
    wrong.hidden = !isWrong;
    input.setAttribute("aria-invalid", String(isWrong));
    input.value = keys.api;
    dialog.returnValue = "cancel";
    dialog.showModal();
  };
  by("key-button").append(icon("key"));
  by("key-button").addEventListener("click", () => open());
  onKeyWanted(open);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    dialog.close("save");
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "cancel") return;
    keys.api = dialog.returnValue === "save" ? input.value.trim() : "";
    dispatchEvent(new Event("primad-key"));
  });
}

function showState(news) {
  const { status, isConnected, error } = news;
  let [state, text] = ["waiting", status?.detail ?? "connecting"];
  if (!isConnected) [state, text] = ["gone", error];
  else if (status.serving) [state, text] = ["serving", status.tokens?.answers_open ? "answering" : "ready"];
  by("pill").dataset.state = state;
  if (by("pill-text").textContent !== text) by("pill-text").textContent = text;
  by("pill").title = status?.detail ?? "";
}

startTabs();
startTheme();
startKey();
startChat(by("chat"));
startModels(by("models"), by("tab-models"));
startRing(by("ring"));
startDevices(by("devices"));
onStatus(showState);
becomeOwner()
  .then((isOwner) => {
    if (!isOwner) return;
    letOwnerIn();
    letOwnerPull();
  })
  .catch(() => false)
  .finally(watch);
