// A stream of server-sent events as JSON objects. Comments, which only keep the connection open, are skipped.

// Raises Interrupted when the stream ends before its own end, and whatever reading raises.
export class Interrupted extends Error {}

export async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await read(reader);
    if (done) throw new Interrupted("the stream ended before its end");
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Interrupted(error.message);
  }
}
