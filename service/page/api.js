// The server's API, as far as the page needs it.

import { eventData } from "./sse.js";

const BASE = new URL("../", import.meta.url); // wherever the deployment's routes begin
const KEY = "spd.key";

/** What went wrong, in words for the user. `status` is 0 where no server answered. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The key of this tab; where storage is switched off, of this page. */
export const apiKey = {
  value: null,
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? this.value;
    } catch {
      return this.value;
    }
  },
  set(key) {
    this.value = key;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // then it is kept until the page is loaded again
    }
  },
};

/** Whether requests are taken, and what drafts: `{ready, detail, speculation}`. */
export async function readiness() {
  const response = await ask("ready", { signal: AbortSignal.timeout(5000) });
  const body = await response.json().catch(() => null);
  if (typeof body?.ready !== "boolean") throw new ApiError("The server does not say how it is.");
  return body;
}

/** The id of the served model. */
export async function modelId() {
  const response = await ask("v1/models", { signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data[0].id;
}

/** The chunks of an answer. Closing it, or `signal`, ends the request. */
export async function* chat(request, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) throw await failure(response);
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.code);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke off.");
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function ask(path, options) {
  const headers = new Headers(options.headers);
  if (apiKey.get()) headers.set("Authorization", `Bearer ${apiKey.get()}`);
  try {
    return await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached.");
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error ?? {};
  return new ApiError(
    error.message ?? `The server answered ${response.status}.`, response.status, error.code,
  );
}
