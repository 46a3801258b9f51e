// Formulas in markdown, shown as they were written: markdown would interpret their backslashes, stars and underscores.

import { Tokenizer } from "../vendor/marked.js";

const CLOSES = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const OPENS = /\\[([]|\$/g;
const BLOCK_OPENS = /(?:^|\n)(?= {0,3}(?:\\\[|\$\$))/;
const DOLLARS = /^\$(?=[^\s$])(?:\\[^\n]|[^\\$\n]){1,500}?(?<=\S)\$(?!\w)/; // "$5 and $6" is not a formula
const MOST_SIGNS = 2000;

/** The formula at the start of `text`, "" if there is none. A blank line ends a formula. */
function formulaOf(text) {
  const close = CLOSES[text.slice(0, 2)];
  if (!close) return DOLLARS.exec(text)?.[0] ?? "";
  const end = text.slice(0, MOST_SIGNS).indexOf(close, 3);
  const formula = end > 0 ? text.slice(0, end + 2) : "";
  return /\n[ \t]*\n/.test(formula) ? "" : formula;
}

const block = {
  name: "formulaBlock",
  level: "block",
  start: (text) => text.match(BLOCK_OPENS)?.index,
  tokenizer(text) {
    const [indent] = /^ {0,3}(?=\\\[|\$\$)/.exec(text) ?? [];
    if (indent === undefined) return undefined;
    const formula = formulaOf(text.slice(indent.length));
    const [rest] = /^[ \t]*(?:\n|$)/.exec(text.slice(indent.length + formula.length)) ?? [];
    return formula && rest !== undefined ? { type: "formulaBlock", raw: indent + formula + rest, text: formula } : undefined;
  },
  renderer: ({ text }) => `<p>${shown(text)}</p>\n`,
};

const inline = {
  name: "formula",
  level: "inline",
  start(text) {
    const at = text.search(OPENS);
    return at < 0 ? undefined : at;
  },
  tokenizer(text) {
    const formula = formulaOf(text);
    return formula ? { type: "formula", raw: formula, text: formula } : undefined;
  },
  renderer: ({ text }) => shown(text),
};

/** The part of a paragraph that may end emphasis; computed once for each paragraph. */
let latest = { masked: null, hidden: null };

const tokenizer = {
  /** A formula that is not closed yet, or was cut, keeps its backslash as well. */
  escape(text) {
    const found = /^\\[()[\]]/.exec(text);
    return found ? { type: "escape", raw: found[0], text: found[0] } : false;
  },
  /** A star in a formula does not end emphasis that began before it. */
  emStrong(text, masked, before) {
    if (latest.masked !== masked) latest = { masked, hidden: withoutFormulas(text, masked) };
    return Tokenizer.prototype.emStrong.call(this, text, latest.hidden, before);
  },
};

/** Returns `masked`, which ends like `text` except for the parts that it hides, with the formulas hidden too. */
function withoutFormulas(text, masked) {
  const from = masked.length - text.length;
  const parts = [];
  let done = 0;
  for (const { index } of text.matchAll(OPENS)) {
    const formula = index < done ? "" : formulaOf(text.slice(index));
    if (!formula) continue;
    parts.push(masked.slice(from + done, from + index), "a".repeat(formula.length));
    done = index + formula.length;
  }
  return parts.length ? masked.slice(0, from) + parts.join("") + masked.slice(from + done) : masked;
}

export const formulas = { extensions: [block, inline], tokenizer };

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

/** `text` escaped for HTML. */
export function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => ESCAPES[sign]);
}

function shown(text) {
  return `<code class="formula">${escaped(text)}</code>`;
}
