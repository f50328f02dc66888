// Numbers as people read them.

export const NONE = "–";
const format = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => format.format(value);

export function rate(value) {
  return value === null || value === undefined ? NONE : value.toFixed(value < 100 ? 1 : 0);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(n) {
  if (!n) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log2(n) / 10));
  return `${(n / 2 ** (10 * step)).toFixed(step > 1 ? 1 : 0)} ${units[step]}`;
}
