// Conversations and settings, in this browser's storage.

const CHATS = "spd.chats";
const SETTINGS = "spd.settings";
const MOST_CHATS = 100;

export const DEFAULTS = Object.freeze({
  system: "", temperature: "0.6", top_p: "", max_tokens: "", seed: "", speculation: true,
});

/** The conversations, the latest first: `{id, title, messages: [{role, content}]}`. */
export class Store {
  constructor(storage = safeStorage()) {
    this.storage = storage;
    const chats = this.read(CHATS, []);
    this.chats = Array.isArray(chats) ? chats.filter(isChat) : [];
    this.settings = { ...DEFAULTS };
    const saved = this.read(SETTINGS, {});
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (typeof saved?.[name] === typeof value) this.settings[name] = saved[name];
    }
  }

  create() {
    return { id: crypto.randomUUID?.() ?? String(Date.now()), title: "", messages: [] };
  }

  /** Puts a conversation in front, and keeps it. */
  save(chat) {
    chat.title = titleOf(chat);
    this.chats = [chat, ...this.chats.filter((other) => other.id !== chat.id)].slice(0, MOST_CHATS);
    // Where there is no more room the oldest go.
    while (!this.write(CHATS, this.chats) && this.chats.length > 1) this.chats.pop();
  }

  remove(id) {
    this.chats = this.chats.filter((chat) => chat.id !== id);
    this.write(CHATS, this.chats);
  }

  set(changes) {
    Object.assign(this.settings, changes);
    this.write(SETTINGS, this.settings);
  }

  read(key, otherwise) {
    try {
      return JSON.parse(this.storage.getItem(key)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  write(key, value) {
    try {
      this.storage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

function safeStorage() {
  try {
    return localStorage;
  } catch {
    return new Map(); // has neither getItem nor setItem: nothing is kept
  }
}

function isChat(chat) {
  return typeof chat?.id === "string" && Array.isArray(chat.messages)
    && chat.messages.every((m) => typeof m?.role === "string" && typeof m.content === "string");
}

function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}
