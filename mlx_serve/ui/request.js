// The body of a chat request, and the same request as a command for a shell. Knows no document.

// The text of "more fields" as an object. Raises SyntaxError when it is none.
export function moreFields(text) {
  if (!text.trim()) return {};
  const value = JSON.parse(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new SyntaxError("not a JSON object");
  return value;
}

// ``settings``: {system, temperature, maxTokens, more}, all text as it was typed. Raises SyntaxError.
export function requestBody(settings, model, turns) {
  const more = moreFields(settings.more);
  const system = settings.system.trim();
  const messages = turns.map(({ role, content }) => ({ role, content }));
  const body = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  if (model) body.model = model;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
  return { ...body, ...more, stream: true, stream_options: { include_usage: true } };
}

export function asCurl(body, url, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const secret = hasKey ? ' \\\n  -H "Authorization: Bearer $MLX_SERVE_API_KEY"' : "";
  const json = quoted(JSON.stringify(body));
  return `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${secret} \\\n  -d ${json}`;
}
