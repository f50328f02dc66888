// What the page remembers: conversations, presets and choices. In memory, and in the browser as long as that is wanted.

export class Kept {
  conversations = new Map();
  presets = new Map();
  choices = new Map();
  isKeeping = false;
  #storage;
  #onFailure;

  // ``storage`` is null where the browser lets the page keep nothing. ``onFailure`` is given an error of writing.
  constructor(storage, onFailure) {
    this.#storage = storage;
    this.#onFailure = onFailure;
  }

  get canKeep() {
    return this.#storage !== null;
  }

  async load() {
    if (!this.#storage) return;
    this.isKeeping = (await this.#storage.get("choices", "isKeeping")) ?? true;
    for (const one of await this.#storage.all("conversations")) this.conversations.set(one.id, one);
    for (const one of await this.#storage.all("presets")) this.presets.set(one.name, one);
    for (const [name, value] of (await this.#storage.get("choices", "all")) || []) this.choices.set(name, value);
  }

  save(conversation) {
    if (!conversation.turns.length) return this.remove(conversation.id);
    this.conversations.set(conversation.id, conversation);
    return this.#write((storage) => storage.put("conversations", conversation.id, conversation));
  }

  remove(id) {
    this.conversations.delete(id);
    return this.#write((storage) => storage.delete("conversations", id));
  }

  savePreset(preset) {
    this.presets.set(preset.name, preset);
    return this.#write((storage) => storage.put("presets", preset.name, preset));
  }

  removePreset(name) {
    this.presets.delete(name);
    return this.#write((storage) => storage.delete("presets", name));
  }

  choose(name, value) {
    this.choices.set(name, value);
    return this.#write((storage) => storage.put("choices", "all", [...this.choices]));
  }

  // Off: what the browser has is deleted, and the page has its own until it is closed. On: the browser gets it.
  async keep(isWanted) {
    this.isKeeping = true;
    await this.#write(async (storage) => {
      if (!isWanted) for (const store of ["conversations", "presets", "choices"]) await storage.clear(store);
      await storage.put("choices", "isKeeping", isWanted);
    });
    this.isKeeping = isWanted && this.canKeep;
    if (!isWanted) return;
    for (const one of this.conversations.values()) await this.save(one);
    for (const one of this.presets.values()) await this.savePreset(one);
    await this.#write((storage) => storage.put("choices", "all", [...this.choices]));
  }

  async #write(write) {
    if (!this.isKeeping || !this.#storage) return;
    try {
      await write(this.#storage);
    } catch (error) {
      this.#onFailure(error);
    }
  }
}
