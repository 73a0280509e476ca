// The panel beside the chat: figures of the running answer, and the comparison.

import { byId, h } from "./dom.js";
import { shown } from "./figures.js";

/** The figures of an answer, as it runs; `null` clears them. */
export function showFigures(figures) {
  const n = figures?.stages;
  const entries = [
    ["Acceptance", percent(figures?.acceptance ?? null), "of the verified drafts"],
    ["Tokens per cycle", shown(figures?.perCycle ?? null, 2), n ? `1 at best, 1/${n} without drafts` : "1 at best"],
    ["Tokens per second", shown(figures?.rate ?? null, 1), "after the first, as seen here"],
    ["First token", unit(shown(figures?.firstToken ?? null), "ms"), "from sending, as seen here"],
  ];
  byId("figures").replaceChildren(
    ...entries.map(([name, value, note]) => h(
      "div", {}, h("dt", {}, name), h("dd", {}, value, h("span", { className: "note" }, note)),
    )),
  );
  byId("drafter").textContent = figures?.drafter
    ? `${n === 1 ? "1 stage" : `${n} stages`}, drafts: ${figures.drafter}, ${shown(figures.cycleTime, 1)} ms a cycle`
    : "";
}

/** What the two runs of one request say: `drafted` and `plain` are Figures. */
export function comparisonText(drafted, plain) {
  const ratio = drafted.rate / plain.rate;
  const texts = drafted.text === plain.text
    ? "The texts are the same."
    : "The texts differ, which only scores that are equal but for rounding can explain.";
  return [
    h("strong", { className: "ratio" }, `${ratio.toFixed(2)}×`),
    ` ${shown(drafted.rate, 1)} tokens/s with ${drafted.drafter}, ${shown(plain.rate, 1)} without, each `
    + `after its first token: the same request to the same ${drafted.stages} stages, one run each, `
    + `${drafted.tokens} and ${plain.tokens} tokens. ${texts}`,
  ];
}

function percent(share) {
  return share === null ? "–" : unit((100 * share).toFixed(0), "%");
}

function unit(value, name) {
  return value === "–" ? value : `${value}\u202f${name}`;
}
