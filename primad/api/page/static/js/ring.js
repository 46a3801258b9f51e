// The ring, live: the picture, measured figures next to the plan's, events.

import { colourOf, giveColours } from "./colours.js";
import { announce, h, svg } from "./dom.js";
import { bytes, clock, count, ms, ranges, speed } from "./format.js";
import { onStatus, rate } from "./live.js";
import { startWhatIf } from "./what_if.js";
import { drawRing, fitLabels, keyOf, legend, route } from "./picture.js";

const KEPT = 120;
const OFF = 1.25;
const KINDS = { joined: "joined", gone: "gone", ring: "new ring", note: "note" };

let parts = {};
let drawn = "";
let told = "";
let shown = null;
let fitted = 0;
const speeds = [];

export function startRing(panel) {
  parts = {
    picture: h("figure", { class: "card ring-card" }, h("figcaption", { class: "detail" }, "Waiting for the devices…")),
    detail: h("figcaption", { class: "detail" }),
    facts: h("dl", { class: "facts" }),
    line: h("div", { class: "spark" }),
    wrong: h("p", { class: "wrong", hidden: true }),
    events: h("ol", { class: "events", tabindex: 0, "aria-label": "Events, the latest first" }),
    devices: h("div", { class: "device-cards" }),
    others: h("div", { class: "others" }),
    whatIf: h("div", {}),
  };
  panel.append(
    h(
      "div",
      { class: "ring-view" },
      h(
        "div",
        { class: "ring-top" },
        parts.picture,
        h(
          "div",
          { class: "ring-side" },
          h("div", { class: "card" }, h("h2", {}, "Now"), parts.line, h("p", { class: "muted" }, "tokens/s of all requests, the last two minutes"), parts.facts, parts.wrong),
          h("div", { class: "card grows" }, h("h2", {}, "Events"), parts.events),
        ),
      ),
      h("h2", { class: "unseen" }, "Devices of the ring"),
      parts.devices,
      parts.others,
      parts.whatIf,
    ),
  );
  startWhatIf(parts.whatIf);
  new ResizeObserver(fit).observe(parts.picture);
  onStatus(update);
}

function update(news) {
  const { status, isConnected } = news;
  if (!status) return;
  const isForming = !status.devices.length;
  if (!isForming) shown = status;
  const now = rate(news, (each) => each.tokens?.completion);
  speeds.push(now ?? 0);
  speeds.splice(0, speeds.length - KEPT);
  const pictured = { ...(shown ?? status), cluster: status.cluster };
  giveColours(pictured.devices.map((device) => device.name));
  const isNew = keyOf(pictured) !== drawn;
  if (isNew) {
    drawn = keyOf(pictured);
    parts.picture.replaceChildren(drawRing(pictured), route(pictured), parts.detail, legend(pictured) ?? "");
  }
  parts.picture.classList.toggle("stale", isForming || !isConnected);
  writeCentre(status, now, isForming, isConnected);
  if (isNew) fitted = 0;
  fit();
  parts.line.replaceChildren(sparkline());
  parts.facts.replaceChildren(...facts(status, now));
  showWrong(status);
  parts.devices.replaceChildren(...(isForming ? [] : status.devices.map((device) => card(device, news))));
  showOthers(status);
  showEvents(status.events);
}

/** Fits the labels again if the picture's width changed. */
function fit() {
  const width = parts.picture.clientWidth;
  if (width === fitted) return;
  fitted = width;
  fitLabels(parts.picture);
}

function writeCentre(status, now, isForming, isConnected) {
  const [big, under, second] = parts.picture.querySelectorAll(".speed, .under");
  const isShown = isConnected && !isForming;
  const figure = decodeNow(status, now) || decodeMeasured(status);
  big.textContent = isShown && figure ? speed(figure) : isForming ? "…" : "–";
  under.textContent = isShown ? "tokens/s decode" : "";
  second.textContent = !isShown ? "" : now ? "now" : figure ? "latest request" : idle(status.tokens);
  parts.detail.textContent = isShown ? "" : isConnected ? status.detail : "The head does not respond.";
  const pulse = parts.picture.querySelector(".pulse");
  pulse.classList.toggle("moves", Boolean(now) && isConnected);
  if (now) pulse.style.animationDuration = `${Math.max(0.5, Math.min(8, 1 / now)).toFixed(1)}s`;
}

