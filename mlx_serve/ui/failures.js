// What went wrong, in words for the person in front of the page, and whether sending again may help.
import { StreamFailed } from "./answer.js";
import { Interrupted } from "./stream.js";

// An answer of the server that is no success.
export class Refused extends Error {
  constructor(status, message, code = "", retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

// The server asks for a key and was given none.
export class Locked extends Error {}

export async function refusal(response) {
  const text = await response.text();
  const after = Number.parseInt(response.headers.get("retry-after"), 10);
  let error = {};
  try {
    error = JSON.parse(text).error || {};
  } catch {
    // A proxy's own page, perhaps.
  }
  const message = error.message || text.slice(0, 300) || response.statusText;
  return new Refused(response.status, message, error.code || error.type || "", Number.isNaN(after) ? null : after);
}

const WORDS = {
  403: "The server does not accept requests from this page's address.",
  404: "The server does not have this model.",
  408: "The server did not get the whole request in time.",
  413: "The conversation is too large for the server.",
  429: "The server is busy: its queue is full.",
  502: "The proxy in front of the server got no answer from it.",
  503: "The server can take no request now: it starts, stops or has too much to do.",
  504: "The answer took longer than the server allows.",
};

// {text, detail, canRetry}; ``detail`` is the server's own message, or "". ``hasText``: a part of the answer has come.
export function explain(error, { hasText = false } = {}) {
  if (error instanceof Refused) return explainRefusal(error);
  if (error instanceof Locked) return { text: "The server asks for an API key.", detail: "", canRetry: true };
  const kept = hasText ? " What has come is kept." : "";
  if (error instanceof StreamFailed) {
    return { text: `The server could not finish the answer.${kept}`, detail: error.message, canRetry: true };
  }
  if (error instanceof Interrupted) {
    return { text: `The connection to the server was lost.${kept}`, detail: "", canRetry: true };
  }
  // How fetch says that nobody is there.
  if (error instanceof TypeError) return { text: "The server cannot be reached.", detail: "", canRetry: true };
  return { text: "The page failed.", detail: String(error.message), canRetry: true };
}

function explainRefusal({ status, code, message, retryAfterS }) {
  if (code === "context_length_exceeded") {
    const text = "The conversation is longer than this model can read. Begin a new one, or shorten a message.";
    return { text, detail: message, canRetry: false };
  }
  const wait = retryAfterS ? ` Try again in about ${retryAfterS} s.` : "";
  if (WORDS[status]) return { text: WORDS[status] + wait, detail: message, canRetry: ![403, 413].includes(status) };
  if (status >= 500) return { text: `The server failed with this request.${wait}`, detail: message, canRetry: true };
  return { text: "The server did not accept the request.", detail: message, canRetry: true };
}
