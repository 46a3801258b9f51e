// Devices: pair, approve, revoke. Only for the owner of the head, whom 'primad page' lets in.

import { announce, copy, h, iconButton, replace } from "./dom.js";
import { onStatus } from "./live.js";
import { ask } from "./server.js";

const EVERY_MS = 2000;

let parts = {};
let isOwner = false;
let latest = "";
let status = null;
let codeEnds = 0;

export function startDevices(panel) {
  parts = { panel, body: h("div", { class: "devices-view" }) };
  panel.append(parts.body);
  showGuest();
  onStatus((news) => {
    status = news.status;
    if (!isOwner) showGuest();
  });
}

/** From now on the viewer may change things. */
export function letOwnerIn() {
  isOwner = true;
  parts.code = h("div", { class: "card" });
  parts.list = h("div", { class: "device-list" });
  parts.own = h("p", { class: "muted" });
  parts.failed = h("p", { class: "failed", role: "alert", hidden: true });
  parts.body.replaceChildren(parts.failed, parts.code, bringForm(), h("h2", {}, "Devices"), parts.list, parts.own, confirmDialog());
  refresh();
  setInterval(() => {
    if (!parts.panel.hidden && !document.hidden) refresh();
  }, EVERY_MS);
  setInterval(tickCode, 1000);
}

function showGuest() {
  const members = status?.cluster ?? [];
  const key = JSON.stringify(members);
  if (key === latest) return;
  latest = key;
  parts.body.replaceChildren(
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Only the owner of the head can change devices"),
      h("p", {}, "On the head's device, type this; it opens the page with your rights:"),
      command("primad page"),
    ),
    members.length
      ? h("ul", { class: "device-list" }, members.map((each) => h("li", { class: "card" }, h("h3", {}, each.device), h("p", { class: "muted" }, `${each.phase}${each.reason ? `: ${each.reason}` : ""}`))))
      : h("p", { class: "muted" }, "The head knows no other device."),
  );
}

function command(text) {
  return h("p", { class: "command" }, h("code", {}, text), iconButton("copy", `Copy: ${text}`, () => copy(text)));
}

