// Chooses the model of the chat if there are several; this browser remembers the choice.

import { h } from "./dom.js";
import { onStatus } from "./live.js";

const MODEL = "primad.model";

let models = [];
const box = h("select", { class: "model", "aria-label": "Model", hidden: true, onchange: () => localStorage.setItem(MODEL, box.value) });

/** The model to request; null if there is only one. */
export function chosen() {
  return models.length ? box.value : null;
}

/** The element for choosing; hidden if there is only one model. */
export function selector() {
  let latest = "";
  onStatus(({ status }) => {
    models = (status?.models ?? []).filter((each) => !each.embeds);
    const key = JSON.stringify(models.map(({ id, state }) => [id, state]));
    if (key === latest || document.activeElement === box) return;
    latest = key;
    const wanted = localStorage.getItem(MODEL) ?? status?.model;
    box.hidden = !models.length;
    box.replaceChildren(...models.map(({ id, state }) => h("option", { value: id }, state === "unloaded" ? id : `${id} (${state})`)));
    if (models.some(({ id }) => id === wanted)) box.value = wanted;
  });
  return box;
}
