// Requests of the page to the head. A key is sent in a header, never in a cookie.

const API_KEY = "primad.key";
const OWNER_KEY = "primad.owner";

/** The head refused a request. */
export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const keys = {
  get api() {
    return localStorage.getItem(API_KEY) ?? "";
  },
  set api(key) {
    if (key) localStorage.setItem(API_KEY, key);
    else localStorage.removeItem(API_KEY);
  },
  get owner() {
    return sessionStorage.getItem(OWNER_KEY) ?? "";
  },
  set owner(key) {
    if (key) sessionStorage.setItem(OWNER_KEY, key);
    else sessionStorage.removeItem(OWNER_KEY);
  },
};

let askForKey = () => {};

/** Calls `handler(isWrong)` when the head requires a key: the page has none, or `isWrong`: the head rejected it. */
export function onKeyWanted(handler) {
  askForKey = handler;
}

async function request(path, { body, signal, ...options } = {}) {
  const headers = {};
  const key = keys.owner || keys.api;
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(new URL(`.${path}`, document.baseURI), {
    // relative to the page, as a proxy may serve it under a prefix
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    ...options,
  });
  if (response.status === 401 && keys.owner) {
    keys.owner = ""; // it was the key of an earlier head
    return request(path, { body, signal, ...options });
  }
  if (!response.ok) {
    const given = (await response.json().catch(() => null))?.error;
    const error = typeof given === "string" ? { message: given } : given; // the form of Ollama's paths
    if (response.status === 401) askForKey(Boolean(key));
    throw new Refused(error?.message ?? `the head returned ${response.status}`, response.status, error?.code);
  }
  return response;
}

/** Returns the response as JSON, null if it is empty. Throws `Refused`, or `TypeError` if there is no response. */
export async function ask(path, body, signal, options = {}) {
  const text = await (await request(path, { body, signal, ...options })).text();
  return text ? JSON.parse(text) : null;
}

/** Yields lines of JSON until the stream ends. Also throws `Refused` for a line with an error. */
export async function* lines(path, body, signal) {
  for await (const line of pieces(await request(path, { body, signal }), "\n")) {
    if (!line) continue;
    const found = JSON.parse(line);
    if (found.error) throw new Refused(found.error, 200);
    yield found;
  }
}

/** Yields the text of `response`, cut at each `mark`. */
async function* pieces(response, mark) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (rest + value).split(mark);
      rest = whole.pop();
      yield* whole;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Yields server-sent events, each with its `event` and `data`, until the stream ends. */
export async function* events(path, body, signal) {
  for await (const block of pieces(await request(path, { body, signal }), "\n\n")) {
    const found = { event: "message", data: "" };
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) found.event = line.slice(7);
      if (line.startsWith("data: ")) found.data += line.slice(6);
    }
    if (found.data) yield found;
  }
}

/** Whether the viewer may change things; a ticket in the address (of `primad page`) gives that right. */
export async function becomeOwner() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  if (ticket) {
    history.replaceState(null, "", location.pathname);
    keys.owner = (await ask("/ui/owner", { ticket })).key;
  }
  if (!keys.owner) return false;
  const { is_owner: isOwner } = await ask("/ui/who");
  if (!isOwner) keys.owner = "";
  return isOwner;
}
