// What the page keeps in the browser: conversations, presets and a few choices, in one IndexedDB database. Nothing of it is
// sent anywhere. The API key is not among it: key.js keeps that for its tab alone.

const NAME = "mlx-serve";
const STORES = ["conversations", "presets", "choices"];

function done(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}

export class Storage {
  #database;

  // Raises a DOMException where the browser lets the page keep nothing.
  static async open(factory = indexedDB) {
    const request = factory.open(NAME, 1);
    request.addEventListener("upgradeneeded", () => {
      for (const name of STORES) request.result.createObjectStore(name);
    });
    const storage = new Storage();
    storage.#database = await done(request);
    return storage;
  }

  // All values of a store.
  all(store) {
    return done(this.#store(store, "readonly").getAll());
  }

  get(store, key) {
    return done(this.#store(store, "readonly").get(key));
  }

  put(store, key, value) {
    return done(this.#store(store, "readwrite").put(value, key));
  }

  delete(store, key) {
    return done(this.#store(store, "readwrite").delete(key));
  }

  clear(store) {
    return done(this.#store(store, "readwrite").clear());
  }

  #store(name, mode) {
    return this.#database.transaction(name, mode).objectStore(name);
  }
}
