// The geometry of the charts: scales that people can read, and lines with a gap where nothing was heard. No document.

export const SPAN_S = 120;
// Two points further apart than this have no line between them.
const GAP_S = 5;

// The next "round" number at or above a value: 1, 2 or 5 times a power of ten, or of two for bytes.
export function scaleTop(value, isBinary = false) {
  if (value <= 0) return isBinary ? 2 ** 20 : 1;
  if (isBinary) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// The points {at, value} of the last SPAN_S seconds as polylines in a box of 240 x 60.
export function lines(points, now, top) {
  const found = [];
  let latest = -Infinity;
  for (const { at, value } of points) {
    if (at < now - SPAN_S) continue;
    if (at - latest > GAP_S) found.push([]);
    latest = at;
    const x = 240 * (1 - (now - at) / SPAN_S);
    found.at(-1).push(`${x.toFixed(1)},${(58 - (56 * value) / top).toFixed(1)}`);
  }
  return found.map((line) => line.join(" "));
}

// Output tokens per second over the last polls [{at, tokens}], by the server's clock; null before there are two.
export function speedOf(polls) {
  if (polls.length < 2) return null;
  const [first, last] = [polls[0], polls.at(-1)];
  return last.at > first.at ? (last.tokens - first.tokens) / (last.at - first.at) : null;
}
