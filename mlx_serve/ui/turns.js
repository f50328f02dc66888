// The two kinds of turn in the conversation, as elements. An answer grows by what is new of it.
import { readable } from "./answer.js";
import { button, copyButton, element } from "./dom.js";
import { Markdown } from "./markdown.js";

function turn(kind, name) {
  const box = element("article", `turn ${kind}`);
  box.setAttribute("aria-label", name);
  box.append(element("p", "who", name));
  return box;
}

export function questionTurn(content, onEdit) {
  const box = turn("user", "You");
  const actions = element("div", "actions");
  actions.append(copyButton(() => content), button("Edit", onEdit));
  box.append(element("div", "text", content), actions);
  return box;
}

export class AnswerTurn {
  #waiting = element("p", "waiting");
  #content = element("div", "markdown");
  #calls = [];
  #reasoning = null;
  #note = element("p", "note");
  #actions = element("div", "actions");
  #nShown = { content: 0, reasoning: 0 };

  constructor(name, onRegenerate) {
    this.box = turn("assistant", name);
    this.box.append(this.#waiting, this.#content, this.#note, this.#actions);
    this.markdown = new Markdown(this.#content);
    this.onRegenerate = onRegenerate;
  }

  // What is waited for: {text, share}, share null when nobody knows.
  wait({ text, share }) {
    const parts = [element("span", "", text)];
    if (share !== null) {
      const bar = element("progress");
      bar.value = share;
      bar.setAttribute("aria-label", "Prompt read");
      parts.push(bar);
    }
    this.#waiting.replaceChildren(...parts);
  }

  // Adds what ``answer`` has more than is shown.
  show(answer) {
    if (!answer.isEmpty) this.#waiting.remove();
    const reasoning = answer.reasoning.slice(this.#nShown.reasoning);
    const content = answer.content.slice(this.#nShown.content);
    this.#nShown = { content: answer.content.length, reasoning: answer.reasoning.length };
    if (reasoning) this.#thoughts().feed(reasoning);
    if (content) this.markdown.feed(content);
    answer.calls.forEach((call, i) => this.#showCall(call, i));
  }

  // The answer is over, for whatever reason; ``note`` is a line about it.
  end(answer, note) {
    this.show(answer);
    this.#waiting.remove();
    this.markdown.end();
    this.#reasoning?.end();
    answer.calls.forEach((call, i) => { this.#calls[i].arguments.textContent = readable(call.arguments); });
    this.#note.textContent = note;
    const { content } = answer;
    if (content) this.#actions.append(copyButton(() => content));
    this.#actions.append(button("Regenerate", this.onRegenerate));
  }

  // Words for a failure, with a button that tries again when that may help.
  fail({ text, detail, canRetry }, onRetry) {
    this.#waiting.remove();
    const box = element("div", "failure");
    box.setAttribute("role", "alert");
    box.append(element("p", "error", text));
    if (detail) box.append(element("p", "dim", detail));
    if (canRetry) box.append(button("Retry", onRetry));
    this.box.insertBefore(box, this.#note);
  }

  #thoughts() {
    if (!this.#reasoning) {
      const folded = element("details", "reasoning");
      const inside = element("div", "markdown");
      folded.append(element("summary", "", "Reasoning"), inside);
      this.box.insertBefore(folded, this.#content);
      this.#reasoning = new Markdown(inside);
    }
    return this.#reasoning;
  }

  #showCall(call, i) {
    if (!this.#calls[i]) {
      const folded = element("details", "call");
      const name = element("summary");
      const code = element("pre");
      code.tabIndex = 0;
      code.setAttribute("role", "group");
      code.setAttribute("aria-label", "Arguments");
      folded.append(name, code);
      this.box.insertBefore(folded, this.#note);
      this.#calls[i] = { name, arguments: code, n: 0 };
    }
    const shown = this.#calls[i];
    if (shown.name.textContent !== `Tool call: ${call.name}`) shown.name.textContent = `Tool call: ${call.name}`;
    if (call.arguments.length > shown.n) shown.arguments.append(call.arguments.slice(shown.n));
    shown.n = call.arguments.length;
  }
}