/** Why there is no speed. */
function idle(tokens) {
  return tokens?.answers_open ? "no token yet" : tokens?.completion ? "no request now" : "no request yet";
}

/** The decode speed of one request: the tokens of all running requests are divided among them. */
function decodeNow({ tokens, sequences }, now) {
  return now && now / Math.max(1, Math.min(tokens.answers_open, sequences ?? 1));
}

function decodeMeasured({ measured }) {
  return measured && 1000 / measured.tpot_ms;
}

function sparkline() {
  const most = Math.max(1, ...speeds);
  const [width, height] = [300, 44];
  const points = speeds.map((each, i) => `${(((KEPT - speeds.length + i) * width) / (KEPT - 1)).toFixed(1)},${(height - 2 - (each / most) * (height - 6)).toFixed(1)}`);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Tokens per second of all requests in the last two minutes, at most ${speed(most)}` },
    svg("polyline", { points: points.join(" ") }),
  );
}

function perSecond(value) {
  return `${speed(value)} tokens/s`;
}

function facts(status, now) {
  const rows = [];
  const add = (name, value) => rows.push(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  if (status.measured) add("decode, latest request", perSecond(decodeMeasured(status)));
  if (status.predicted) add("decode, forecast", perSecond(status.predicted.tokens_per_s));
  if (status.predicted) add("TTFT, forecast", ms(status.predicted.ttft_ms));
  if (status.tokens) add("all requests now", perSecond(now ?? 0));
  if (status.tokens) add("requests open", `${status.tokens.answers_open}${status.sequences ? ` of ${status.sequences} concurrent` : ""}`);
  if (status.tokens) add("generated", count(status.tokens.completion, "token"));
  if (status.drafts?.drafted) add("draft tokens accepted", `${Math.round((100 * status.drafts.accepted) / status.drafts.drafted)} %`);
  if (status.pictures?.device) add("images encoded by", status.pictures.device);
  if (status.epoch) add("plan", `ring ${status.epoch}, ${count(status.rounds ?? 1, "round")} per token`);
  if (status.kv?.replicated_bytes) add("KV cache replicated", bytes(status.kv.replicated_bytes));
  return rows;
}

function showWrong(status) {
  const wrong = status.measured?.wrong;
  parts.wrong.hidden = !wrong;
  if (!wrong) return;
  const terms = { compute: `compute on ${wrong.device}`, disk: `the disk of ${wrong.device}`, hops: "the hops between devices" };
  parts.wrong.textContent = `Largest error of the forecast: ${terms[wrong.term] ?? wrong.term}, ${ms(wrong.measured_ms)} per token instead of ${ms(wrong.predicted_ms)}.`;
}

function card(device, news) {
  const { memory, predicted: planned, ring } = device;
  const find = (status) => status.devices.find((each) => each.name === device.name);
  const reads = rate(news, (status) => find(status)?.memory.read_bytes);
  const next = news.status.links.find((link) => link.source === device.name && link.target === following(device, news.status));
  const isPlanned = planned.resident !== null; // windows set by hand have no forecast
  const rows = [
    row("resident layers", number(memory.resident), number(planned.resident)),
    row("streamed layers", number(memory.streamed) + (memory.streams_output ? " + output" : ""), number(planned.streamed)),
    row("compute per token", ms(ring?.compute_ms_per_token), ms(planned.compute_ms_per_token), ratio(ring?.compute_ms_per_token, planned.compute_ms_per_token)),
    row("disk wait per token", ms(memory.stall_ms_per_token), ms(planned.stall_ms_per_token), memory.stall_ms_per_token > 1 ? ratio(memory.stall_ms_per_token, planned.stall_ms_per_token) : null),
    row("read per token", bytes(memory.bytes_read_per_token), bytes(planned.bytes_read_per_token)),
    row("read now", reads === null ? "?" : `${bytes(reads)}/s`, ""),
    row("hop overhead", ring?.hop_median_s == null ? "?" : ms(ring.hop_median_s * 1000), ms(planned.hop_ms)),
    row("memory", bytes(ring?.rss_bytes), bytes(planned.ram_bytes), ratio(ring?.rss_bytes, planned.ram_bytes)),
  ];
  return h(
    "article",
    { class: `card device ${colourOf(device.name)}`, "aria-label": device.name },
    h(
      "header",
      {},
      h("span", { class: "swatch", "aria-hidden": "true" }),
      h("h3", {}, device.name),
      h("span", { class: "tag" }, device.role),
      ring === null ? silent(device) : pressure(memory.pressure),
    ),
    h("p", { class: "muted" }, `${count(device.layers, "layer")}: ${ranges(device.windows)}${onGpus(device)}`),
    h("table", { class: isPlanned ? null : "unplanned" }, h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col" }, "now"), h("th", { scope: "col" }, "plan"))), h("tbody", {}, rows)),
    next ? h("p", { class: "muted" }, `→ ${next.target}: ${ms(next.round_trip_ms)} round trip, ${speed(next.mbit_per_s)} Mbit/s`) : null,
  );
}

/** The device's layers on GPUs, by GPU if it has several. */
function onGpus({ gpus, gpu_layers: total }) {
  const used = (gpus ?? []).filter(({ layers }) => layers);
  if (used.length) return `, ${used.map(({ name, id, layers }) => `${layers} on ${name}${id ? ` (${id})` : ""}`).join(", ")}`;
  return total ? `, ${total} on the GPU` : "";
}

function following(device, { devices }) {
  const at = devices.indexOf(device);
  return devices[(at + 1) % devices.length].name;
}

function number(value) {
  return value === null || value === undefined ? "?" : String(value);
}

function row(name, now, plan, over = null) {
  return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: over > OFF ? "over" : null }, now), h("td", {}, plan));
}

function ratio(now, plan) {
  return now && plan ? now / plan : null;
}

function pressure(level) {
  if (!level || level === "calm") return null;
  return h("span", { class: `tag ${level === "high" ? "bad" : "warn"}` }, `memory pressure: ${level}`);
}

/** The tag of a device without figures: it replies between two steps, and a prompt chunk may take long. */
function silent(device) {
  return device.computes ? h("span", { class: "tag warn" }, "computes a long step") : h("span", { class: "tag bad" }, "does not respond");
}

function showOthers(status) {
  const inRing = new Set(status.devices.map((device) => device.name));
  const why = new Map(status.left_out.map((each) => [each.device, each.reason]));
  const lines = status.cluster
    .filter((member) => !inRing.has(member.device))
    .map((member) => h("li", {}, h("strong", {}, member.device), ` ${member.phase}`, text(member.reason || why.get(member.device))));
  parts.others.replaceChildren(...(lines.length ? [h("div", { class: "card" }, h("h2", {}, "Not in the ring"), h("ul", {}, lines))] : []));
}

function text(reason) {
  return reason ? `: ${reason}` : "";
}

function showEvents(events) {
  const key = JSON.stringify(events.at(-1) ?? null) + events.length;
  if (key === told) return;
  const isFirst = told === "";
  told = key;
  parts.events.replaceChildren(
    ...[...events].reverse().map((each) =>
      h("li", { class: each.kind }, h("time", {}, clock(each.at_s)), h("span", { class: "kind" }, KINDS[each.kind] ?? each.kind), h("span", {}, each.text)),
    ),
  );
  if (!events.length) parts.events.append(h("li", { class: "muted" }, "Nothing yet."));
  if (!isFirst && events.length) announce(events.at(-1).text);
}
