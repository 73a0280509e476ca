// What a run was worth, counted from its chunks. No DOM here.

/** The counts of one answer. Times are in milliseconds of `performance.now()`. */
export class Figures {
  constructor(sent) {
    this.sent = sent;
    this.first = null; // when the first chunk came
    this.last = null; // when the last token came
    this.stages = null;
    this.drafter = null;
    this.tokens = 0;
    this.accepted = 0;
    this.rejected = 0;
    this.cycles = 0; // from the first generated token's entry, as the server counts
    this.cycleTimes = [];
    this.text = "";
  }

  take(chunk, now) {
    this.first ??= now;
    this.text += chunk.choices[0]?.delta?.content ?? "";
    if (!chunk.pipeline) return;
    this.stages = chunk.pipeline.stages;
    this.drafter = chunk.pipeline.drafter;
    for (const cycle of chunk.pipeline.cycles) this.cycle(cycle, now);
  }

  cycle({ rows, verdict, milliseconds }, now) {
    if (this.cycles || rows.some((row) => row && row.source !== "prompt")) {
      this.cycles += 1;
      this.cycleTimes.push(milliseconds);
    }
    if (!verdict) return;
    this.tokens += 1;
    this.last = now;
    if (verdict.outcome === "accepted") this.accepted += 1;
    if (verdict.outcome === "rejected") this.rejected += 1;
  }

  /** Milliseconds from the request to the first chunk, or null. */
  get firstToken() {
    return this.first === null ? null : this.first - this.sent;
  }

  /** Tokens per second after the first one, or null. */
  get rate() {
    const span = this.last - this.first;
    return this.tokens > 1 && span > 0 ? (1000 * (this.tokens - 1)) / span : null;
  }

  /** The share of verified proposals that were right, or null. */
  get acceptance() {
    const drafted = this.accepted + this.rejected;
    return drafted ? this.accepted / drafted : null;
  }

  /** Tokens after the first one for each cycle, or null. */
  get perCycle() {
    return this.cycles && this.tokens > 1 ? (this.tokens - 1) / this.cycles : null;
  }

  /** The median of the cycles' milliseconds, or null. */
  get cycleTime() {
    const times = this.cycleTimes.toSorted((a, b) => a - b);
    return times.length ? times[times.length >> 1] : null;
  }
}

/** A number with so many digits behind the point, or a dash for null. */
export function shown(value, digits = 0) {
  return value === null ? "–" : value.toFixed(digits);
}
