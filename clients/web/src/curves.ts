// Curves: put together from what the server draws (run_metrics/blocks.py), smoothed, and laid over each other.

/** One metric over steps, in columns; see `MetricCurve` of the contract. */
export interface Curve {
  name: string;
  steps: number[];
  means: (number | null)[];
  minima: (number | null)[];
  maxima: (number | null)[];
  times: (number | null)[];
}

/** What a chart shows: the first of its metrics that a run has. */
export interface ChartKind {
  key: string;
  title: string;
  names: readonly string[];
  /** How it is read, in a sentence. */
  hint: string;
}

export const CHARTS: readonly ChartKind[] = [
  {
    key: "reward",
    title: "Reward",
    names: ["reward", "env/all/reward/total", "validation_reward", "validation"],
    hint: "Mean reward of the step's episodes; it should rise, in waves.",
  },
  {
    key: "loss",
    title: "Loss",
    names: ["loss", "trainer/loss"],
    hint: "Loss per trained token. In reinforcement learning it says little: look at reward and KL.",
  },
  {
    key: "kl",
    title: "KL",
    names: ["kl", "trainer/kl_v1", "optim/kl_sample_train_v1"],
    hint: "Distance of the trained from the sampling policy; a spike is a step too large or stale samples.",
  },
  {
    key: "entropy",
    title: "Entropy",
    names: ["entropy", "trainer/entropy"],
    hint: "Mean surprise of sampled tokens; near zero the policy no longer explores.",
  },
  {
    key: "length",
    title: "Length",
    names: ["response_tokens", "response_length", "tokens_per_turn", "env/all/ac_tokens_per_turn", "trainer/sequence_length"],
    hint: "Tokens of a response or sequence; a steady climb to the limit is a blow-up.",
  },
  {
    key: "grad_norm",
    title: "Gradient norm",
    names: ["grad_norm", "trainer/grad_norm"],
    hint: "Before clipping; zero teaches nothing, spikes say that the rate is too high.",
  },
];

/** The metrics that the overview needs. */
export const OVERVIEW_NAMES: readonly string[] = CHARTS.flatMap((chart) => chart.names);

/** Return a curve with newer buckets put over those that begin at the same step. */
export function merge(known: Curve | undefined, update: Curve): Curve {
  if (known === undefined || known.steps.length === 0) return update;
  const first = update.steps[0];
  if (first === undefined) return known;
  const merged: Curve = { name: known.name, steps: [], means: [], minima: [], maxima: [], times: [] };
  const push = (from: Curve, index: number): void => {
    merged.steps.push(from.steps[index] as number);
    for (const column of ["means", "minima", "maxima", "times"] as const) {
      merged[column].push(from[column][index] ?? null);
    }
  };
  let at = 0;
  for (let index = 0; index < update.steps.length; index += 1) {
    const step = update.steps[index] as number;
    while (at < known.steps.length && (known.steps[at] as number) < step) push(known, at++);
    if (known.steps[at] === step) at += 1;
    push(update, index);
  }
  while (at < known.steps.length) push(known, at++);
  return merged;
}

/** Return an exponential mean, without the pull towards zero at its beginning. */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** One line of a chart. */
export interface Line {
  xs: readonly number[];
  ys: readonly (number | null)[];
}

/** Return lines over one common axis; null where a line has no point. */
export function align(lines: readonly Line[]): [number[], ...(number | null)[][]] {
  const xs = [...new Set(lines.flatMap((line) => [...line.xs]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns = lines.map((line) => {
    const column = new Array<number | null>(xs.length).fill(null);
    line.xs.forEach((x, index) => {
      column[place.get(x) as number] = line.ys[index] ?? null;
    });
    return column;
  });
  return [xs, ...columns];
}

/** Return the curve that a run has for a chart. */
export function curveFor(kind: ChartKind, curves: ReadonlyMap<string, Curve>): Curve | undefined {
  const name = kind.names.find((each) => curves.has(each));
  return name === undefined ? undefined : curves.get(name);
}

/** Return metrics by the part of their name before the last slash, those without one first. */
export function groups(names: Iterable<string>): [string, string[]][] {
  const found = new Map<string, string[]>();
  for (const name of [...names].sort()) {
    const group = name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "";
    found.set(group, [...(found.get(group) ?? []), name]);
  }
  return [...found].sort(([a], [b]) => a.localeCompare(b));
}
