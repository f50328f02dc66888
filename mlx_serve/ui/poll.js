// Asks for GET /stats once a second while the page is visible, less often while the server is gone.
import { call } from "./api.js";
import { Locked } from "./failures.js";

const EVERY_MS = 1000;
const MAX_EVERY_MS = 15000;

export class Poll {
  #timer = 0;
  #pause = EVERY_MS;
  #isAsking = false;

  // ``onStats`` is given each answer, ``onFailure`` the error when there is none; ``onShown``: the page is visible again.
  constructor({ onStats, onFailure, onShown }) {
    this.onStats = onStats;
    this.onFailure = onFailure;
    document.addEventListener("visibilitychange", () => {
      onShown();
      if (this.#pause) this.#ask();
    });
  }

  start() {
    this.#pause = EVERY_MS;
    this.#ask();
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (this.#isAsking || document.hidden) return;
    this.#isAsking = true;
    try {
      const response = await call("stats");
      if (!response.ok) throw new Error(`status ${response.status}`);
      await this.onStats(await response.json());
      this.#pause = EVERY_MS;
    } catch (error) {
      this.onFailure(error);
      // Without a key there is nothing to ask; the button asks for one.
      this.#pause = error instanceof Locked ? 0 : Math.min(Math.max(this.#pause, EVERY_MS) * 2, MAX_EVERY_MS);
    } finally {
      this.#isAsking = false;
    }
    if (this.#pause) this.#timer = setTimeout(() => this.#ask(), this.#pause);
  }
}
