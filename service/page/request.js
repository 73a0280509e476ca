// From a conversation and settings to the body of a request.

/**
 * The body of POST v1/chat/completions. Without a seed of the user's it gets one by chance, so that
 * the same request has the same text again: with and without speculation.
 */
export function chatRequest(model, messages, settings) {
  const system = settings.system.trim();
  const request = {
    model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    stream_options: { include_usage: true, include_pipeline: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") request[name] = Number(settings[name]);
  }
  request.seed ??= Math.floor(Math.random() * 2 ** 31);
  if (!settings.speculation) request.speculation = false;
  return request;
}

/** The same with speculation the other way round, and as many tokens as there were. */
export function counterpart(request, tokens) {
  const { speculation, ...rest } = request;
  const other = { ...rest, max_tokens: tokens };
  if (speculation !== false) other.speculation = false;
  return other;
}
