// node read_stream.mjs URL BODY   posts a body and prints the answer as it comes. Anything on stdin aborts the request,
// which prints the error's name; the process then lives on until stdin ends.

const [url, body] = process.argv.slice(2);
const controller = new AbortController();
process.stdin.on("data", () => controller.abort());
try {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(url, { method: "POST", headers, body, signal: controller.signal });
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) process.stdout.write(text);
} catch (error) {
  console.log(error.name);
}
