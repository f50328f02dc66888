// The figures of GET /stats: tiles, charts, and the requests that run. Greyed while they are old.
import { SPAN_S, lines, scaleTop, speedOf } from "./charts.js";
import { $, element } from "./dom.js";
import { NONE, bytes, duration, rate, whole } from "./numbers.js";

const N_POLLS = 5;

export class Figures {
  #history = { speed: [], running: [], waiting: [], active: [], kv: [] };
  #polls = [];
  #heardAt = null;

  constructor() {
    for (const id of ["c-speed", "c-load", "c-memory"]) addScale($(id));
  }

  show(stats) {
    this.#heardAt = new Date();
    $("figures").classList.remove("old");
    $("age").textContent = "";
    const speed = this.#speed(stats);
    $("t-running").textContent = whole(stats.running);
    $("t-waiting").textContent = whole(stats.waiting);
    $("t-speed").textContent = rate(speed);
    showQuantiles("t-ttft", stats.latency.first_token_s);
    showQuantiles("t-itl", stats.latency.inter_token_s);
    const asked = stats.prefix_cache.queried_tokens;
    $("t-hits").textContent = asked ? `${((100 * stats.prefix_cache.hit_tokens) / asked).toFixed(0)} %` : NONE;
    this.#remember({
      speed: speed || 0,
      running: stats.running,
      waiting: stats.waiting,
      active: stats.memory.active_bytes,
      kv: stats.memory.kv_bytes,
    });
    this.#draw("c-speed", "Output tokens per second", ["speed"], rate);
    this.#draw("c-load", "Sequences running, and waiting", ["running", "waiting"], whole);
    this.#draw("c-memory", "MLX active memory, and KV caches", ["active", "kv"], bytes);
    showRequests(stats);
    showPairs("memory", [
      ["Weights", bytes(stats.memory.weights_bytes)],
      ["KV caches, expected", bytes(stats.memory.kv_bytes)],
      ["Prefix cache", bytes(stats.memory.prefix_cache_bytes)],
      ["MLX active", bytes(stats.memory.active_bytes)],
      ["MLX peak", bytes(stats.memory.peak_bytes)],
      ["MLX cache", bytes(stats.memory.cache_bytes)],
    ]);
    showPairs("totals", [
      ["HTTP requests", whole(stats.totals.http_requests)],
      ["Pauses for lack of memory", whole(stats.preemptions)],
      ["Prompt tokens", whole(stats.totals.prompt_tokens)],
      ["Cached tokens", whole(stats.totals.cached_tokens)],
      ["Output tokens", whole(stats.totals.output_tokens)],
      ["Cancelled", whole(stats.totals.cancelled)],
      ["Refused or failed", whole(stats.totals.refused)],
    ]);
    showErrors(stats.errors);
  }

  // Nothing new is heard; what is shown was true once.
  grey() {
    this.#polls = [];
    if (!this.#heardAt) return;
    $("figures").classList.add("old");
    $("age").textContent = `As they were at ${this.#heardAt.toLocaleTimeString()}`;
  }

  // The page was hidden, and did not ask.
  pause() {
    this.#polls = [];
  }

  #speed(stats) {
    const now = { at: stats.uptime_s, tokens: stats.totals.output_tokens };
    // Another server: it was started anew.
    if (this.#polls.length && now.at < this.#polls.at(-1).at) this.#polls = [];
    this.#polls = [...this.#polls, now].slice(-N_POLLS);
    return speedOf(this.#polls);
  }

  #remember(values) {
    const at = performance.now() / 1000;
    for (const [name, value] of Object.entries(values)) {
      const points = this.#history[name];
      points.push({ at, value });
      while (points[0].at < at - SPAN_S) points.shift();
    }
  }

  #draw(id, name, series, format) {
    const svg = $(id);
    const all = series.map((key) => this.#history[key]);
    const top = scaleTop(Math.max(...all.flat().map((point) => point.value)), format === bytes);
    const now = all.map((points) => format(points.at(-1).value)).join(", ");
    svg.setAttribute("aria-label", `${name}: now ${now}; the scale ends at ${format(top)}`);
    svg.closest(".chart").querySelector(".top").textContent = format(top);
    const heardAt = performance.now() / 1000;
    svg.replaceChildren(...all.flatMap((points, i) => lines(points, heardAt, top).map((line) => {
      const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      drawn.setAttribute("points", line);
      drawn.setAttribute("class", "ab"[i]);
      return drawn;
    })));
  }
}

// The chart's ends: the top of the scale and 0 beside it, the time below. Its label says the same to a screen reader.
function addScale(svg) {
  const chart = element("div", "chart");
  svg.replaceWith(chart);
  chart.append(element("span", "top", NONE), svg, element("span", "zero", "0"));
  chart.append(element("span", "from", `${SPAN_S / 60} min ago`), element("span", "to", "now"));
  for (const label of chart.querySelectorAll("span")) label.setAttribute("aria-hidden", "true");
}

function showQuantiles(id, latency) {
  $(id).replaceChildren(duration(latency.p50), element("small", "", `95 %: ${duration(latency.p95)}`));
}

function showRequests(stats) {
  const hidden = stats.n_requests - stats.requests.length;
  $("n-requests").textContent = hidden > 0 ? `${stats.requests.length} of ${stats.n_requests}` : `${stats.n_requests}`;
  $("requests").replaceChildren(...stats.requests.map((request) => {
    const row = element("tr");
    const isReading = request.phase === "prefill";
    const prompt = whole(request.prompt_tokens);
    const numbers = [
      whole(request.output_tokens), rate(request.tokens_per_s), duration(request.first_token_s), duration(request.age_s),
      isReading ? `${whole(request.prefilled_tokens)} of ${prompt}` : prompt, whole(request.cached_tokens),
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
