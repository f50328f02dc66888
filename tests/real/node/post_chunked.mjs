// node post_chunked.mjs URL PIECE...   posts a body of unknown length, in pieces; prints the status and the answer.

const [url, ...pieces] = process.argv.slice(2);
const body = new ReadableStream({
  start(controller) {
    for (const piece of pieces) controller.enqueue(new TextEncoder().encode(piece));
    controller.close();
  },
});
const headers = { "Content-Type": "application/json" };
const response = await fetch(url, { method: "POST", headers, body, duplex: "half" });
console.log(response.status);
console.log(await response.text());
