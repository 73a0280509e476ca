// How the server is: asked until it is ready, and now and then afterwards.

import { apiKey, modelId, readiness } from "./api.js";
import { byId } from "./dom.js";

const SOON_MS = 1500;
const LATER_MS = 15000;

export class Status {
  constructor() {
    this.model = null;
    this.timer = 0;
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey.set(byId("key").value.trim());
      byId("key").value = "";
      this.look();
    });
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
    this.look();
  }

  /** Asks at once; and again, sooner where something is wrong. */
  async look() {
    clearTimeout(this.timer);
    const isWell = await this.ask();
    clearTimeout(this.timer); // another one may have been asked meanwhile
    this.timer = setTimeout(() => document.hidden || this.look(), isWell ? LATER_MS : SOON_MS);
  }

  async ask() {
    try {
      const { ready, detail, speculation } = await readiness();
      if (!ready) return this.show("wait", detail);
      if (!(await this.find())) return this.show("wait", "an API key is needed");
      return this.show("ready", `ready, drafts: ${speculation}`);
    } catch (error) {
      this.model = null; // another one may be served afterwards
      return this.show("gone", `${error.message.replace(/\.$/, "")}; trying again`);
    }
  }

  /** The model's name; false where a key is needed first. */
  async find() {
    try {
      this.model ??= await modelId();
    } catch (error) {
      if (error.status !== 401) throw error;
      this.askForKey(error.message);
      return false;
    }
    byId("model").textContent = this.model;
    byId("key-form").hidden = true;
    return true;
  }

  askForKey(reason) {
    if (apiKey.get()) byId("key-hint").textContent = reason;
    byId("key-form").hidden = false;
  }

  show(state, text) {
    const status = byId("status");
    status.dataset.state = state;
    if (status.textContent !== text) status.textContent = text;
    return state === "ready";
  }
}
