// The conversation on the screen: asks the server, shows the answer as it comes, and keeps both.
import { Answer } from "./answer.js";
import { call } from "./api.js";
import { $ } from "./dom.js";
import { explain, refusal } from "./failures.js";
import { Follow } from "./follow.js";
import { rate } from "./numbers.js";
import { newRequestId, progressOf } from "./progress.js";
import { events } from "./stream.js";
import { AnswerTurn, questionTurn } from "./turns.js";

const PATH = "v1/chat/completions";

export class Chat {
  #log = $("log");
  #follow;
  // The turns that the log shows, an element each.
  #shown = [];
  // {id, answer, view, abort} of the request that runs.
  #running = null;

  // ``makeBody(turns)`` gives a request's body, or null when the settings are wrong; ``onChange(conversation)`` is
  // called when there is more to keep.
  constructor({ composer, makeBody, onChange }) {
    this.composer = composer;
    this.makeBody = makeBody;
    this.onChange = onChange;
    this.#follow = new Follow(this.#log, (isFollowing) => { $("to-end").hidden = isFollowing; });
    $("to-end").addEventListener("click", () => this.#follow.toEnd());
  }

  // Shows another conversation. The one that was shown keeps what it has.
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.#shown = [];
    this.#showTurns();
    this.#follow.toEnd();
  }

  stop() {
    this.#running?.abort.abort();
  }

  // Sends the text of the composer, in place of the turn that is edited if one is.
  send(text) {
    if (!text.trim()) return;
    const { turns } = this.conversation;
    const editing = this.composer.editing;
    const kept = editing === null ? turns : turns.slice(0, editing);
    this.#ask([...kept, { role: "user", content: text }], {
      begin: () => this.composer.clear(),
      takeBack: () => this.composer.giveBack(text, editing),
      retry: () => this.send(this.composer.text),
    });
  }

  // Asks again for the answer at this place; it and what followed it go, once there is a new one.
  regenerate(place) {
    if (this.#running) return;
    this.#ask(this.conversation.turns.slice(0, place), { retry: () => this.regenerate(place) });
  }

  // The figures may tell what the request is waiting for.
  heard(stats) {
    const running = this.#running;
    if (!running?.answer.isEmpty) return;
    const progress = progressOf(stats, running.id);
    if (progress) running.view.wait(progress);
    this.#follow.grew();
  }

  async #ask(turns, { begin = () => {}, takeBack = () => {}, retry }) {
    const body = this.makeBody(turns);
    if (body === null) return;
    const { conversation } = this;
    const before = conversation.turns;
    conversation.turns = turns;
    this.#showTurns();
    begin();
    this.onChange(conversation);
    const view = new AnswerTurn(body.model || "assistant", () => this.regenerate(turns.length));
    const answer = new Answer(performance.now());
    view.box.classList.add("streamed");
    this.#log.append(view.box);
    view.wait({ text: "Waiting for the server", share: null });
    this.#follow.toEnd();
    const error = await this.#receive(body, answer, view);
    const isShown = this.conversation === conversation;
    if (answer.isEmpty && (error || answer.finish === "stopped")) {
      if (!isShown) return;
      conversation.turns = before;
      this.#showTurns();
      takeBack();
    } else {
      const { content, reasoning, calls } = answer;
      const note = answer.summary();
      conversation.turns = [...turns, { role: "assistant", content, reasoning, calls, model: body.model || "", note }];
      view.end(answer, note);
      if (isShown) this.#shown = [...conversation.turns];
    }
    if (error && isShown) {
      this.#log.append(view.box);
      view.fail(explain(error, { hasText: !answer.isEmpty }), answer.isEmpty ? retry : () => this.regenerate(turns.length));
    }
    this.#follow.grew();
    this.onChange(conversation);
  }

  // The error that ended the answer, or null; being stopped is none.
  async #receive(body, answer, view) {
    const running = { id: newRequestId(), answer, view, abort: new AbortController() };
    this.#setRunning(running);
    try {
      const response = await call(PATH, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Request-Id": running.id },
        body: JSON.stringify(body),
        signal: running.abort.signal,
      });
      if (!response.ok) throw await refusal(response);
      for await (const chunk of events(response.body)) {
        answer.take(chunk, performance.now());
        this.#showSoon(running);
      }
      return null;
    } catch (error) {
      if (error.name !== "AbortError") return error;
      answer.finish = "stopped";
      return null;
    } finally {
      cancelAnimationFrame(running.frame);
      if (this.#running === running) this.#setRunning(null);
    }
  }

  // Once for each frame, however many pieces have come.
  #showSoon(running) {
    running.frame ||= requestAnimationFrame(() => {
      running.frame = 0;
      running.view.show(running.answer);
      if (this.#running !== running) return;
      $("speed").textContent = `${rate(running.answer.speed())} pieces/s`;
      this.#follow.grew();
    });
  }

  #setRunning(running) {
    this.#running = running;
    // The answer is read out when it is whole, and not piece by piece.
    this.#log.setAttribute("aria-busy", String(running !== null));
    this.composer.setRunning(running !== null);
  }

  // Brings the log in line with the conversation. Turns that it shows already are left alone.
  #showTurns() {
    const { turns } = this.conversation;
    let n = 0;
    while (n < turns.length && turns[n] === this.#shown[n]) n += 1;
    while (this.#log.children.length > n) this.#log.lastChild.remove();
    this.#log.append(...turns.slice(n).map((turn, i) => this.#elementOf(turn, n + i)));
    this.#shown = [...turns];
  }

  #elementOf(turn, place) {
    if (turn.role === "user") return questionTurn(turn.content, () => this.#edit(turn.content, place));
    const view = new AnswerTurn(turn.model || "assistant", () => this.regenerate(place));
    view.end(turn, turn.note);
    return view.box;
  }

  #edit(text, place) {
    if (!this.#running) this.composer.edit(text, place);
  }
}
