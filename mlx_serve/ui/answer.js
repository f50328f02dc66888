// An answer as it comes: chunks of POST /v1/chat/completions folded into one value. Knows no document.
import { duration, rate } from "./numbers.js";

// The server's own error in mid-stream: {message, type, code}.
export class StreamFailed extends Error {
  constructor(error) {
    super(error.message);
    this.code = error.code || error.type || "";
  }
}

export class Answer {
  content = "";
  reasoning = "";
  // {name, arguments} of each tool call.
  calls = [];
  usage = null;
  finish = "";
  nPieces = 0;

  // Times are in milliseconds, on one clock.
  constructor(beganAt) {
    this.beganAt = beganAt;
    this.firstAt = 0;
    this.latestAt = 0;
  }

  get isEmpty() {
    return this.nPieces === 0;
  }

  // Raises StreamFailed. Only the first choice is shown.
  take(chunk, now) {
    if (chunk.error) throw new StreamFailed(chunk.error);
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices || []) {
      if (choice.index === 0) this.#takeChoice(choice, now);
    }
  }

  #takeChoice({ delta = {}, finish_reason: finish }, now) {
    if (finish) this.finish = finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
    this.content += content || "";
    this.reasoning += reasoning || "";
    for (const call of calls || []) this.#takeCall(call);
    if (!content && !reasoning && !calls) return;
    this.nPieces += 1;
    this.latestAt = now;
    this.firstAt ||= now;
  }

  #takeCall({ index = 0, function: called = {} }) {
    this.calls[index] ||= { name: "", arguments: "" };
    this.calls[index].name += called.name || "";
    this.calls[index].arguments += called.arguments || "";
  }

  // Of pieces while it runs: only the end tells how many tokens they were.
  speed(n = this.nPieces) {
    return this.latestAt > this.firstAt ? (n - 1) / ((this.latestAt - this.firstAt) / 1000) : null;
  }

  // One line about the answer.
  summary() {
    const parts = [];
    if (this.usage) {
      const { prompt_tokens: asked, completion_tokens: made, prompt_tokens_details: details } = this.usage;
      const cached = details?.cached_tokens;
      parts.push(`${asked} prompt tokens${cached ? ` (${cached} cached)` : ""}`, `${made} tokens`);
      const speed = this.speed(made);
      if (speed !== null) parts.push(`${rate(speed)} tokens/s`);
    }
    if (this.firstAt) parts.push(`first after ${duration((this.firstAt - this.beganAt) / 1000)}`);
    if (this.finish) parts.push(this.finish);
    return parts.join(" · ");
  }
}

// A call's arguments to be read: indented when they are JSON, as they are when not, or not yet.
export function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
