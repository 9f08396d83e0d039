// Numbers as people read them.

const STEPS = ["", "k", "M", "G", "T"];

function scaled(value, base, digits) {
  let step = 0;
  while (value >= base && step < STEPS.length - 1) {
    value /= base;
    step += 1;
  }
  const places = step === 0 || value >= 100 ? 0 : value >= 10 ? Math.min(1, digits) : digits;
  const text = value.toFixed(places);
  return [text.includes(".") && Number(text) % 1 === 0 ? text.split(".")[0] : text, STEPS[step]];
}

export function bytes(value) {
  const [number, step] = scaled(value, 1000, 2);
  return `${number} ${step}B`;
}

export const rate = (value) => `${bytes(value)}/s`;

export function count(value) {
  if (value < 10000) return Math.round(value).toLocaleString("en");
  const [number, step] = scaled(value, 1000, 2);
  return number + step;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;

export function seconds(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(1)} s`;
}

export function number(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(3) : value.toFixed(4);
}

export function ago(span) {
  if (span < 5) return "just now";
  if (span < 90) return `${Math.round(span)} s ago`;
  if (span < 5400) return `${Math.round(span / 60)} min ago`;
  return `${Math.round(span / 3600)} h ago`;
}

const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});

export function time(stamp) {
  const moment = new Date(stamp * 1000);
  return Number.isNaN(moment.getTime()) ? "–" : clock.format(moment); // a far-off clock is no time
}
