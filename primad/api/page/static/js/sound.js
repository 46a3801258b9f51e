// Sounds for the next message: a chosen file, or a recording. A format that the head does not read becomes a WAV.

import { announce, iconButton } from "./dom.js";
import { onStatus } from "./live.js";
import { chosen } from "./selector.js";
import { ask } from "./server.js";

const RATE = 16000;
const MOST_MS = 600_000;
const KNOWN = ["audio/wav", "audio/x-wav", "audio/wave", "audio/mpeg", "audio/mp3", "audio/flac", "audio/x-flac"];
const PREFIX = "data:audio/";

/** Whether the data URL is a sound. */
export function isSound(url) {
  return url.startsWith(PREFIX);
}

/** The sound of a message for the head: base64, with its format. */
export function soundPart(url) {
  const [kind, data] = url.slice(PREFIX.length).split(";base64,");
  return { type: "input_audio", input_audio: { data, format: /mp/.test(kind) ? "mp3" : kind.replace("x-", "") } };
}

/** `file` in a format that the head reads. */
export async function readable(file) {
  if (KNOWN.includes(file.type)) return file;
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
  return new Blob([wav(sound)], { type: "audio/wav" });
}

/** The mean of its channels in 16 bits, after a WAV header. */
function wav(sound) {
  const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
  const view = new DataView(new ArrayBuffer(44 + 2 * sound.length));
  const text = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * sound.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  for (let i = 0; i < sound.length; i += 1) {
    const mean = channels.reduce((sum, each) => sum + each[i], 0) / channels.length;
    view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, mean))), true);
  }
  return view.buffer;
}

/** The button that records, and calls `add` with the recording; shown if the model hears and the browser can record. */
export function recordButton(add) {
  let recorder = null;
  const button = iconButton("microphone", "Record audio", () => (recorder ? recorder.stop() : begin()), { hidden: true, id: "record", "aria-pressed": "false" });
  const mark = (isOn) => {
    button.setAttribute("aria-pressed", String(isOn));
    button.title = "Record audio";
    announce(isOn ? "recording" : "recorded");
  };

  async function begin() {
    button.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const heard = [];
      const own = new MediaRecorder(stream);
      recorder = own;
      own.ondataavailable = ({ data }) => {
        heard.push(data);
        if (own.state === "recording") button.title = `Stop after ${heard.length} s`;
      };
      own.onstop = () => {
        for (const track of stream.getTracks()) track.stop();
        recorder = null;
        mark(false);
        add([new File(heard, "recording", { type: own.mimeType })]);
      };
      own.start(1000);
      setTimeout(() => own.state === "recording" && own.stop(), MOST_MS);
      mark(true);
    } catch (error) {
      announce(`audio cannot be recorded: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  }

  let latest = "";
  onStatus(async ({ status }) => {
    const key = JSON.stringify([status?.model, chosen(), (status?.models ?? []).map(({ id, state }) => [id, state])]);
    if (key === latest || !navigator.mediaDevices?.getUserMedia) return;
    latest = key;
    const models = (await ask("/v1/models").catch(() => null))?.data ?? [];
    const model = models.find(({ id }) => id === chosen()) ?? models[0];
    button.hidden = !model?.architecture?.input_modalities?.includes("audio");
  });
  return button;
}
