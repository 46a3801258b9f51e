// Formats figures for people.

export function bytes(value) {
  if (value === null || value === undefined) return "?";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function ms(value) {
  if (value === null || value === undefined) return "?";
  if (value >= 1000) return `${digits(value / 1000)} s`;
  return `${digits(value)} ms`;
}

/** When something will be ready, as far as that can be forecast. */
export function soon({ expected_s: seconds }) {
  return seconds === null ? "" : `Ready in about ${Math.max(1, Math.round(seconds))} s.`;
}

export function speed(value) {
  return value === null || value === undefined ? "?" : digits(value);
}

/** The one speed of the page: tokens per second of one request, from its first token on. */
export function decode(value) {
  return `decode ${speed(value)} tokens/s`;
}

export function percent(share) {
  return `${share > 0 ? "+" : share < 0 ? "−" : "±"}${Math.abs(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

/** Layers as ranges; a window's end is the layer after its last one. */
export function ranges(windows) {
  return windows.map(([first, last]) => (last - first > 1 ? `${first}–${last - 1}` : `${first}`)).join(", ");
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
}
