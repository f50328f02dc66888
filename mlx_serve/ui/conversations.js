// Conversations as plain values, and their file format. Knows no document and no storage.
//
// {id, title, changedAt, turns: [{role: "user", content}
//                               | {role: "assistant", content, reasoning, calls: [{name, arguments}], model, note}]}

const FORMAT = "mlx-serve conversations";
const VERSION = 1;
const MAX_TITLE = 60;

export function newConversation(now = Date.now()) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changedAt: now, turns: [] };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.turns[0]?.content.trim().replace(/\s+/g, " ") || "New conversation";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE - 1)}…` : first;
}

export function newestFirst(conversations) {
  return [...conversations].sort((a, b) => b.changedAt - a.changedAt);
}

export function asFile(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

// Raises SyntaxError when the text is not such a file. Only what the page itself writes is taken over.
export function fromFile(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT || file.version !== VERSION || !Array.isArray(file.conversations)) {
    throw new SyntaxError("this is no file of conversations");
  }
  return file.conversations.map(checkedConversation);
}

function checkedConversation(value) {
  const { id, title, changedAt, turns } = value || {};
  check(/^[0-9a-f]{24}$/.test(id) && typeof title === "string" && Number.isFinite(changedAt) && Array.isArray(turns));
  return { id, title, changedAt, turns: turns.map(checkedTurn) };
}

function checkedTurn(value) {
  const { role, content } = value || {};
  check((role === "user" || role === "assistant") && typeof content === "string");
  if (role === "user") return { role, content };
  const { reasoning, calls, model, note } = value;
  check([reasoning, model, note].every((text) => typeof text === "string") && Array.isArray(calls));
  return { role, content, reasoning, calls: calls.map(checkedCall), model, note };
}

function checkedCall(value) {
  check(typeof value?.name === "string" && typeof value.arguments === "string");
  return { name: value.name, arguments: value.arguments };
}

function check(isRight) {
  if (!isRight) throw new SyntaxError("a conversation in the file is not complete");
}
