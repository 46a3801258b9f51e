// Conversations and settings, stored only in this browser.

const CHATS = "primad.chats";
const SETTINGS = "primad.settings";
const MOST_CHATS = 100;

export const DEFAULTS = {
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
};

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function settings() {
  return { ...DEFAULTS, ...read(SETTINGS, {}) };
}

export function keepSettings(values) {
  localStorage.setItem(SETTINGS, JSON.stringify(values));
}

/** A new conversation, stored once it has a message. */
export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
}

/** All conversations, the latest first. */
export function chats() {
  const kept = read(CHATS, []);
  return Array.isArray(kept) ? kept : [];
}

/** `chat` with only the names of its pictures: there is room for the pictures of one conversation. */
function withoutPictures(chat) {
  const bare = (message) => (message.pictures ? { ...message, pictures: message.pictures.map(({ name }) => ({ name, url: "" })) } : message);
  return { ...chat, messages: chat.messages.map(bare) };
}

/** Stores `chat` as the latest; pictures of other conversations are dropped, and the oldest ones if there is no room. */
export function keep(chat) {
  const others = chats().filter((each) => each.id !== chat.id).map(withoutPictures);
  if (kept([chat, ...others].slice(0, MOST_CHATS), others.length + 1)) return;
  kept([withoutPictures(chat), ...others].slice(0, MOST_CHATS), 1);
}

/** Stores as many of `all`, the latest first, as there is room for, but at least `least`; returns whether they fit. */
function kept(all, least) {
  for (; all.length >= Math.min(least, MOST_CHATS) && all.length; all = all.slice(0, -1)) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(all));
      return true;
    } catch {
      // storage is full: there may be room without the oldest
    }
  }
  return false;
}

/** Puts `chat` back in its place. */
export function restore(chat, place) {
  const all = chats();
  all.splice(place, 0, chat);
  localStorage.setItem(CHATS, JSON.stringify(all));
}

export function forget(id) {
  localStorage.setItem(CHATS, JSON.stringify(chats().filter((each) => each.id !== id)));
}
