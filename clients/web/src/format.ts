// How numbers, times and names are written, the same on every view.

import type { Run } from "./types.ts";

const UNITS: readonly (readonly [number, string])[] = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "m"],
];

/** Return how long ago a time was, as one number with its unit. */
export function age(iso: string | undefined, nowMs: number): string {
  if (!iso) return "";
  const seconds = Math.max(0, (nowMs - Date.parse(iso)) / 1000);
  for (const [size, unit] of UNITS) {
    if (seconds >= size) return `${Math.floor(seconds / size)}${unit}`;
  }
  return `${Math.floor(seconds)}s`;
}

/** Return a size in bytes with the unit that leaves one to three digits before the point. */
export function bytes(size: number): string {
  let value = size;
  for (const unit of ["B", "KB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return "";
}

/** Return a value of a metric with about four digits. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** Return a resource name without its project: `run-1`, or `run-1/final` of a checkpoint. */
export function short(name: string): string {
  const parts = name.split("/");
  return parts[0] === "projects" && parts.length > 3
    ? parts.filter((_, index) => index >= 3 && index % 2 === 1).join("/")
    : name;
}

/** Return an id as people tell it from others: one that was drawn, by its first digits. */
export function brief(id: string): string {
  return /^[0-9a-f]{20,}$/.test(id) ? `${id.slice(0, 10)}…` : id;
}

/** Return a value of an enum as a word: `STATE_ACTIVE` is `active`. */
export function word(value: string | undefined, prefix: string): string {
  return (value ?? "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
}

/** Return what goes on in a run; its state where that is not said, as of one that was not placed. */
export function stateOf(run: Run): string {
  return run.activity ? word(run.activity, "ACTIVITY_") : word(run.state, "STATE_");
}

/** Return a count with its noun. */
export function count(amount: number, noun: string, nouns = `${noun}s`): string {
  return `${amount.toLocaleString("en-US")} ${amount === 1 ? noun : nouns}`;
}
