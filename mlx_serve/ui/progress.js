// What a request that has no token yet is waiting for, from the figures of GET /stats.
import { whole } from "./numbers.js";

// A request's id, by which it is found in the figures again.
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

// {text, share}: ``share`` of the prompt that is read, 0 to 1, or null. null when the figures do not have the request.
export function progressOf(stats, id) {
  const own = stats.requests.find((request) => request.id === id);
  if (!own) return null;
  if (own.phase === "queued") return { text: placeInQueue(stats, own), share: null };
  if (own.phase === "prefill") return prefill(own);
  return null;
}

// By arrival, as the queue serves requests of one priority.
function placeInQueue(stats, own) {
  if (!stats.models.some((model) => model.name === own.model)) return `Loading ${own.model}`;
  const queued = stats.requests.filter((request) => request.phase === "queued" && request.model === own.model);
  const place = queued.indexOf(own) + 1;
  return queued.length > 1 ? `In the queue: place ${place} of ${queued.length}` : "In the queue: next";
}

function prefill({ prefilled_tokens: done = 0, prompt_tokens: all }) {
  const share = all ? Math.min(1, done / all) : 0;
  const percent = Math.floor(100 * share);
  return { text: `Reading the prompt: ${whole(done)} of ${whole(all)} tokens (${percent} %)`, share };
}
