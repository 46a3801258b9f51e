// Conversations and settings, kept by this browser alone.

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

/** A conversation that is kept when something is said in it. */
export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
}

/** All conversations, the latest first. */
export function chats() {
  const kept = read(CHATS, []);
  return Array.isArray(kept) ? kept : [];
}

/** `chat` with the names of its pictures alone: there is room for those of one conversation. */
function withoutPictures(chat) {
  const bare = (message) => (message.pictures ? { ...message, pictures: message.pictures.map(({ name }) => ({ name, url: "" })) } : message);
  return { ...chat, messages: chat.messages.map(bare) };
}

/** Keeps `chat` as the latest; pictures of others go, and the oldest where there is no room. */
export function keep(chat) {
  const others = chats().filter((each) => each.id !== chat.id).map(withoutPictures);
  if (kept([chat, ...others].slice(0, MOST_CHATS), others.length + 1)) return;
  kept([withoutPictures(chat), ...others].slice(0, MOST_CHATS), 1);
}

/** Keeps as many of `all`, the latest first, as there is room for, but `least`; whether there is. */
function kept(all, least) {
  for (; all.length >= Math.min(least, MOST_CHATS) && all.length; all = all.slice(0, -1)) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(all));
      return true;
    } catch {
      // full: without the oldest there may be room
    }
  }
  return false;
}

/** Puts `chat` back where it was. */
export function restore(chat, place) {
  const all = chats();
  all.splice(place, 0, chat);
  localStorage.setItem(CHATS, JSON.stringify(all));
}

export function forget(id) {
  localStorage.setItem(CHATS, JSON.stringify(chats().filter((each) => each.id !== id)));
}
