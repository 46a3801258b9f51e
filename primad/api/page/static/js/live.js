// The status of the head, once a second, for every part of the page.

import { events, Refused } from "/page/js/server.js";

const AGAIN_MS = 1000;
const MOST_AGAIN_MS = 8000;
const listeners = new Set();
let latest = null;

/** Calls `listener({status, before, isConnected, error})` with each snapshot, and when the head goes or comes. */
export function onStatus(listener) {
  listeners.add(listener);
  if (latest) listener(latest);
}

function tell(news) {
  latest = news;
  for (const listener of listeners) listener(news);
}

/** Listens for ever. */
export async function watch() {
  let wait = AGAIN_MS;
  for (;;) {
    let error = "the head does not answer";
    try {
      for await (const { event, data } of events("/ui/events")) {
        if (event !== "status") continue;
        wait = AGAIN_MS;
        const before = latest?.isConnected ? latest.status : null;
        tell({ status: { ...JSON.parse(data), at_ms: performance.now() }, before, isConnected: true, error: "" });
      }
    } catch (failure) {
      if (failure instanceof Refused) error = failure.message;
    }
    tell({ status: latest?.status ?? null, before: null, isConnected: false, error });
    await new Promise((resolve) => {
      setTimeout(resolve, wait);
      addEventListener("primad-key", resolve, { once: true });
    });
    wait = Math.min(2 * wait, MOST_AGAIN_MS);
  }
}

/** How much of something that only grows came in a second; null where it is not known. */
export function rate(news, read) {
  const { status, before } = news;
  if (!status || !before) return null;
  const [now, then] = [read(status), read(before)];
  if (now === null || now === undefined || then === null || then === undefined || now < then) return null;
  return ((now - then) * 1000) / (status.at_ms - before.at_ms);
}
