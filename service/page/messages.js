// The conversation on the page.

import { byId, h } from "./dom.js";
import { markdown } from "./markdown.js";

const list = () => byId("messages");

/** Shows a whole conversation. */
export function showMessages(messages) {
  list().replaceChildren(...messages.map(messageNode));
  byId("welcome").hidden = messages.length > 0;
  toEnd();
}

export function addMessage(message) {
  byId("welcome").hidden = true;
  const node = messageNode(message);
  list().append(node);
  toEnd();
  return node;
}

/** An answer that comes in. It is drawn at most once a frame. */
export class Incoming {
  constructor() {
    this.text = "";
    this.frame = 0;
    this.node = addMessage({ role: "assistant", content: "" });
    this.node.setAttribute("aria-busy", "true");
    this.node.classList.add("streaming");
  }

  add(text) {
    if (!text) return;
    this.text += text;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const follows = isAtEnd();
    this.node.querySelector(".body").replaceChildren(...markdown(this.text));
    if (follows) toEnd();
  }

  /** `note`: what is said below it, such as that it was stopped. */
  finish(note) {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.node.removeAttribute("aria-busy");
    this.node.classList.remove("streaming");
    if (note) this.node.append(h("p", { className: "dim small" }, note));
  }

  remove() {
    cancelAnimationFrame(this.frame);
    this.node.remove();
  }
}

/** Says what went wrong, below the conversation, with a button to try again. */
export function showError(message, retry) {
  clearError();
  list().after(h(
    "div", { id: "error", className: "error", role: "alert" },
    h("p", {}, message),
    h("button", { className: "outline", type: "button", onclick: retry }, "Try again"),
  ));
  toEnd();
}

export function clearError() {
  byId("error")?.remove();
}

function messageNode({ role, content }) {
  const isUser = role === "user";
  const body = isUser
    ? h("div", { className: "body plain" }, content)
    : h("div", { className: "body" }, ...markdown(content));
  return h(
    "li", { className: `message ${isUser ? "user" : "assistant"}` },
    h("p", { className: "who" }, isUser ? "You" : "Model"),
    body,
  );
}

function isAtEnd() {
  const scroll = byId("scroll");
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
}

function toEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}
