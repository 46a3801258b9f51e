// Markdown as HTML that is safe to show: model output is never trusted. HTML in it is shown as text.

import { copy, h, iconButton } from "./dom.js";
import { escaped, formulas } from "./formulas.js";
import { Marked } from "../vendor/marked.js";

/** An image becomes a link to it: loading it would tell another host what the model wrote. */
const renderer = {
  html: ({ text }) => escaped(text),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  link({ tokens }) {
    for (const each of tokens) each.isInLink = true;
    return false;
  },
  image({ href, text, isInLink }) {
    const words = escaped(text ? `Image: ${text}` : "Image");
    return isInLink ? words : `<a href="${escaped(href)}">${words}</a>`;
  },
};
const marked = new Marked({ gfm: true, breaks: true, renderer }, formulas);
const ALLOWED = {
  ALLOWED_TAGS:
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s strong sub sup table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};
const purify = window.DOMPurify;
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
  const name = node.getAttribute?.("class");
  if (name && !/^(?:formula|language-[\w+#.-]{1,30})$/.test(name)) node.removeAttribute("class");
});

/** Shows `text` in `element`. */
export function show(element, text) {
  element.innerHTML = purify.sanitize(marked.parse(text), ALLOWED);
  for (const pre of element.querySelectorAll("pre")) withHeading(pre);
  for (const table of element.querySelectorAll("table")) {
    const scroller = h("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
}

function withHeading(pre) {
  const code = pre.querySelector("code");
  const language = code?.className.replace("language-", "") ?? "";
  const box = h("div", { class: "code" });
  pre.replaceWith(box);
  pre.setAttribute("tabindex", "0");
  const button = iconButton("copy", "Copy code", () => copy(pre.textContent));
  box.append(h("div", { class: "code-top" }, h("span", {}, language || "text"), button), pre);
}
