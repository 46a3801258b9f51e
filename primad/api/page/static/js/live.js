// The status of the head, fetched once a second while the page is visible, for every part of it.

import { events, Refused } from "./server.js";

const AGAIN_MS = 1000;
const MOST_AGAIN_MS = 8000;
const listeners = new Set();
let latest = null;

/** Calls `listener({status, before, isConnected, error})` with each snapshot, and when the connection is lost or made. */
export function onStatus(listener) {
  listeners.add(listener);
  if (latest) listener(latest);
}

function tell(news) {
  latest = news;
  for (const listener of listeners) listener(news);
}

function hiddenOrShown() {
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** Listens for ever, except in a hidden tab, for which the head need not measure itself. */
export async function watch() {
  let wait = AGAIN_MS;
  for (;;) {
    if (document.hidden) {
      await hiddenOrShown();
      continue;
    }
    let error = "the head does not respond";
    let asksForKey = false;
    const seen = new AbortController();
    hiddenOrShown().then(() => seen.abort());
    try {
      for await (const { event, data } of events("/ui/events", undefined, seen.signal)) {
        if (event !== "status") continue;
        wait = AGAIN_MS;
        const before = latest?.isConnected ? latest.status : null;
        tell({ status: { ...JSON.parse(data), at_ms: performance.now() }, before, isConnected: true, error: "" });
      }
    } catch (failure) {
      if (failure instanceof Refused) [error, asksForKey] = [failure.message, failure.status === 401];
    }
    if (seen.signal.aborted) {
      if (latest) latest = { ...latest, isConnected: false }; // a rate across the gap would not be current
      continue;
    }
    tell({ status: latest?.status ?? null, before: null, isConnected: false, error });
    await new Promise((resolve) => {
      if (!asksForKey) setTimeout(resolve, wait); // so that the key dialog does not reopen repeatedly
      addEventListener("primad-key", resolve, { once: true });
    });
    wait = Math.min(2 * wait, MOST_AGAIN_MS);
  }
}

/** The growth per second of a counter; null if unknown. */
export function rate(news, read) {
  const { status, before } = news;
  if (!status || !before || status.at_ms === before.at_ms) return null; // two snapshots of the same moment
  const [now, then] = [read(status), read(before)];
  if (now === null || now === undefined || then === null || then === undefined || now < then) return null;
  return ((now - then) * 1000) / (status.at_ms - before.at_ms);
}
