// What if: the predicted effect of removing a device, or of adding one.

import { announce, h } from "./dom.js";
import { count, decode, ms, percent } from "./format.js";
import { onStatus } from "./live.js";
import { ask } from "./server.js";

const LINKS = [
  ["2.5Gbit/s,0.3ms", "wired, 2.5 Gbit/s"],
  ["1Gbit/s,0.5ms", "wired, 1 Gbit/s"],
  ["300Mbit/s,4ms", "Wi-Fi"],
];

let parts = {};
let members = "";

export function startWhatIf(panel) {
  parts = {
    without: h("fieldset", {}, h("legend", {}, "Leave out")),
    profile: h("select", { id: "if-profile" }, h("option", { value: "" }, "no other device")),
    link: h("select", { id: "if-link" }, LINKS.map(([value, text]) => h("option", { value, selected: value.startsWith("1G") }, text))),
    button: h("button", { type: "submit", class: "main" }, "Predict"),
    answer: h("div", { class: "if-answer", role: "status" }),
  };
  panel.append(
    h(
      "form",
      { class: "card", onsubmit: (event) => (event.preventDefault(), predict()) },
      h("h2", {}, "What if"),
      h(
        "div",
        { class: "if-row" },
        parts.without,
        h("div", { class: "field-block" }, h("label", { for: "if-profile" }, "Add"), parts.profile),
        h("div", { class: "field-block" }, h("label", { for: "if-link" }, "connected by"), parts.link),
        parts.button,
      ),
      parts.answer,
    ),
  );
  onStatus(({ status }) => status && showMembers(status));
}

let hasProfiles = false;

async function fetchProfiles() {
  hasProfiles = true;
  try {
    const { profiles } = await ask("/ui/profiles");
    parts.profile.append(...profiles.map((name) => h("option", { value: name }, name)));
  } catch {
    hasProfiles = false; // requested again with the next snapshot
  }
}

function showMembers(status) {
  if (!hasProfiles) fetchProfiles();
  const names = status.devices.filter((device) => device.role !== "head").map((device) => device.name);
  if (!names.length || JSON.stringify(names) === members) return;
  members = JSON.stringify(names);
  parts.without.replaceChildren(
    h("legend", {}, "Leave out"),
    ...names.map((name) => h("label", { class: "check" }, h("input", { type: "checkbox", name: "without", value: name }), name)),
  );
}

async function predict() {
  const without = [...parts.without.querySelectorAll("input:checked")].map((box) => box.value);
  const profiles = parts.profile.value ? [parts.profile.value] : [];
  if (!without.length && !profiles.length) {
    parts.answer.replaceChildren(h("p", { class: "muted" }, "Choose a device to leave out, or one to add."));
    return;
  }
  parts.button.disabled = true;
  parts.answer.replaceChildren(h("p", { class: "muted" }, "Solving…"));
  try {
    showAnswer(await ask("/ui/what-if", { without, profiles, link: parts.link.value }));
  } catch (error) {
    parts.answer.replaceChildren(h("p", { class: "failed" }, error.message));
  }
  parts.button.disabled = false;
}

function showAnswer(found) {
  const change = found.now_tokens_per_s ? found.tokens_per_s / found.now_tokens_per_s - 1 : null;
  const tone = change > 0.005 ? "better" : change < -0.005 ? "worse" : "";
  const layers = found.devices.map(({ device, layers: number, gpu_layers: gpu, streamed }) => {
    const more = [gpu ? `${gpu} on the GPU` : "", streamed ? `${streamed} streamed` : ""].filter(Boolean).join(", ");
    return h("li", {}, h("strong", {}, device), ` ${count(number, "layer")}${more ? ` (${more})` : ""}`);
  });
  parts.answer.replaceChildren(
    h(
      "p",
      { class: "if-figure" },
      h("strong", {}, `Forecast: ${decode(found.tokens_per_s)}`),
      change === null ? null : h("span", { class: tone }, ` ${percent(change)}`),
      h("span", { class: "muted" }, ` TTFT ${ms(found.ttft_ms)}${found.now_ttft_ms ? `, now ${ms(found.now_ttft_ms)}` : ""}`),
    ),
    h("ul", { class: "if-layers" }, layers),
  );
  announce(`Forecast: ${decode(found.tokens_per_s)}`);
}
