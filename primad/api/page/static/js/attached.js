// Pictures and sounds that go with the next message: pasted, dropped, chosen or recorded, shown with their cost in tokens.

import { announce, h, icon, iconButton } from "./dom.js";
import { count } from "./format.js";
import { chosen } from "./selector.js";
import { ask } from "./server.js";
import { isSound, readable, recordButton, soundPart } from "./sound.js";

const MOST = 10;
const SIDE = 1600;
const KEPT_BYTES = 1 << 20;
const KNOWN = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

let pictures = [];
const row = h("ul", { class: "attached", "aria-label": "Images and audio", hidden: true });
const input = h("input", { type: "file", accept: "image/*,audio/*", multiple: true, hidden: true, id: "pictures", onchange: () => add(input.files) });

/** The row of pictures, placed above the composer; files dropped on `area` or pasted into it are added. */
export function attachedRow(area) {
  area.addEventListener("paste", (event) => {
    const files = event.clipboardData?.files;
    if (!files?.length) return;
    event.preventDefault();
    add(files);
  });
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  return row;
}

/** The buttons that choose and record files, with their input. */
export function attachButton() {
  return [iconButton("image", "Add images or audio", () => input.click()), input, recordButton(add)];
}

/** Whether anything is attached. */
export function hasAttached() {
  return pictures.length > 0;
}

/** Returns what is attached and clears the row: it goes with a message now. */
export function takeAttached() {
  const taken = pictures.map(({ name, url }) => ({ name, url }));
  pictures = [];
  draw();
  return taken;
}

/** A picture or sound as a part of a message. */
export function partOf(url) {
  return isSound(url) ? soundPart(url) : { type: "image_url", image_url: { url } };
}

/** A picture or sound of a message, as the page shows it; those of old conversations are not kept. */
export function shownPicture({ name, url }) {
  if (url && isSound(url)) return h("audio", { controls: true, src: url, "aria-label": name });
  return url ? h("img", { class: "picture", src: url, alt: name }) : h("span", { class: "hint" }, `[${name}, not kept]`);
}

async function add(files) {
  for (const file of [...files].slice(0, MOST - pictures.length)) {
    const picture = { name: file.name || "image", url: "", cost: "", failed: "" };
    pictures.push(picture);
    try {
      picture.url = await read(file);
      draw();
      picture.cost = count(await tokensOf(picture.url), "token");
    } catch (error) {
      picture.failed = picture.url ? error.message : "this browser cannot read it";
      announce(`${picture.name}: ${picture.failed}`);
      if (!picture.url) pictures = pictures.filter((each) => each !== picture);
    }
    draw();
  }
  input.value = "";
}

/** The file as a data URL; a file that is large, or of another format, is redrawn. */
async function read(file) {
  if (file.type.startsWith("audio/")) return dataUrl(await readable(file));
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= KEPT_BYTES && KNOWN.includes(file.type)) {
    return dataUrl(file);
  }
  const canvas = h("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** What a picture costs in tokens; it is encoded to find out, and not again for its message. */
async function tokensOf(url) {
  const text = { type: "text", text: "a" };
  const model = chosen();
  const counted = async (content) => {
    const body = { messages: [{ role: "user", content }], ...(model !== null && { model }) };
    return (await ask("/v1/chat/completions/input_tokens", body)).input_tokens;
  };
  return (await counted([partOf(url), text])) - (await counted([text]));
}

function draw() {
  row.hidden = !pictures.length;
  row.replaceChildren(...pictures.filter(({ url }) => url).map(drawn));
}

function drawn(picture) {
  const remove = () => {
    pictures = pictures.filter((each) => each !== picture);
    draw();
  };
  return h(
    "li",
    {},
    isSound(picture.url) ? shownPicture(picture) : h("img", { src: picture.url, alt: picture.name }),
    h("span", { class: picture.failed ? "failed" : "hint" }, picture.failed || picture.cost || "…"),
    h("button", { class: "icon", type: "button", title: "Remove", "aria-label": `Remove ${picture.name}`, onclick: remove }, icon("bin")),
  );
}
