// Models: the offered models and their memory; load and unload, and for the owner download and delete.

import { announce, h, replace } from "./dom.js";
import { bytes, decode, ms, soon } from "./format.js";
import { onStatus } from "./live.js";
import { ask, lines } from "./server.js";

const TONES = { loaded: "good", loading: "warn", unloading: "warn", failed: "bad" };

let parts = {};
let isOwner = false;
let latest = "";
let pulling = null;
let states = "";
const forecasts = new Map(); // lines by model, valid for the models loaded now

export function startModels(panel, tab) {
  parts = {
    panel,
    failed: h("p", { class: "failed", role: "alert", hidden: true }),
    pull: h("div", {}),
    list: h("div", { class: "device-list" }),
    dialog: h("dialog", { "aria-labelledby": "delete-title" }),
  };
  panel.append(h("div", { class: "devices-view" }, parts.failed, parts.pull, h("h2", {}, "Models"), parts.list, parts.dialog));
  onStatus(({ status }) => {
    const models = status?.models ?? [];
    tab.hidden = !models.length;
    const key = JSON.stringify([models, isOwner]);
    if (key === latest || parts.list.contains(document.activeElement)) return; // keeps the focused button
    latest = key;
    const now = JSON.stringify(models.map(({ id, state }) => [id, state === "loaded"]));
    if (now !== states) forecasts.clear();
    states = now;
    parts.list.replaceChildren(...models.map(drawn));
  });
}

/** From now on the viewer may download and delete. */
export function letOwnerPull() {
  isOwner = true;
  const name = h("input", { id: "pull-name", autocomplete: "off", spellcheck: "false", required: true, placeholder: "owner/repository:Q4_K_M" });
  parts.button = h("button", { type: "submit", class: "main" }, "Download");
  parts.progress = h("p", { class: "reading", hidden: true });
  parts.room = h("p", { class: "muted" });
  const submit = (event) => {
    event.preventDefault();
    if (pulling) pulling.abort();
    else pull(name.value.trim());
  };
  parts.pull.replaceChildren(
    h(
      "form",
      { class: "card", onsubmit: submit },
      h("h2", {}, "Download a model"),
      h("p", { class: "row bring" }, h("label", { for: "pull-name" }, "From Hugging Face"), name, parts.button),
      parts.progress,
      parts.room,
    ),
  );
  showRoom();
}

async function showRoom() {
  if (!isOwner) return;
  const { free_bytes: free } = await ask("/ui/models").catch(() => ({ free_bytes: null }));
  parts.room.textContent = free === null ? "" : `${bytes(free)} free.`;
}

async function pull(name) {
  pulling = new AbortController();
  parts.button.textContent = "Stop";
  parts.progress.hidden = false;
  parts.progress.replaceChildren("Contacting the hub…");
  try {
    for await (const line of lines("/api/pull", { model: name }, pulling.signal)) showPulled(line);
    announce(`${name} is downloaded.`);
    parts.failed.hidden = true;
  } catch (error) {
    if (error.name === "AbortError") announce("The download is stopped; downloading again resumes it.");
    else fail(error);
  }
  pulling = null;
  parts.button.textContent = "Download";
  parts.progress.hidden = true;
  showRoom();
}

function showPulled({ status, completed, total }) {
  if (completed === undefined) return;
  const bar = total ? h("progress", { max: total, value: completed, "aria-label": "Download" }) : null;
  replace(parts.progress, bar, `${bytes(completed)}${total ? ` of ${bytes(total)}` : ""}, ${status}`);
}

function fail(error) {
  parts.failed.hidden = false;
  parts.failed.textContent = error.message;
  parts.failed.scrollIntoView({ block: "center" });
}

async function change(path, body, done, options) {
  try {
    await ask(path, body, undefined, options);
    parts.failed.hidden = true;
    announce(done);
  } catch (error) {
    fail(error);
  }
  document.activeElement?.blur();
  showRoom();
}

/** The forecast for a model, planned next to those that are loaded now. */
async function forecast(id, line) {
  replace(line, "Planning…");
  try {
    forecasts.set(id, forecastLine(await ask("/ui/forecast", { model: id })));
    replace(line, forecasts.get(id));
    announce(`${id}: ${forecasts.get(id)}`);
  } catch (error) {
    replace(line, error.message);
  }
}

function forecastLine(found) {
  const goes = found.goes.length ? `; ${found.goes.join(" and ")} would be unloaded` : "";
  const streams = found.streamed_bytes ? `, ${bytes(found.streamed_bytes)} read from disk for each token` : "";
  const first = `first token of ${found.prompt_tokens} after ${ms(found.ttft_ms)}`;
  return `Forecast: ${decode(found.tokens_per_s)}, ${first}, on ${found.devices.join(", ")}${streams}${goes}.`;
}

function tags({ pinned, sees, hears }) {
  const found = [pinned && "pinned", sees && "sees", hears && "hears"].filter(Boolean);
  return found.map((tag) => h("span", { class: "tag" }, tag));
}

function drawn(model) {
  const { id, state } = model;
  const isThere = state === "loaded" || state === "loading";
  const load = () => change("/models/load", { model: id }, `${id} is being loaded.`);
  const line = h("p", { class: "reading", "aria-live": "off" }, forecasts.get(id) ?? "");
  const unload = () => change("/models/unload", { model: id }, `${id} is unloaded.`);
  return h(
    "article",
    { class: "card known", "aria-label": id },
    h("header", {}, h("h3", {}, id), h("span", { class: `tag ${TONES[state] ?? ""}` }, state), ...tags(model)),
    state !== "loading" ? null : h("p", { class: "reading" }, h("progress", { max: 1, value: model.progress, "aria-label": `Loading ${id}` }), soon(model)),
    model.detail ? h("p", { class: "muted" }, model.detail) : null,
    h("p", { class: "muted" }, [bytes(model.size_bytes), ...Object.entries(model.memory_bytes).map(([device, taken]) => `${bytes(taken)} on ${device}`)].join(" · ")),
    line,
    h(
      "p",
      { class: "row" },
      model.embeds || state === "failed" ? null : h("button", { type: "button", onclick: () => forecast(id, line) }, "Forecast"),
      h("button", { type: "button", onclick: isThere ? unload : load, disabled: state === "unloading" }, isThere ? "Unload" : "Load"),
      isOwner ? h("button", { type: "button", class: "danger", onclick: () => confirmDeletion(id) }, "Delete") : null,
    ),
  );
}

function confirmDeletion(id) {
  const { dialog } = parts;
  replace(
    dialog,
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "delete-title" }, `Delete ${id}?`),
      h("p", {}, "It is unloaded, and its files are deleted. Models that other programs keep are refused."),
      h("p", { class: "row end" }, h("button", { value: "no", class: "quiet" }, "Cancel"), h("button", { value: "yes", class: "main" }, "Delete")),
    ),
  );
  dialog.returnValue = "no";
  const then = () => dialog.returnValue === "yes" && change("/api/delete", { model: id }, `${id} is deleted.`, { method: "DELETE" });
  dialog.addEventListener("close", then, { once: true });
  dialog.showModal();
}
