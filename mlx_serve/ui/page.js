// The page: a live view fed by GET /stats, and a chat box on POST /v1/chat/completions.
//
// What comes from the server, a model's answer above all, is only ever set as text: there is no innerHTML here, and the
// page's policy would not let one through.
"use strict";

const $ = (id) => document.getElementById(id);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- The API key: asked for when the server wants one, and kept for this tab alone.

const KEY = "mlx-serve-key";
let asking = null;

const key = () => sessionStorage.getItem(KEY) || "";

class Locked extends Error {}

async function call(path, options = {}) {
  for (;;) {
    const used = key();
    const headers = { ...options.headers };
    if (used) headers.Authorization = `Bearer ${used}`;
    // A machine that is gone need not refuse, and figures that stand still would look like those of now.
    const signal = options.signal || AbortSignal.timeout(MAX_POLL_MS);
    const response = await fetch(path, { ...options, headers, signal, cache: "no-store", credentials: "omit" });
    if (response.status !== 401) return response;
    // Another call may have brought a new key meanwhile.
    if (key() !== used) continue;
    sessionStorage.removeItem(KEY);
    if (!(await askForKey(used !== ""))) throw new Locked("the server asks for an API key");
  }
}

// One dialog for all that wait; whether there is a key now.
function askForKey(wasWrong) {
  if (asking) return asking;
  $("key-text").textContent = wasWrong
    ? "The server did not take this key."
    : "This server asks for a key. It is kept for this tab alone, until the tab is closed.";
  $("key").value = "";
  $("key-dialog").returnValue = "";
  $("key-dialog").showModal();
  asking = new Promise((resolve) => {
    $("key-dialog").addEventListener("close", () => {
      asking = null;
      const given = $("key").value.trim();
      const used = $("key-dialog").returnValue === "use" && given !== "";
      if (used) sessionStorage.setItem(KEY, given);
      $("key").value = "";
      resolve(used);
      if (used) start();
    }, { once: true });
  });
  return asking;
}

$("key-button").addEventListener("click", () => askForKey(false));
$("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
$("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  $("key-dialog").close("forget");
});

// ---- Numbers as people read them.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function rate(value) {
  return value === null || value === undefined ? NONE : value.toFixed(value < 100 ? 1 : 0);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(n) {
  if (!n) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log2(n) / 10));
  return `${(n / 2 ** (10 * step)).toFixed(step > 1 ? 1 : 0)} ${units[step]}`;
}

// ---- The live view.

const POLL_MS = 1000;
const MAX_POLL_MS = 15000;
const N_POINTS = 120;
const history = { speed: [], running: [], waiting: [], active: [], kv: [] };
const N_SPEED_POINTS = 5;
let heard = [];
let timer = 0;
let pause = POLL_MS;
let polling = false;
let modelsAreKnown = false;

function remember(name, value) {
  history[name].push(value);
  if (history[name].length > N_POINTS) history[name].shift();
}

function setStatus(text, state) {
  // Written only when it changes: a screen reader says it each time.
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.state = state;
}

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  try {
    const response = await call("stats");
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    if (!modelsAreKnown) await loadModels();
    pause = POLL_MS;
  } catch (error) {
    setStatus(error instanceof Locked ? "needs an API key" : "not reachable", "bad");
    heard = [];
    // What comes back may have been started with others.
    modelsAreKnown = false;
    // Without a key there is nothing to ask; the button asks for one.
    pause = error instanceof Locked ? 0 : Math.min(pause * 2, MAX_POLL_MS);
  } finally {
    polling = false;
  }
  if (pause) timer = setTimeout(poll, pause);
}

function show(stats) {
  setStatus(stats.status, stats.status === "ok" ? "ok" : "bad");
  const models = stats.models.map((model) => model.name).join(", ") || "no model loaded";
  $("facts").textContent = `${models} · version ${stats.version} · up ${duration(stats.uptime_s)}`;
  const speed = outputSpeed(stats);
  $("t-running").textContent = whole.format(stats.running);
  $("t-waiting").textContent = whole.format(stats.waiting);
  $("t-speed").textContent = rate(speed);
  showQuantiles("t-ttft", stats.latency.first_token_s);
  showQuantiles("t-itl", stats.latency.inter_token_s);
  const asked = stats.prefix_cache.queried_tokens;
  $("t-hits").textContent = asked ? `${((100 * stats.prefix_cache.hit_tokens) / asked).toFixed(0)} %` : NONE;
  remember("speed", speed || 0);
  remember("running", stats.running);
  remember("waiting", stats.waiting);
  remember("active", stats.memory.active_bytes);
  remember("kv", stats.memory.kv_bytes);
  $("c-speed-now").textContent = rate(speed);
  draw("c-speed", "Output tokens per second", [["a", history.speed]], rate);
  draw("c-load", "Sequences running, and waiting", [["a", history.running], ["b", history.waiting]], whole.format);
  draw("c-memory", "MLX active memory, and KV caches", [["a", history.active], ["b", history.kv]], bytes);
  showRequests(stats);
  showPairs("memory", [
    ["Weights", bytes(stats.memory.weights_bytes)],
    ["KV caches, at most", bytes(stats.memory.kv_bytes)],
    ["Prefix cache", bytes(stats.memory.prefix_cache_bytes)],
    ["MLX active", bytes(stats.memory.active_bytes)],
    ["MLX peak", bytes(stats.memory.peak_bytes)],
    ["MLX cache", bytes(stats.memory.cache_bytes)],
  ]);
  showPairs("totals", [
    ["HTTP requests", whole.format(stats.totals.http_requests)],
    ["Prompt tokens", whole.format(stats.totals.prompt_tokens)],
    ["Cached tokens", whole.format(stats.totals.cached_tokens)],
    ["Output tokens", whole.format(stats.totals.output_tokens)],
    ["Cancelled", whole.format(stats.totals.cancelled)],
    ["Refused or failed", whole.format(stats.totals.refused)],
  ]);
  showErrors(stats.errors);
}