async function refresh() {
  try {
    const body = await ask("/ui/devices");
    const { code, ...rest } = body;
    codeEnds = code ? performance.now() + code.expires_s * 1000 : 0;
    const key = JSON.stringify([code?.code, rest, status?.cluster]);
    if (key === latest || parts.list.contains(document.activeElement)) return; // so as not to disturb typing
    latest = key;
    showCode(code, body.own);
    showList(body);
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  parts.failed.hidden = false;
  parts.failed.textContent = error.message;
}

/** Requests a change, then shows its result. */
async function change(path, body, done) {
  try {
    const answer = await ask(path, body);
    parts.failed.hidden = true;
    announce(done);
    document.activeElement?.blur();
    await refresh();
    return answer;
  } catch (error) {
    fail(error);
    parts.failed.scrollIntoView({ block: "center" }); // it is above the pressed button, perhaps out of sight
    return null;
  }
}

function showCode(code, own) {
  const button = h("button", { type: "button", class: "main", onclick: () => change("/ui/pair", {}, "A pairing code is shown.") }, "Show a pairing code");
  parts.left = h("span", { class: "muted", id: "code-left" });
  replace(
    parts.code,
    h("h2", {}, "Add a device"),
    ...(code
      ? [
          h("p", { class: "code-words", "aria-label": "Pairing code" }, code.code),
          h("p", {}, "On the other device type:"),
          command(`primad join --code ${code.code}`),
          h("p", { class: "muted" }, "Valid for one device. ", parts.left),
          code.addresses.length ? h("p", { class: "muted" }, `If multicast is blocked, add the address of ${own.device}:`) : null,
          ...code.addresses.map((at) => command(`primad join --code ${code.code} --device ${at}`)),
        ]
      : [h("p", { class: "muted" }, "A short code pairs two devices once; then they know each other's keys."), button]),
  );
  tickCode();
}

/** The other way round: a running device shows a code, which is typed here. Either way both sides trust each other. */
function bringForm() {
  const code = h("input", { id: "bring-code", autocomplete: "off", spellcheck: "false", required: true, placeholder: "7-lamp-river" });
  const at = h("input", { id: "bring-at", autocomplete: "off", spellcheck: "false", placeholder: "optional" });
  const button = h("button", { type: "submit" }, "Pair");
  const bring = async (event) => {
    event.preventDefault();
    button.disabled = true;
    button.textContent = "Looking for the device…";
    const done = await change("/ui/bring", { code: code.value, at: at.value.trim() || null }, "Paired.");
    button.disabled = false;
    button.textContent = "Pair";
    if (!done) return;
    code.value = at.value = "";
    announce(`${done.device} is paired.`);
  };
  return h(
    "form",
    { class: "card bring", onsubmit: bring },
    h("h2", {}, "Add a device that is already running"),
    h("p", {}, "Type this on that device, then enter the code that it shows:"),
    command("primad pair"),
    h("p", { class: "row" }, h("label", { for: "bring-code" }, "Its code"), code, h("label", { for: "bring-at" }, "Its address"), at, button),
    h("p", { class: "muted" }, "Only if multicast is blocked: an address that ", h("code", {}, "primad pair"), " shows there, such as ", h("code", {}, "192.168.1.20:7770"), "."),
  );
}

function tickCode() {
  if (!parts.left || !codeEnds) return;
  const left = Math.max(0, Math.round((codeEnds - performance.now()) / 1000));
  parts.left.textContent = `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")} left.`;
}

function showList({ own, devices }) {
  const phases = new Map((status?.cluster ?? []).map((each) => [each.device, each]));
  parts.list.replaceChildren(...devices.map((device) => drawn(device, phases.get(device.device), own)));
  if (!devices.length) parts.list.append(h("p", { class: "muted" }, "No other device is known or discovered."));
  parts.own.replaceChildren(`This head is ${own.device}, `, h("code", {}, own.fingerprint));
}

const BY_HAND = "by hand";
const SPOKEN_TO = new Set(["profiled", "ready", "loading", "serving", "suspected"]);
const TRUST = { yes: ["trusted", "good"], no: ["not paired", "warn"], revoked: ["revoked", "bad"] };

function drawn(device, member, own) {
  const [word, tone] = TRUST[device.trusted];
  const isTrusted = device.trusted === "yes";
  return h(
    "article",
    { class: "card known", "aria-label": device.device },
    h("header", {}, h("h3", {}, device.device), h("span", { class: `tag ${tone}` }, word), device.is_paused ? h("span", { class: "tag warn" }, "paused") : null, member ? h("span", { class: "tag" }, member.phase) : h("span", { class: "tag" }, device.in_sight ? "discovered" : "not discovered")),
    member?.reason ? h("p", { class: "muted" }, member.reason) : null,
    h("p", { class: "muted" }, h("code", {}, device.fingerprint), device.how ? ` · ${device.how}` : ""),
    ...elsewhere(device, member, own),
    h(
      "p",
      { class: "row" },
      isTrusted
        ? h("button", { type: "button", class: "danger", onclick: () => confirm(`Revoke ${device.device}?`, "It leaves the ring immediately, until you pair it again.", "Revoke", () => change("/ui/revoke", { device: device.device, key: device.key }, `${device.device} is revoked.`)) }, "Revoke")
        : h("button", { type: "button", onclick: () => approve(device, own) }, "Approve"),
      isTrusted ? pauseButton(device) : null,
      isTrusted ? cap(device) : null,
    ),
  );
}

/** The command that remains to be typed on the device itself: this head changes only its own trust and requests. */
function elsewhere(device, member, own) {
  if (device.trusted === "yes" && device.how === BY_HAND && !SPOKEN_TO.has(member?.phase))
    return [h("p", {}, `It has to trust this head, too. On ${device.device} type:`), command(`primad devices trust ${own.device} --key ${own.key} --head`)];
  if (device.trusted === "yes" && device.is_paused)
    return [h("p", { class: "muted" }, "This head does not use it. To pause it for every head, type on it: ", h("code", {}, "primad pause"))];
  if (device.trusted === "revoked")
    return [h("p", { class: "muted" }, "This head and its devices ignore it. To end its trust in this head too, type on it: ", h("code", {}, `primad devices revoke ${own.device}`))];
  return [];
}

function pauseButton({ device, is_paused: isPaused, ram_bytes }) {
  const lend = () => change("/ui/lend", { device, is_paused: !isPaused, ram_bytes }, isPaused ? `${device} computes again.` : `${device} is paused.`);
  return h("button", { type: "button", onclick: lend }, isPaused ? "Resume" : "Pause");
}

/** A field for the most memory to use of a device; empty means all that it offers. */
function cap({ device, is_paused, ram_bytes }) {
  const id = `cap-${device}`;
  const input = h("input", { id, type: "number", min: 0.1, step: 0.1, placeholder: "all", value: ram_bytes === null ? null : ram_bytes / 1e9 });
  input.addEventListener("change", () => {
    if (!input.reportValidity()) return;
    const bytes = input.value === "" ? null : Math.round(Number(input.value) * 1e9);
    change("/ui/lend", { device, is_paused, ram_bytes: bytes }, bytes === null ? `All memory of ${device} may be used.` : `At most ${input.value} GB of ${device} will be used.`);
  });
  return h("span", { class: "cap" }, h("label", { for: id }, "Memory at most"), input, "GB");
}

function approve(device, own) {
  confirm(
    `Approve ${device.device}?`,
    h(
      "div",
      {},
      h("p", {}, "This is trust by hand, on this head alone; a code above pairs both sides at once. Compare the fingerprint with what ", h("code", {}, "primad devices"), " shows there: ", h("code", {}, device.fingerprint)),
      h("p", {}, `It has to trust this head as well. On ${device.device} type:`),
      command(`primad devices trust ${own.device} --key ${own.key} --head`),
    ),
    "Approve",
    () => change("/ui/trust", { device: device.device, key: device.key }, `${device.device} is approved here; now type the command on it.`),
  );
}

function confirmDialog() {
  parts.dialog = h("dialog", { "aria-labelledby": "confirm-title" });
  return parts.dialog;
}

function confirm(title, text, word, then) {
  parts.dialog.replaceChildren(
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "confirm-title" }, title),
      h("div", {}, text),
      h("p", { class: "row end" }, h("button", { value: "no", class: "quiet" }, "Cancel"), h("button", { value: "yes", class: "main" }, word)),
    ),
  );
  parts.dialog.returnValue = "no";
  parts.dialog.addEventListener("close", () => parts.dialog.returnValue === "yes" && then(), { once: true });
  parts.dialog.showModal();
}
