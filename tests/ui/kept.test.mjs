import assert from "node:assert/strict";
import { test } from "node:test";

import "./webcrypto.mjs";
import { newConversation } from "../../mlx_serve/ui/conversations.js";
import { Kept } from "../../mlx_serve/ui/kept.js";

// A browser's storage, as maps.
class Fake {
  stores = { conversations: new Map(), presets: new Map(), choices: new Map() };

  async all(store) {
    return [...this.stores[store].values()];
  }

  async get(store, key) {
    return this.stores[store].get(key);
  }

  async put(store, key, value) {
    if (this.isFull) throw new Error("no room");
    this.stores[store].set(key, structuredClone(value));
  }

  async delete(store, key) {
    this.stores[store].delete(key);
  }

  async clear(store) {
    this.stores[store].clear();
  }
}

const conversation = () => ({ ...newConversation(1), turns: [{ role: "user", content: "a" }] });
const fail = (error) => { throw error; };

async function loaded(storage, onFailure = fail) {
  const kept = new Kept(storage, onFailure);
  await kept.load();
  return kept;
}

test("what was saved is there again", async () => {
  const storage = new Fake();
  const kept = await loaded(storage);
  const one = conversation();
  await kept.save(one);
  await kept.savePreset({ name: "p", system: "s" });
  await kept.choose("figures", false);
  const again = await loaded(storage);
  assert.deepEqual([...again.conversations.values()], [one]);
  assert.deepEqual([...again.presets.keys()], ["p"]);
  assert.equal(again.choices.get("figures"), false);
  await again.remove(one.id);
  await again.removePreset("p");
  assert.equal((await loaded(storage)).conversations.size, 0);
  assert.equal((await loaded(storage)).presets.size, 0);
});

test("a conversation without turns is none", async () => {
  const storage = new Fake();
  const kept = await loaded(storage);
  const one = conversation();
  await kept.save(one);
  await kept.save({ ...one, turns: [] });
  assert.equal(storage.stores.conversations.size, 0);
  assert.equal(kept.conversations.size, 0);
});

test("switched off, the browser has nothing, also later; switched on, it gets all", async () => {
  const storage = new Fake();
  const kept = await loaded(storage);
  await kept.save(conversation());
  await kept.keep(false);
  await kept.save(conversation());
  await kept.choose("figures", true);
  assert.equal(storage.stores.conversations.size, 0);
  assert.deepEqual([...storage.stores.choices], [["isKeeping", false]]);
  assert.equal(kept.conversations.size, 2);
  assert.equal((await loaded(storage)).isKeeping, false);
  await kept.keep(true);
  assert.equal(storage.stores.conversations.size, 2);
  assert.equal((await loaded(storage)).isKeeping, true);
});

test("a browser without storage keeps nothing, and the page works", async () => {
  const kept = await loaded(null);
  await kept.save(conversation());
  assert.deepEqual([kept.canKeep, kept.isKeeping, kept.conversations.size], [false, false, 1]);
});

test("a full storage is reported and loses nothing of the page's own", async () => {
  const storage = new Fake();
  const errors = [];
  const kept = await loaded(storage, (error) => errors.push(error.message));
  storage.isFull = true;
  await kept.save(conversation());
  assert.deepEqual(errors, ["no room"]);
  assert.equal(kept.conversations.size, 1);
});