// Over the last few polls; by the server's clock, so that a slow reply does not matter.
function outputSpeed(stats) {
  const now = { at: stats.uptime_s, tokens: stats.totals.output_tokens };
  // Another server: it was started anew.
  if (heard.length && now.at < heard[heard.length - 1].at) heard = [];
  heard = [...heard, now].slice(-N_SPEED_POINTS);
  const before = heard[0];
  return now.at > before.at ? (now.tokens - before.tokens) / (now.at - before.at) : null;
}

function showQuantiles(id, values) {
  const most = values.n ? [element("small", "", `95 % below ${duration(values.p95)}`)] : [];
  $(id).replaceChildren(duration(values.p50), ...most);
}

function draw(id, name, series, format) {
  const svg = $(id);
  const top = Math.max(1, ...series.flatMap(([, values]) => values));
  const now = series.map(([, values]) => format(values[values.length - 1])).join(", ");
  svg.setAttribute("aria-label", `${name}: now ${now}; highest ${format(top)}`);
  svg.replaceChildren(...series.map(([className, values]) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const from = N_POINTS - values.length;
    const points = values.map((value, i) => `${((from + i) * 240) / (N_POINTS - 1)},${58 - (56 * value) / top}`);
    line.setAttribute("points", points.join(" "));
    line.setAttribute("class", className);
    return line;
  }));
}

function showRequests(stats) {
  const hidden = stats.n_requests - stats.requests.length;
  $("n-requests").textContent = hidden > 0 ? `${stats.requests.length} of ${stats.n_requests}` : `${stats.n_requests}`;
  $("requests").replaceChildren(...stats.requests.map((request) => {
    const row = element("tr");
    const numbers = [
      whole.format(request.output_tokens), rate(request.tokens_per_s), duration(request.first_token_s),
      duration(request.age_s), whole.format(request.prompt_tokens), whole.format(request.cached_tokens),
    ];
    row.append(element("td", request.phase, request.phase), ...numbers.map((text) => element("td", "n", text)));
    row.append(element("td", "", request.model), element("td", "", request.route));
    return row;
  }));
}

function showPairs(id, pairs) {
  $(id).replaceChildren(...pairs.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  }));
}

function showErrors(errors) {
  $("errors").replaceChildren(...errors.map((entry) => {
    const at = new Date(entry.at * 1000).toLocaleTimeString();
    const times = entry.count > 1 ? ` (${entry.count} times)` : "";
    return element("li", "", `${at} ${entry.status} ${entry.reason}${times} ${entry.route} ${entry.request_id}`);
  }));
}

document.addEventListener("visibilitychange", () => {
  heard = [];
  if (pause) poll();
});

function start() {
  pause = POLL_MS;
  poll();
}

// ---- The models.

async function loadModels() {
  const response = await call("v1/models");
  if (!response.ok) throw new Error(`status ${response.status}`);
  modelsAreKnown = true;
  const { data } = await response.json();
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map((model) => {
    const option = element("option", "", model.id);
    option.value = model.id;
    return option;
  }));
  if (data.some((model) => model.id === chosen)) $("model").value = chosen;
}

// ---- The chat box.

let turns = [];
let running = null;

class Turn {
  constructor(role, name) {
    this.box = element("article", `turn ${role}`);
    this.box.setAttribute("aria-label", name);
    this.note = element("p", "note");
    this.text = element("div", "text");
    this.box.append(element("div", "who", name), this.text, this.note);
    this.calls = [];
    $("log").append(this.box);
    $("log").scrollTop = $("log").scrollHeight;
  }

  reason(text) {
    if (!this.reasoning) {
      this.reasoning = element("div", "text");
      this.folded = element("details");
      this.folded.append(element("summary", "", "Reasoning"), this.reasoning);
      this.box.insertBefore(this.folded, this.text);
    }
    append(this.reasoning, text);
  }

  say(text) {
    append(this.text, text);
  }

