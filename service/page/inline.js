// The inside of a paragraph: code, strong, emphasised and struck text, links, ends of lines.

import { h } from "./dom.js";

const DEEPEST = 6;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[\n]/;

/** The nodes of a text. What is not closed stays as it is written. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length;) {
    const found = SPECIAL.test(text[at]) ? special(text, at, depth) : null;
    if (found === null) {
      plain += text[at];
      at += 1;
    } else if (typeof found.node === "string") {
      plain += found.node;
      at = found.end;
    } else {
      add(found.node);
      at = found.end;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** What begins at a place, and where it ends; null for nothing. */
function special(text, at, depth) {
  const char = text[at];
  if (char === "\\") return escaped(text, at);
  if (char === "\n") return { node: h("br"), end: at + 1 };
  if (char === "`") return code(text, at);
  if (depth >= DEEPEST) return null;
  if (char === "[") return link(text, at, depth);
  return marked(text, at, depth);
}

function escaped(text, at) {
  return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
}

function code(text, at) {
  const marks = /^`+/.exec(text.slice(at))[0];
  let end = text.indexOf(marks, at + marks.length);
  // A longer run of marks is not the end.
  while (end >= 0 && (text[end - 1] === "`" || text[end + marks.length] === "`")) {
    end = text.indexOf(marks, end + 1);
  }
  if (end < 0) return { node: marks, end: at + marks.length };
  const inner = text.slice(at + marks.length, end).replace(/\n/g, " ");
  return { node: h("code", {}, inner.replace(/^ (.*\S.*) $/, "$1")), end: end + marks.length };
}

function marked(text, at, depth) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (/\s|^$/.test(text[from] ?? "")) return null; // "2 * 3"
    if (mark[0] === "_" && isWord(text[at - 1])) return null; // snake_case
    const end = closing(text, from, mark);
    if (end < 0) return { node: mark, end: from };
    return { node: h(name, {}, ...inline(text.slice(from, end), depth + 1)), end: end + mark.length };
  }
  return null;
}

function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    if (/\s/.test(text[at - 1]) || text[at - 1] === "\\") continue;
    if (mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark)) continue;
    if (mark[0] === "_" && isWord(text[at + mark.length])) continue;
    return at;
  }
  return -1;
}

const isWord = (char) => char !== undefined && /[\p{L}\p{N}]/u.test(char);

function link(text, at, depth) {
  const middle = text.indexOf("](", at);
  if (middle < 0) return null;
  const end = text.indexOf(")", middle);
  const label = text.slice(at + 1, middle);
  if (end < 0 || label.includes("[") || label.includes("\n\n")) return null;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (!SAFE_LINK.test(target)) return null; // javascript: and the like stay text
  const properties = { href: target, target: "_blank", rel: "noopener noreferrer" };
  return { node: h("a", properties, ...inline(label, depth + 1)), end: end + 1 };
}
