// Requests to the server, with the key when there is one.
import { Locked } from "./failures.js";
import { askForKey, forgetKey, key } from "./key.js";

// A machine that is gone need not refuse, and figures that stand still would look like those of now.
const TIMEOUT_MS = 15000;

// The response, whatever its status but 401, for which the person is asked. Raises Locked, and what fetch raises.
export async function call(path, options = {}) {
  for (;;) {
    const used = key();
    const headers = { ...options.headers };
    if (used) headers.Authorization = `Bearer ${used}`;
    const signal = options.signal || AbortSignal.timeout(TIMEOUT_MS);
    const response = await fetch(path, { ...options, headers, signal, cache: "no-store", credentials: "omit" });
    if (response.status !== 401) return response;
    // Another call may have brought a new key meanwhile.
    if (key() !== used) continue;
    forgetKey();
    if (!(await askForKey(used !== ""))) throw new Locked("the server asks for an API key");
  }
}
