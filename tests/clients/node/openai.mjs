// node openai.mjs BASE_URL API_KEY CASE   one case with OpenAI's package; prints what came of it as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { followed, getWeather, hi, run } from "./cases.mjs";

const [baseURL, apiKey, name] = process.argv.slice(2);
const model = "fake";
const messages = [{ role: "user", content: hi }];
const client = new OpenAI({ baseURL, apiKey, maxRetries: name === "retry" ? 1 : 0 });
const chat = client.chat.completions;

const weatherTool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

await run(name, {
  create: () => chat.create({ model, messages }),
  retry: () => chat.create({ model, messages }),
  unknownModel: () => chat.create({ model: "none", messages }),

  async stream() {
    const chunks = [];
    const options = { include_usage: true };
    for await (const chunk of await chat.create({ model, messages, stream: true, stream_options: options })) {
      chunks.push(chunk);
    }
    return chunks;
  },

  streamHelper: () => chat.stream({ model, messages }).finalChatCompletion(),

  async runTools() {
    const tool = { ...weatherTool.function, parse: JSON.parse, function: ({ city }) => getWeather(city) };
    const runner = chat.runTools({ model, messages, tools: [{ type: "function", function: tool }] });
    return runner.finalContent();
  },

  async streamTools() {
    const runner = chat.stream({ model, messages, tools: [weatherTool] });
    return (await runner.finalChatCompletion()).choices[0].message.tool_calls;
  },

  async parse() {
    const schema = z.object({ city: z.string(), degrees: z.number() });
    const answer = await chat.parse({ model, messages, response_format: zodResponseFormat(schema, "weather") });
    return answer.choices[0].message.parsed;
  },

  async completion() {
    return (await client.completions.create({ model, prompt: hi })).choices[0].text;
  },

  async models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    return [...ids, (await client.models.retrieve(model)).id];
  },

  async headers() {
    const { data, response, request_id } = await chat.create({ model, messages }).withResponse();
    return [data._request_id, request_id, response.headers.get("x-request-id")];
  },

  async abort() {
    const stream = await chat.create({ model, messages, stream: true, max_tokens: 1e9 });
    return followed(stream, (chunk) => chunk.choices[0].delta.content, () => stream.controller.abort());
  },
});
