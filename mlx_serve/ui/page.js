// The page: puts its parts together. A chat on POST /v1/chat/completions, and figures fed by GET /stats.
//
// What comes from the server, a model's answer above all, is only ever set as text: nothing here takes markup, and the
// page's policy would not let any through.
import { call } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { newConversation } from "./conversations.js";
import { ConversationList } from "./conversation_list.js";
import { $, element } from "./dom.js";
import { Locked } from "./failures.js";
import { Figures } from "./figures.js";
import { Kept } from "./kept.js";
import { key, setUpKey } from "./key.js";
import { duration } from "./numbers.js";
import { setUpPanel } from "./panels.js";
import { Poll } from "./poll.js";
import { asCurl, requestBody } from "./request.js";
import { Settings } from "./settings.js";
import { Storage } from "./storage.js";

async function openStorage() {
  try {
    return await Storage.open();
  } catch (error) {
    // A browser may forbid it, for instance in a private window.
    console.info("nothing is kept:", error.message);
    return null;
  }
}

const kept = new Kept(await openStorage(), (error) => list.tell(`The browser could not keep it: ${error.message}`));
await kept.load();
const settings = new Settings(kept);

function makeBody(turns) {
  if (!settings.isRight()) return null;
  const body = requestBody(settings.values, $("model").value, turns);
  settings.showRequest(asCurl(body, new URL("v1/chat/completions", document.baseURI).href, key() !== ""));
  return body;
}

const composer = new Composer({ onSend: (text) => chat.send(text), onStop: () => chat.stop() });
const chat = new Chat({
  composer,
  makeBody,
  onChange: (conversation) => {
    conversation.changedAt = Date.now();
    kept.save(conversation);
    list.show(chat.conversation.id);
  },
});
const list = new ConversationList(kept, { onOpen: open, onNew: () => open(newConversation()) });

const chats = setUpPanel("chats", kept.choices.get("chats"), (isOpen) => kept.choose("chats", isOpen));
setUpPanel("figures", kept.choices.get("figures"), (isOpen) => kept.choose("figures", isOpen));

function open(conversation) {
  chat.open(conversation);
  composer.clear();
  list.show(conversation.id);
  chats.close();
  composer.focus();
}

// What was written while the page was not ready stays.
chat.open(newConversation());
list.show(chat.conversation.id);

// ---- How the server is.

const figures = new Figures();
let modelsAreKnown = false;

function setStatus(text, state) {
  // Written only when it changes: a screen reader says it each time.
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.state = state;
}

async function loadModels() {
  const response = await call("v1/models");
  if (!response.ok) throw new Error(`status ${response.status}`);
  modelsAreKnown = true;
  const { data } = await response.json();
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id }) => {
    const option = element("option", "", id);
    option.value = id;
    return option;
  }));
  if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
}

const poll = new Poll({
  onStats: async (stats) => {
    setStatus(stats.status, stats.status === "ok" ? "ok" : "bad");
    const models = stats.models.map((model) => model.name).join(", ") || "no model loaded";
    $("facts").textContent = `${models} · version ${stats.version} · up ${duration(stats.uptime_s)}`;
    figures.show(stats);
    chat.heard(stats);
    if (!modelsAreKnown) await loadModels();
  },
  onFailure: (error) => {
    setStatus(error instanceof Locked ? "needs an API key" : "not reachable", "bad");
    figures.grey();
    // What comes back may have been started with others.
    modelsAreKnown = false;
  },
  onShown: () => figures.pause(),
});
setUpKey(() => poll.start());
poll.start();
