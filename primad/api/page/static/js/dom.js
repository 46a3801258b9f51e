// Elements without HTML text: no foreign text is parsed here.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes, listeners ("onclick"), and children; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces the children of `element`; null ones are left out, which replaceChildren would write as "null". */
export function replace(element, ...children) {
  element.replaceChildren();
  filled(element, {}, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = {
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20l1-5L16 4l4 4L9 19zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  plus: "M12 5v14M5 12h14",
  sliders: "M5 8h8M17 8h2M5 16h2M11 16h8M15 5.500v5M9 13.500v5",
  list: "M5 7h14M5 12h14M5 17h14",
  key: "M14.500 14a4.500 4.500 0 1 0-4.300-3.200L4 17v3h4v-2h2v-2h2l1.300-1.300",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M9 9h.010",
  microphone: "M12 4a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0V7a3 3 0 0 0-3-3zM6 11v1a6 6 0 0 0 12 0v-1M12 18v3",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
};

/** An icon for a button, whose label has the words. */
export function icon(name) {
  const path = svg("path", { d: PATHS[name], fill: "none", stroke: "currentColor", "stroke-width": 1.8 });
  path.setAttribute("stroke-linecap", "round");
  path.setAttribute("stroke-linejoin", "round");
  return svg("svg", { viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" }, path);
}

/** A button with an icon. */
export function iconButton(name, label, onclick, more = {}) {
  return h("button", { class: "icon", type: "button", title: label, "aria-label": label, onclick, ...more }, icon(name));
}

/** Tells screen readers what happened. */
export function announce(text) {
  document.getElementById("news").textContent = text;
}

/** Copies `text` to the clipboard; on a page from another device without encryption, in the old way of browsers. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    const before = document.activeElement;
    area.select();
    document.execCommand("copy");
    area.remove();
    before?.focus();
  }
  announce("Copied.");
}