  callTool(delta) {
    const at = delta.index || 0;
    if (!this.calls[at]) {
      const box = element("pre");
      box.tabIndex = 0;
      box.setAttribute("aria-label", "tool call");
      this.box.insertBefore(box, this.note);
      this.calls[at] = { box, name: "", arguments: "" };
    }
    const known = this.calls[at];
    known.name += delta.function?.name || "";
    known.arguments += delta.function?.arguments || "";
    known.box.textContent = `${known.name}(${known.arguments})`;
  }

  fail(text) {
    const line = element("p", "error", text);
    line.setAttribute("role", "alert");
    this.box.insertBefore(line, this.note);
  }
}

function append(box, text) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  box.append(document.createTextNode(text));
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function moreFields() {
  const text = $("more").value.trim();
  if (!text) return {};
  const value = JSON.parse(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new SyntaxError("not a JSON object");
  return value;
}

function requestBody(more) {
  const system = $("system").value.trim();
  const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
  if ($("model").value) body.model = $("model").value;
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
  return { ...body, ...more, stream: true, stream_options: { include_usage: true } };
}

function asCurl(body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const url = new URL("v1/chat/completions", document.baseURI).href;
  const secret = key() ? ' \\\n  -H "Authorization: Bearer $MLX_SERVE_API_KEY"' : "";
  const json = quoted(JSON.stringify(body));
  return `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${secret} \\\n  -d ${json}`;
}

async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
  throw new Error("the stream ended before its end");
}

async function send(text) {
  let more;
  try {
    more = moreFields();
    $("more-error").textContent = "";
  } catch (error) {
    $("more-error").textContent = `More fields: ${error.message}`;
    $("more").closest("details").open = true;
    $("more").focus();
    return;
  }
  turns.push({ role: "user", content: text });
  new Turn("user", "You").say(text);
  $("prompt").value = "";
  const body = requestBody(more);
  $("curl").textContent = asCurl(body);
  const asked = turns;
  const answer = new Turn("assistant", body.model || "assistant");
  const content = await receive(body, answer);
  // Not if a new chat was begun meanwhile.
  if (asked !== turns) return;
  if (content === null) turns.pop();
  else turns.push({ role: "assistant", content });
}

// The answer's text, as far as it came; null when there was none.
async function receive(body, answer) {
  const began = performance.now();
  const seen = { content: "", first: 0, latest: 0, n: 0, usage: null, finish: "" };
  running = new AbortController();
  setRunning(true);
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const chunk of events(response)) take(chunk, answer, seen);
  } catch (error) {
    if (error.name === "AbortError") seen.finish = "stopped";
    else answer.fail(error.message);
  } finally {
    running = null;
    setRunning(false);
  }
  answer.note.textContent = summary(seen, began);
  return seen.n ? seen.content : null;
}

async function errorText(response) {
  const text = await response.text();
  try {
    return `${response.status}: ${JSON.parse(text).error.message}`;
  } catch {
    return `${response.status}: ${text.slice(0, 500)}`;
  }
}

function take(chunk, answer, seen) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) seen.usage = chunk.usage;
  for (const choice of chunk.choices || []) {
    // Only the first choice is shown.
    if (choice.index !== 0) continue;
    const delta = choice.delta || {};
    if (delta.reasoning_content) answer.reason(delta.reasoning_content);
    if (delta.content) answer.say(delta.content);
    for (const tool of delta.tool_calls || []) answer.callTool(tool);
    if (choice.finish_reason) seen.finish = choice.finish_reason;
    if (!delta.reasoning_content && !delta.content && !delta.tool_calls) continue;
    seen.content += delta.content || "";
    seen.latest = performance.now();
    seen.first = seen.first || seen.latest;
    seen.n += 1;
  }
  if (seen.n > 1) $("speed").textContent = `${rate(speedOf(seen.n, seen))} pieces/s`;
}

function speedOf(n, seen) {
  return seen.latest > seen.first ? (n - 1) / ((seen.latest - seen.first) / 1000) : null;
}

function summary(seen, began) {
  const parts = [];
  if (seen.usage) {
    const cached = seen.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${seen.usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${seen.usage.completion_tokens} tokens`);
    const speed = speedOf(seen.usage.completion_tokens, seen);
    if (speed !== null) parts.push(`${rate(speed)} tokens/s`);
  }
  if (seen.first) parts.push(`first after ${duration((seen.first - began) / 1000)}`);
  if (seen.finish) parts.push(seen.finish);
  return parts.join(" · ");
}

function setRunning(isRunning) {
  // The answer is read out when it is whole, and not piece by piece.
  $("log").setAttribute("aria-busy", String(isRunning));
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
  if (!isRunning) $("speed").textContent = "";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (!running && text.trim()) send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("log").replaceChildren();
  $("prompt").focus();
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copy").textContent = "Copied";
  } catch {
    // Only a page from this machine or over HTTPS may write to the clipboard.
    getSelection().selectAllChildren($("curl"));
    $("copy").textContent = "Selected: copy it by hand";
  }
});

start();
