// Markdown to DOM nodes: what models write, not all of CommonMark. It makes elements by name and puts
// text in as text, so nothing that a model writes can be markup.

import { h } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 8; // quotes in lists in quotes: beyond, markers stay text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The nodes of a text. An unfinished text is fine: an open fence is a code block. */
export function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [node, next] = block(lines, at, depth);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

/** The block that begins at a line, and the line behind it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  // The page has headings of its own above these.
  if (heading) return [h(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fence(lines, at) {
  const [, marks, language] = FENCE.exec(lines[at]);
  const isEnd = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= marks.length && trimmed === marks[0].repeat(trimmed.length);
  };
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = h("code", {}, lines.slice(at + 1, end).join("\n"));
  // Long lines scroll, with the keyboard too.
  const pre = h("pre", { tabIndex: 0, role: "region", "aria-label": `Code ${language}`.trim() }, code);
  return [pre, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [h("blockquote", {}, ...blocks(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const node = h(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(marker, 10) !== 1) node.start = parseInt(marker, 10);
  const goesOn = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length <= indent.length + 1 && /\d/.test(item[2]) === isOrdered;
  };
  while (at < lines.length && goesOn(lines[at])) {
    const first = ITEM.exec(lines[at])[3];
    const width = lines[at].length - first.length; // what stands below the item's text is inside
    const inner = [first];
    for (at += 1; at < lines.length; at += 1) {
      const isInside = /^\s{2,}\S/.test(lines[at]) && !goesOn(lines[at]);
      const isGap = !lines[at].trim() && at + 1 < lines.length
        && (/^\s{2,}\S/.test(lines[at + 1]) || goesOn(lines[at + 1]));
      if (!isInside && !isGap) break;
      inner.push(lines[at].slice(Math.min(width, lines[at].search(/\S|$/))));
    }
    node.append(item(inner, depth));
  }
  return [node, at];
}

function item(lines, depth) {
  const nodes = blocks(lines, depth + 1);
  // A short item needs no paragraph around it.
  if (nodes[0]?.tagName === "P") return h("li", {}, ...nodes[0].childNodes, ...nodes.slice(1));
  return h("li", {}, ...nodes);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-")
    && DIVIDER.test(lines[at + 1]) && cells(lines[at + 1]).length === cells(lines[at]).length;
}

function table(lines, at) {
  const row = (line, name) => h("tr", {}, ...cells(line).map((c) => h(name, {}, ...inline(c))));
  const head = h("thead", {}, row(lines[at], "th"));
  const body = h("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row(lines[at], "td"));
  const frame = { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" };
  return [h("div", frame, h("table", {}, head, body)), at];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line)
    || (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line)));
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return [h("p", {}, ...inline(lines.slice(at, end).map((l) => l.trimStart()).join("\n"))), end];
}
