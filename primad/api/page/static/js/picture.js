// The ring as a picture: windows in the order in which a token visits them, clockwise from the top.

import { colourOf } from "./colours.js";
import { h, svg } from "./dom.js";
import { count, ms, ranges } from "./format.js";

const CENTRE = { x: 330, y: 236 };
const RADIUS = 168;
const WIDTH = 40;
const GAP = 4.6;
const LABEL = { width: 54, height: 15 };
const WHOLE_BOX = "0 0 660 480";
const RING_BOX = "126 32 408 408";
const LEAST_WIDTH = 520;

/** The point at `degrees` clockwise from the top. */
function point(degrees, radius) {
  const angle = ((degrees - 90) * Math.PI) / 180;
  return [CENTRE.x + radius * Math.cos(angle), CENTRE.y + radius * Math.sin(angle)];
}

function sector(from, to, inner, outer) {
  const large = to - from > 180 ? 1 : 0;
  const [a, b, c, d] = [point(from, outer), point(to, outer), point(to, inner), point(from, inner)];
  const at = ([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`;
  return `M${at(a)}A${outer} ${outer} 0 ${large} 1 ${at(b)}L${at(c)}A${inner} ${inner} 0 ${large} 0 ${at(d)}Z`;
}

/** The windows of `devices` in route order, each with its device and its place on the circle in degrees. */
function places(devices) {
  const windows = devices
    .flatMap((device) => device.windows.map(([first, last]) => ({ device, first, last })))
    .sort((one, other) => one.first - other.first);
  const total = windows.reduce((sum, { first, last }) => sum + last - first, 0) || 1;
  const gap = windows.length > 1 ? GAP : 0.01;
  const room = 360 - gap * windows.length;
  const least = Math.min(4, room / windows.length);
  const wide = windows.map(({ first, last }) => Math.max(least, ((last - first) / total) * room));
  const scale = room / wide.reduce((sum, each) => sum + each, 0);
  let at = gap / 2;
  return windows.map((window, i) => {
    const from = at;
    at += wide[i] * scale + gap;
    return { ...window, from, to: at - gap };
  });
}

/** Everything that determines how the picture looks; while it is the same, the picture stays. */
export function keyOf(status) {
  return JSON.stringify([
    status.epoch,
    status.rounds,
    status.devices.map(({ name, windows, gpu_layers: gpu, memory, ring }) => [name, windows, gpu, memory.resident, memory.streamed, ring === null]),
    status.links.map((link) => [link.source, link.target, ms(link.round_trip_ms)]),
    status.cluster.filter((each) => ["gone", "suspected"].includes(each.phase)),
  ]);
}

export function drawRing(status) {
  const segments = places(status.devices);
  const stripes = svg(
    "pattern",
    { id: "stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 3.4, height: 7, class: "stripe" }),
  );
  const picture = svg(
    "svg",
    { viewBox: WHOLE_BOX, class: "picture", role: "img", "aria-label": words(status) },
    svg("defs", {}, stripes),
    segments.map((segment) => drawWindow(segment, status)),
    drawHops(segments, status),
    svg("g", { class: "pulse" }, svg("circle", { cx: CENTRE.x, cy: CENTRE.y - RADIUS - WIDTH / 2 - 7, r: 5 })),
    svg("text", { x: CENTRE.x, y: CENTRE.y - 6, class: "speed" }),
    svg("text", { x: CENTRE.x, y: CENTRE.y + 20, class: "under" }),
    svg("text", { x: CENTRE.x, y: CENTRE.y + 42, class: "under second" }),
  );
  return picture;
}

function isLost({ name }, { cluster }) {
  return ["gone", "suspected"].includes(cluster.find((each) => each.device === name)?.phase);
}

function drawWindow({ device, first, last, from, to }, status) {
  const [inner, outer] = [RADIUS - WIDTH / 2, RADIUS + WIDTH / 2];
  const { resident, streamed } = device.memory;
  const share = streamed ? streamed / (resident + streamed) : 0;
  const onGpu = device.layers ? device.gpu_layers / device.layers : 0;
  const middle = (from + to) / 2;
  const [x, y] = point(middle, outer + 22);
  const side = Math.abs(x - CENTRE.x) < 26 ? "middle" : x > CENTRE.x ? "start" : "end";
  const low = y > CENTRE.y + 120 ? 14 : y < CENTRE.y - 120 ? -16 : 0;
  const label = [
    svg("text", { x, y: y + low, "text-anchor": side, class: "name" }, device.name),
    svg("text", { x, y: y + low + 16, "text-anchor": side, class: "layers" }, `layers ${ranges([[first, last]])}`),
  ];
  return svg(
    "g",
    { class: `window ${colourOf(device.name)}${isLost(device, status) ? " lost" : ""}` },
    svg("path", { d: sector(from, to, inner, outer), class: "band" }),
    share > 0 ? svg("path", { d: sector(to - (to - from) * share, to, inner, outer), class: "streams", fill: "url(#stripes)" }) : null,
    onGpu > 0 ? svg("path", { d: sector(from, from + (to - from) * onGpu, outer + 4, outer + 9), class: "gpu" }) : null,
    to - from > 7 ? label : null,
  );
}

/** The route in words, used where labels would overlap: a line for each window. */
export function route(status) {
  const segments = places(status.devices);
  return h(
    "ol",
    { class: "route" },
    segments.map(({ device, first, last }, i) => {
      const link = linkOf(status, device, segments[(i + 1) % segments.length].device);
      return h(
        "li",
        { class: `${colourOf(device.name)}${isLost(device, status) ? " lost" : ""}` },
        h("span", { class: "swatch", "aria-hidden": "true" }),
        h("strong", {}, device.name),
        h("span", { class: "muted" }, `layers ${ranges([[first, last]])}`),
        link ? h("span", { class: "muted hop" }, `${ms(link.round_trip_ms)} →`) : null,
      );
    }),
  );
}

function linkOf({ links }, one, other) {
  return links.find(({ source, target }) => source === one.name && target === other.name);
}

/** Shows the route in words if two labels would overlap, or one would leave the picture. */
export function fitLabels(figure) {
  const picture = figure.querySelector(".picture");
  if (!picture) return;
  setListed(figure, picture, false);
  const frame = figure.getBoundingClientRect();
  const labels = [...picture.querySelectorAll("text")].map((each) => each.getBoundingClientRect()).filter((each) => each.width);
  const isOut = ({ left, right }) => left < frame.left || right > frame.right;
  const overlap = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
  setListed(figure, picture, figure.clientWidth < LEAST_WIDTH || labels.some((one, i) => isOut(one) || labels.slice(i + 1).some((other) => overlap(one, other))));
}

function setListed(figure, picture, isListed) {
  figure.classList.toggle("listed", isListed);
  picture.setAttribute("viewBox", isListed ? RING_BOX : WHOLE_BOX);
}

/** The hops between windows: their direction and round trip. */
function drawHops(segments, status) {
  const taken = [];
  return segments.map((one, i) => {
    const other = segments[(i + 1) % segments.length];
    if (one.device.name === other.device.name) return null;
    const at = (one.to + (other.from < one.to ? other.from + 360 : other.from)) / 2;
    const arrow = svg("path", { d: "M-3.500 -6L4 0L-3.500 6Z", class: "arrow" });
    const [ax, ay] = point(at, RADIUS);
    arrow.setAttribute("transform", `translate(${ax} ${ay}) rotate(${at})`);
    const link = linkOf(status, one.device, other.device);
    return svg("g", { class: "hop" }, arrow, link ? hopLabel(at, ms(link.round_trip_ms), taken) : null);
  });
}

/** A label inside the ring, moved further in while it would overlap another label. */
function hopLabel(at, text, taken) {
  let radius = RADIUS - WIDTH / 2 - 12;
  let place;
  do {
    const [x, y] = point(at, radius);
    const side = Math.abs(x - CENTRE.x) < 30 ? "middle" : x > CENTRE.x ? "end" : "start";
    const shift = { middle: -LABEL.width / 2, end: -LABEL.width, start: 0 }[side];
    place = { x, y, side, left: x + shift };
    radius -= 6;
  } while (radius > 90 && taken.some((each) => Math.abs(each.left - place.left) < LABEL.width && Math.abs(each.y - place.y) < LABEL.height));
  taken.push(place);
  return svg("text", { x: place.x, y: place.y + 4, "text-anchor": place.side }, text);
}

/** A description of the picture for screen readers. */
function words({ devices, rounds }) {
  if (!devices.length) return "No ring serves.";
  const each = devices.map(({ name, windows, layers, gpu_layers: gpu, memory }) => {
    const streams = memory.streamed ? `, ${memory.streamed} of them streamed from disk` : "";
    return `${name} computes ${count(layers, "layer")} (${ranges(windows)})${gpu ? `, ${gpu} on its GPU` : ""}${streams}`;
  });
  return `A ring of ${count(devices.length, "device")}, ${count(rounds ?? 1, "round")} per token: ${each.join("; ")}.`;
}

/** The legend of the picture. */
export function legend(status) {
  const streams = status.devices.some(({ memory }) => memory.streamed > 0);
  const gpu = status.devices.some((device) => device.gpu_layers > 0);
  if (!streams && !gpu) return null;
  return h(
    "p",
    { class: "legend" },
    streams ? [h("span", { class: "sign striped" }), "streamed from disk"] : null,
    gpu ? [h("span", { class: "sign thin" }), "on the GPU"] : null,
  );
}
