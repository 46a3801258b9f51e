// One response as it is generated: its text, thoughts and calls, and its speed.

import { partOf } from "./attached.js";
import { events } from "./server.js";

/** What `chat` contains so far, as an API request for `model`; `values` are the settings. Throws `Error` if one is invalid. */
export function asked(chat, values, model) {
  const messages = values.system.trim() ? [{ role: "system", content: values.system }] : [];
  for (const message of chat.messages) {
    if (message.role === "assistant") {
      const calls = message.calls?.map(({ id, name, arguments: said }) => ({
        id,
        type: "function",
        function: { name, arguments: said },
      }));
      messages.push({ role: "assistant", content: message.content, ...(calls?.length && { tool_calls: calls }) });
    } else if (message.role === "tool") {
      messages.push({ role: "tool", tool_call_id: message.call, content: message.content });
    } else messages.push({ role: message.role, content: withPictures(message) });
  }
  const body = { messages, stream: true, stream_options: { include_usage: true }, return_progress: true };
  if (model !== null) body.model = model;
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (values[name] === "") continue;
    body[name] = Number(values[name]);
    if (!Number.isFinite(body[name])) throw new Error(`${name}: not a number`);
  }
  if (values.tools.trim()) {
    try {
      body.tools = JSON.parse(values.tools);
    } catch (error) {
      throw new Error(`tools: not valid JSON (${error.message})`);
    }
  }
  return body;
}

function withPictures({ content, pictures = [] }) {
  const shown = pictures.filter(({ url }) => url).map(({ url }) => partOf(url));
  return shown.length ? [...shown, { type: "text", text: content }] : content;
}

/** Streams the response to `body` into `message`, and calls `changed` after each part. */
export async function write(body, message, changed, signal) {
  const begun = performance.now();
  const timing = { first: null, last: null, thoughtUntil: null, parts: 0 };
  try {
    for await (const { data } of events("/v1/chat/completions", body, signal)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.load_progress) message.stats.load = chunk.load_progress;
      if (chunk.prompt_progress) message.stats.prompt = chunk.prompt_progress;
      const choice = chunk.choices?.[0];
      if (choice) take(choice, message, timing);
      if (chunk.usage) message.stats.tokens = chunk.usage.completion_tokens;
      measure(message, timing, begun);
      changed();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    message.stats.end = "stopped";
  } finally {
    measure(message, timing, begun);
  }
}

function take({ delta, finish_reason: end }, message, timing) {
  const now = performance.now();
  if (end) message.stats.end = end;
  if (!delta?.content && !delta?.reasoning_content && !delta?.tool_calls) return;
  timing.first ??= now;
  timing.last = now;
  timing.parts += 1;
  if (delta.reasoning_content) {
    message.thought += delta.reasoning_content;
    timing.thoughtUntil = now;
  }
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    const known = (message.calls[call.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= call.id ?? "";
    known.name ||= call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
}

function measure({ stats }, timing, begun) {
  if (timing.first === null) return;
  const tokens = stats.tokens ?? timing.parts;
  const took = (timing.last - timing.first) / 1000;
  stats.firstMs = timing.first - begun;
  stats.perSecond = tokens > 1 && took > 0 ? (tokens - 1) / took : null;
  stats.thoughtMs = timing.thoughtUntil === null ? null : timing.thoughtUntil - timing.first;
}
