// The list of conversations.

import { byId, h } from "./dom.js";

/** Draws the list. `onOpen` and `onRemove` get a conversation. */
export function showHistory(chats, current, { onOpen, onRemove }) {
  byId("conversations").replaceChildren(...chats.map((chat) => h(
    "li", {},
    h("button", {
      className: "open", type: "button", onclick: () => onOpen(chat),
      "aria-current": chat.id === current.id ? "true" : null,
    }, chat.title),
    h("button", {
      className: "remove", type: "button", "aria-label": `Delete: ${chat.title}`, title: "Delete",
      onclick: () => onRemove(chat),
    }, "×"),
  )));
}

/** On narrow screens the list lies over the page, and is opened and closed. */
export function toggleHistory(isOpen) {
  document.body.classList.toggle("history-open", isOpen);
  byId("history-toggle").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new-chat").focus();
}
