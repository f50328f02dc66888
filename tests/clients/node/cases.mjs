// What the scripts share: the case that is run, and how its outcome, an error too, is printed as one line of JSON.
import process from "node:process";

export const hi = "hi";
export const getWeather = (city) => `12 °C, 🌧 in ${city}`;

export async function run(name, cases) {
  let outcome;
  try {
    outcome = await cases[name]();
  } catch (error) {
    const { message, status, statusCode, code, param, type } = error;
    outcome = { error: error.name, message, status: status ?? statusCode, code, param, type };
  }
  console.log(JSON.stringify(outcome));
  // After an abort the process lives on, so that it is not its end that closes the connection.
  if (name === "abort") for await (const _ of process.stdin);
}

// Reads until there is some text, then aborts; tells what was read.
export async function followed(stream, textOf, abort) {
  for await (const item of stream) {
    const text = textOf(item);
    if (text) {
      abort();
      return text;
    }
  }
  return null;
}
