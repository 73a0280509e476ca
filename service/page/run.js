// One request, from sending to its end.

import { chat } from "./api.js";
import { Figures } from "./figures.js";

/** Runs a request and calls `onChunk(chunk, figures)`. Raises ApiError, and AbortError if stopped. */
export async function run(request, signal, onChunk) {
  const figures = new Figures(performance.now());
  for await (const chunk of chat(request, signal)) {
    figures.take(chunk, performance.now());
    onChunk(chunk, figures);
  }
  return figures;
}
