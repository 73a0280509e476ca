// The pipeline as a table: a column for each stage, a line for each cycle.

import { byId, h, unseen } from "./dom.js";

const MOST_CYCLES = 400; // that stay in the table
const MOST_WIDE = 3; // stages whose cells have room for a proposal's source
const STATES = {
  prompt: ["▤", "prompt", "known tokens that are read"],
  certain: ["■", "certain", "the target's own token"],
  proposed: ["?", "proposed", "a draft in flight"],
  accepted: ["✓", "accepted", "the target says the same"],
  rejected: ["✕", "rejected", "the target says another"],
  void: ["∅", "void", "behind a rejection, or the end"],
  bubble: ["·", "bubble", "a stage without work"],
};

export class Lanes {
  constructor() {
    this.body = byId("lanes-body");
    this.scroll = byId("lanes-scroll");
    this.cells = new Map(); // those of each position in flight: {state, cells}
    byId("legend").append(
      ...Object.entries(STATES).map(([state, [, name, meaning]]) => h(
        "li", { title: meaning }, cell("span", state, name),
      )),
    );
  }

  clear() {
    this.body.replaceChildren();
    this.cells.clear();
    byId("lanes").hidden = true;
    byId("lanes-empty").hidden = false;
  }

  /** The cycles of one chunk. */
  take({ stages, cycles }) {
    if (byId("lanes").hidden) this.open(stages);
    const follows = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < 40;
    for (const cycle of cycles) this.cycle(cycle);
    while (this.body.rows.length > MOST_CYCLES) this.body.rows[0].remove();
    if (follows) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  open(stages) {
    const names = Array.from({ length: stages }, (_, stage) => `Stage ${stage}`);
    byId("lanes-head").replaceChildren(
      ...["Cycle", ...names, "Verdict"].map((name) => h("th", { scope: "col" }, name)),
    );
    byId("lanes").hidden = false;
    byId("lanes").classList.toggle("many", stages > MOST_WIDE);
    byId("lanes-empty").hidden = true;
  }

  cycle({ cycle, milliseconds, rows, verdict, void: dropped }) {
    const line = h(
      "tr", {},
      h("th", { scope: "row", title: `cycle ${cycle}` }, `${milliseconds.toFixed(0)} ms`),
      ...rows.map((row) => this.row(row)),
      h("td", { className: "verdict" }, ...(verdict ? [said(verdict)] : [])),
    );
    this.body.append(line);
    if (verdict?.outcome === "accepted") this.settle(verdict.position, "accepted");
    for (const position of dropped) {
      const isWrong = verdict?.outcome === "rejected" && position === verdict.position;
      this.settle(position, isWrong ? "rejected" : "void");
      this.cells.delete(position);
    }
  }

  row(row) {
    if (!row) return h("td", {}, cell("div", "bubble", ""));
    if (row.source === "prompt") {
      return h("td", {}, cell("div", "prompt", row.count === 1 ? "1 token" : `${row.count} tokens`));
    }
    const isProposal = row.source !== "target";
    const known = this.cells.get(row.position) ?? { state: isProposal ? "proposed" : "certain", cells: [] };
    const made = cell("div", known.state, visible(row.text), isProposal ? row.source : null);
    known.cells.push(made);
    this.cells.set(row.position, known);
    return h("td", {}, made);
  }

  /** What has become of a position: all cells of it are shown so, and those to come. */
  settle(position, state) {
    const known = this.cells.get(position);
    if (!known) return;
    known.state = state;
    for (const made of known.cells) paint(made, state);
  }
}

function cell(name, state, text, source = null) {
  const element = h(
    name, {},
    h("span", { className: "glyph", "aria-hidden": "true" }),
    h("span", { className: "token" }, text),
    unseen(""),
    source && h("span", { className: "source" }, source),
  );
  return paint(element, state);
}

function paint(element, state) {
  const [glyph, name] = STATES[state];
  element.className = `cell ${state}`;
  element.querySelector(".glyph").textContent = glyph;
  if (element.tagName === "DIV") element.querySelector(".hidden").textContent = ` ${name}`;
  return element;
}

function said({ text, outcome }) {
  const glyph = { accepted: "✓", rejected: "✕", undrafted: "■" }[outcome];
  return h(
    "span", { className: `said ${outcome}` },
    h("span", { className: "glyph", "aria-hidden": "true" }, glyph),
    h("span", { className: "token" }, visible(text)),
    unseen(` ${outcome}`),
  );
}

/** A token that can be seen, whatever it is. */
function visible(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ (?=\S)/, "");
  return shown.trim() === "" ? shown.replace(/ /g, "␣") || "∎" : shown;
}
