// node ai.mjs BASE_URL API_KEY CASE   one case with Vercel's AI SDK; prints what came of it as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

import { followed, getWeather, hi, run } from "./cases.mjs";

const [baseURL, apiKey, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "mlx-serve",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ask = { model: provider("fake"), prompt: hi, maxRetries: name === "retry" ? 1 : 0 };
const schema = z.object({ city: z.string(), degrees: z.number() });
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: ({ city }) => getWeather(city),
  }),
};
const stopWhen = stepCountIs(3);

async function told(result) {
  const { text, reasoningText, finishReason, usage, steps } = result;
  const calls = (await steps).flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
  return {
    text: await text,
    reasoning: await reasoningText,
    finish: await finishReason,
    usage: await usage,
    calls,
  };
}

async function streamed(options) {
  const result = streamText({ ...ask, ...options, onError() {} });
  const kinds = [];
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    kinds.push(part.type);
  }
  return { ...(await told(result)), kinds };
}

await run(name, {
  generateText: async () => told(await generateText(ask)),
  retry: async () => told(await generateText(ask)),
  unknownModel: () => generateText({ ...ask, model: provider("none") }),
  streamUnknownModel: () => streamed({ model: provider("none") }),
  streamText: () => streamed({}),
  tools: async () => told(await generateText({ ...ask, tools, stopWhen })),
  streamTools: () => streamed({ tools, stopWhen }),
  requiredTool: async () => told(await generateText({ ...ask, tools, toolChoice: "required" })),
  generateObject: async () => (await generateObject({ ...ask, schema })).object,
  output: async () => (await generateText({ ...ask, output: Output.object({ schema }) })).output,

  async streamObject() {
    const result = streamObject({ ...ask, schema });
    for await (const _ of result.partialObjectStream);
    return result.object;
  },

  async completion() {
    return (await generateText({ ...ask, model: provider.completionModel("fake"), maxOutputTokens: 4 })).text;
  },

  async abort() {
    const controller = new AbortController();
    const result = streamText({ ...ask, abortSignal: controller.signal, onError() {} });
    return followed(result.textStream, (text) => text, () => controller.abort());
  },
});
