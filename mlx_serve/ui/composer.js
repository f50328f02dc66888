// The box in which a message is written, with Send and Stop: always in view, and usable from the keyboard alone.
import { $ } from "./dom.js";

export class Composer {
  // The turn that the message replaces, or null.
  editing = null;

  // ``onSend`` is given the text, ``onStop`` is called by the button and by Esc.
  constructor({ onSend, onStop }) {
    this.box = $("prompt");
    this.isRunning = false;
    // A keyboard on glass has no Shift+Enter.
    this.entersLines = matchMedia("(pointer: coarse)").matches;
    this.box.placeholder = this.entersLines ? "Message" : "Enter sends, Shift+Enter begins a line, Esc stops";
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.isRunning && this.box.value.trim()) onSend(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.entersLines) return;
      event.preventDefault();
      $("form").requestSubmit();
    });
    this.box.addEventListener("input", () => this.#fit());
    $("stop").addEventListener("click", () => {
      onStop();
      this.focus();
    });
    $("edit-cancel").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
      if (this.isRunning) onStop();
      else if (this.editing !== null) this.clear();
    });
  }

  get text() {
    return this.box.value;
  }

  // Not where that would bring a keyboard over half of the screen.
  focus() {
    if (!this.entersLines) this.box.focus();
  }

  clear() {
    this.#set("", null);
  }

  edit(text, turn) {
    this.#set(text, turn);
    this.box.focus();
  }

  // The question was not answered: it is here again, in front of what was written meanwhile.
  giveBack(text, turn) {
    const draft = this.box.value.trim();
    this.#set(draft ? `${text}\n\n${draft}` : text, turn);
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    $("send").disabled = isRunning;
    $("stop").disabled = !isRunning;
    if (!isRunning) $("speed").textContent = "";
  }

  #set(text, turn) {
    this.box.value = text;
    this.editing = turn;
    $("editing").hidden = turn === null;
    this.#fit();
  }

  // As high as its text, up to the limit that the style sheet sets.
  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight + 2}px`;
  }
}
