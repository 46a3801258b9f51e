// Colours of devices. Each device keeps its colour while others come and go, and when the page is opened again.

const KEPT = "primad.colours";
const NUMBER = 8;
const MOST_DEVICES = 256;
let known = new Map(read());

function read() {
  try {
    return Object.entries(JSON.parse(localStorage.getItem(KEPT)) ?? {}).filter(([, colour]) => colour >= 0 && colour < NUMBER);
  } catch {
    return [];
  }
}

/** Gives each of `names` without a colour one that none of the others has, if there is one; else one that few have. */
export function giveColours(names) {
  const missing = names.filter((name) => !known.has(name));
  for (const name of missing) {
    const users = (colour) => [...known].filter(([other, its]) => its === colour).map(([other]) => other);
    const cost = (colour) => users(colour).filter((other) => names.includes(other)).length * MOST_DEVICES + users(colour).length;
    const colours = Array.from({ length: NUMBER }, (_, colour) => colour);
    known.set(name, colours.reduce((best, colour) => (cost(colour) < cost(best) ? colour : best)));
  }
  if (!missing.length) return;
  known = new Map([...known].slice(-MOST_DEVICES));
  try {
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(known)));
  } catch {
    // storage is full: the colours last as long as this page
  }
}

/** The class with the colour of a device. */
export function colourOf(name) {
  return `d${known.get(name) ?? 0}`;
}
