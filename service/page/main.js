// Puts the page together: who is asked for what, and what is running.

import { byId, h } from "./dom.js";
import { showHistory, toggleHistory } from "./history.js";
import { Lanes } from "./lanes.js";
import { Incoming, addMessage, clearError, showError, showMessages } from "./messages.js";
import { comparisonText, showFigures } from "./panel.js";
import { chatRequest, counterpart } from "./request.js";
import { run } from "./run.js";
import { installSettings } from "./settings.js";
import { Status } from "./status.js";
import { Store } from "./store.js";

const EXAMPLES = [
  "What is the capital of France, and what is it known for?",
  "Write a Python function that adds two numbers, and explain it.",
  "List the planets of the solar system, one a line.",
];
const ENOUGH_TOKENS = 8; // for a rate that says something

const HOW_TO_COMPARE = byId("comparison").textContent;

const store = new Store();
const lanes = new Lanes();
const status = new Status();
let current = store.create();
const removed = new WeakSet();
let running = null; // the AbortController of what runs
let measured = null; // the last answer: {request, figures}

// --- one answer -------------------------------------------------------------------------------

async function send(text) {
  current.messages.push({ role: "user", content: text });
  addMessage(current.messages.at(-1));
  keep();
  await answer();
}

/** Asks for the answer to what the conversation ends with. */
async function answer() {
  const conversation = current;
  const incoming = new Incoming();
  clearError();
  forget();
  await busy(async (signal) => {
    if (!status.model) await status.look();
    const request = chatRequest(status.model ?? "", conversation.messages, store.settings);
    watch(null);
    const figures = await run(request, signal, (chunk, soFar) => {
      incoming.add(chunk.choices[0]?.delta?.content);
      watch(soFar, chunk.pipeline);
    });
    measured = { request, figures };
    incoming.finish(incoming.text ? "" : "An empty answer.");
    byId("announcer").textContent = `Answer: ${incoming.text}`;
  }, (error) => failed(error, incoming, conversation));
  if (incoming.text) {
    conversation.messages.push({ role: "assistant", content: incoming.text });
    keep(conversation);
  }
}

function failed(error, incoming, conversation) {
  if (error.name === "AbortError") {
    incoming.finish("Stopped.");
    byId("announcer").textContent = "Stopped.";
    return;
  }
  incoming.finish("Broken off.");
  if (!incoming.text) incoming.remove();
  if (error.status === 401) status.askForKey(error.message);
  showError(error.message, () => retry(incoming, conversation));
  status.look();
}

/** Forgets what has come of an answer, and asks again. */
function retry(incoming, conversation) {
  if (running || conversation !== current) return;
  if (incoming.text) {
    conversation.messages.pop();
    incoming.remove();
  }
  answer();
}

/** Runs `work` with a signal that the stop button gives; one at a time. */
async function busy(work, onError) {
  running = new AbortController();
  show();
  try {
    await work(running.signal);
  } catch (error) {
    onError(error);
  } finally {
    running = null;
    show();
  }
}

/** What was measured of the answer before says nothing of the next one. */
function forget() {
  measured = null;
  byId("comparison").textContent = HOW_TO_COMPARE;
}

function watch(figures, pipeline) {
  if (figures === null) lanes.clear();
  if (pipeline) lanes.take(pipeline);
  showFigures(figures);
}

// --- the comparison ---------------------------------------------------------------------------

async function compare() {
  const { request, figures } = measured;
  const isPlain = request.speculation === false;
  const say = (...content) => byId("comparison").replaceChildren(...content);
  say(`The same request runs ${isPlain ? "with" : "without"} speculation …`);
  await busy(async (signal) => {
    watch(null);
    const other = await run(counterpart(request, figures.tokens), signal, (chunk, soFar) => {
      watch(soFar, chunk.pipeline);
    });
    const [drafted, plain] = isPlain ? [other, figures] : [figures, other];
    if (drafted.drafter === "off") say("Nothing is drafted on this server: there is nothing to compare.");
    else if (!drafted.rate || !plain.rate) say("The answers are too short to compare.");
    else say(...comparisonText(drafted, plain));
    lanes.toEnd(); // the text above has taken some of their room
  }, (error) => say(error.name === "AbortError" ? "Stopped." : error.message));
}

// --- conversations ----------------------------------------------------------------------------

function keep(conversation = current) {
  if (!removed.has(conversation)) store.save(conversation);
  show();
}

function open(conversation) {
  running?.abort();
  current = conversation;
  forget();
  clearError();
  showMessages(current.messages);
  watch(null);
  toggleHistory(false);
  show();
  byId("input").focus();
}

function remove(conversation) {
  removed.add(conversation); // an answer to it may still come
  store.remove(conversation.id);
  if (conversation.id === current.id) open(store.create());
  show();
}

// --- what can be done now ---------------------------------------------------------------------

function show() {
  showHistory(store.chats, current, { onOpen: open, onRemove: remove });
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  const canCompare = !running && measured !== null && measured.figures.tokens >= ENOUGH_TOKENS;
  byId("compare").disabled = !canCompare;
  const isPlain = measured?.request.speculation === false;
  byId("compare").textContent = isPlain ? "Measure with it" : "Measure without it";
}

function submit() {
  const text = byId("input").value.trim();
  if (!text || running) return;
  byId("input").value = "";
  fit();
  send(text);
}

function stop() {
  running?.abort();
  byId("input").focus();
}

/** The field is as high as its text. */
function fit() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 200)}px`;
}

function view(name) {
  document.body.dataset.view = name;
  byId("view-chat").setAttribute("aria-pressed", String(name === "chat"));
  byId("view-pipeline").setAttribute("aria-pressed", String(name === "pipeline"));
  if (name === "pipeline") lanes.toEnd();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("input").addEventListener("input", fit);
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (document.body.classList.contains("history-open")) {
    toggleHistory(false);
    byId("history-toggle").focus();
  } else if (running) stop();
});
byId("stop").addEventListener("click", stop);
byId("compare").addEventListener("click", compare);
byId("new-chat").addEventListener("click", () => open(store.create()));
byId("history-toggle").addEventListener("click", () => {
  toggleHistory(!document.body.classList.contains("history-open"));
});
byId("view-chat").addEventListener("click", () => view("chat"));
byId("view-pipeline").addEventListener("click", () => view("pipeline"));
byId("examples").append(...EXAMPLES.map((example) => h(
  "li", {}, h("button", { className: "outline", type: "button", onclick: () => running || send(example) }, example),
)));
installSettings(store);
showFigures(null);
show();
byId("input").focus();
