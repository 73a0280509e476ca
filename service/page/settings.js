// The dialog of settings.

import { byId } from "./dom.js";
import { DEFAULTS } from "./store.js";

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];

export function installSettings(store) {
  const dialog = byId("settings");
  const fill = (settings) => FIELDS.forEach((name) => { byId(name).value = settings[name]; });
  byId("settings-open").addEventListener("click", () => {
    fill(store.settings);
    dialog.showModal();
  });
  byId("settings-reset").addEventListener("click", () => fill(DEFAULTS));
  // Done saves; Esc leaves all as it was.
  byId("settings-form").addEventListener("submit", () => {
    store.set(Object.fromEntries(FIELDS.map((name) => [name, byId(name).value])));
  });
  byId("speculation").checked = store.settings.speculation;
  byId("speculation").addEventListener("change", (event) => {
    store.set({ speculation: event.target.checked });
  });
}
