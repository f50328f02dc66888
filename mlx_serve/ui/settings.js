// The settings of the next request, and presets of them.
import { $, copyButton, element } from "./dom.js";
import { moreFields } from "./request.js";

const FIELDS = { system: "system", temperature: "temperature", maxTokens: "max-tokens", more: "more" };

export class Settings {
  constructor(kept) {
    this.kept = kept;
    const chosen = kept.choices.get("settings");
    if (chosen) this.#fill(chosen);
    $("copy").replaceWith(copyButton(() => $("curl").textContent));
    $("settings-button").addEventListener("click", () => $("settings-dialog").showModal());
    $("settings-dialog").addEventListener("close", () => kept.choose("settings", this.values));
    $("more").addEventListener("change", () => this.#check());
    $("preset").addEventListener("change", () => this.#use());
    $("preset-save").addEventListener("click", () => this.#save());
    $("preset-name").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.#save();
    });
    $("preset-delete").addEventListener("click", () => this.#delete());
    this.#showPresets("");
  }

  // As they were typed, with their limits checked by the browser.
  get values() {
    return Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, $(id).value]));
  }

  // Whether a request can be made of them; if not, the dialog says why.
  isRight() {
    if (this.#check()) return true;
    if (!$("settings-dialog").open) $("settings-dialog").showModal();
    $("more").focus();
    return false;
  }

  #check() {
    try {
      moreFields($("more").value);
      $("more-error").textContent = "";
      return true;
    } catch (error) {
      $("more-error").textContent = `More fields: ${error.message}`;
      return false;
    }
  }

  showRequest(curl) {
    $("curl").textContent = curl;
  }

  #fill(values) {
    for (const [name, id] of Object.entries(FIELDS)) $(id).value = values[name] ?? "";
  }

  #use() {
    const name = $("preset").value;
    this.#fill(this.kept.presets.get(name) || {});
    $("preset-name").value = name;
    $("preset-delete").disabled = name === "";
  }

  #save() {
    const name = $("preset-name").value.trim();
    if (!name) {
      $("preset-name").focus();
      return;
    }
    this.kept.savePreset({ name, ...this.values });
    this.#showPresets(name);
  }

  #delete() {
    this.kept.removePreset($("preset").value);
    $("preset-name").value = "";
    this.#showPresets("");
  }

  #showPresets(chosen) {
    const names = [...this.kept.presets.keys()].sort();
    $("preset").replaceChildren(...["", ...names].map((name) => {
      const option = element("option", "", name || "none");
      option.value = name;
      return option;
    }));
    $("preset").value = chosen;
    $("preset-delete").disabled = chosen === "";
  }
}
