// Trajectories: sequences of tokens with what is known of each, from a file or from the server.

/** A sequence, in columns by token; empty columns are unknown. */
export interface Trajectory {
  tokens: number[];
  texts: string[];
  mask: number[];
  logprobs: number[];
  advantages: number[];
  versions: number[];
  reward: number | null;
  /** Other fields that are worth a line: task, group, why it ended. */
  facts: [string, string][];
}

export type ColourBy = "mask" | "logprob" | "advantage" | "version";

const COLUMNS = new Set(["tokens", "texts", "mask", "logprobs", "advantages", "versions", "reward"]);
const NAMES: Record<string, readonly string[]> = {
  tokens: ["tokens", "token_ids"],
  texts: ["texts", "token_texts", "pieces"],
  mask: ["mask", "loss_mask", "weights"],
  logprobs: ["logprobs", "log_probs"],
  advantages: ["advantages"],
  versions: ["versions"],
};
const MAX_FACT = 400;

/** Returns a trajectory, or throws an error that says what is missing. */
export function parseTrajectory(value: unknown): Trajectory {
  if (typeof value !== "object" || value === null) throw new Error("not a JSON object");
  const row = value as Record<string, unknown>;
  const column = (name: string): unknown[] => {
    const found = (NAMES[name] ?? []).map((each) => row[each]).find(Array.isArray);
    return found ?? [];
  };
  const numbers = (name: string): number[] => column(name).map((each) => Number(each ?? Number.NaN));
  const tokens = numbers("tokens");
  const texts = column("texts").map(String);
  const length = Math.max(tokens.length, texts.length);
  // A play that failed before it began has a failure alone.
  if (length === 0 && !row["failure"]) throw new Error("it has no `tokens`");
  const wide = (values: number[]): number[] =>
    values.length === 1 && length > 1 ? new Array<number>(length).fill(values[0] as number) : values;
  const advantage = row["advantage"];
  const advantages = column("advantages").length > 0 || typeof advantage !== "number"
    ? numbers("advantages")
    : numbers("mask").map((each) => (each > 0 ? advantage : 0));
  const facts = Object.entries(row)
    .filter(([name, each]) => !COLUMNS.has(name) && !Array.isArray(each) && each !== null && each !== "")
    .map(([name, each]): [string, string] => [
      name,
      (typeof each === "object" ? JSON.stringify(each) : String(each)).slice(0, MAX_FACT),
    ]);
  return {
    tokens,
    texts,
    mask: wide(numbers("mask")),
    logprobs: wide(numbers("logprobs")),
    advantages: wide(advantages),
    versions: wide(numbers("versions")),
    reward: typeof row["reward"] === "number" ? row["reward"] : null,
    facts,
  };
}

/** Returns the class of a token: a hue and one of nine depths, so that themes decide the colour. */
export function shade(trajectory: Trajectory, by: ColourBy, index: number, scale: number): string {
  const isSampled = (trajectory.mask[index] ?? 0) > 0;
  if (by === "mask") return isSampled ? "q-mask" : "";
  if (by === "version") {
    if (!isSampled) return "";
    const known = versionsOf(trajectory);
    return `q-version-${known.indexOf(trajectory.versions[index] ?? 0) % 6}`;
  }
  if (!isSampled) return "";
  const value = (by === "logprob" ? trajectory.logprobs : trajectory.advantages)[index];
  if (value === undefined || !Number.isFinite(value) || scale === 0) return "";
  const depth = Math.min(8, Math.round((Math.abs(value) / scale) * 8));
  if (depth === 0) return "";
  return by === "logprob" ? `q-bad-${depth}` : `q-${value > 0 ? "good" : "bad"}-${depth}`;
}

/** Returns the value that has the deepest colour. */
export function scaleOf(trajectory: Trajectory, by: ColourBy): number {
  if (by === "logprob") return 8;
  const values = trajectory.advantages.filter(Number.isFinite).map(Math.abs);
  return by === "advantage" ? values.reduce((a, b) => Math.max(a, b), 0) : 1;
}

/** Returns the versions that sampled, ascending. */
export function versionsOf(trajectory: Trajectory): number[] {
  const sampled = trajectory.versions.filter((_, index) => (trajectory.mask[index] ?? 0) > 0);
  return [...new Set(sampled)].sort((a, b) => a - b);
}

/** Returns what a token says, with marks for what cannot be seen. */
export function label(trajectory: Trajectory, index: number): string {
  const text = trajectory.texts[index];
  if (text === undefined) return `${trajectory.tokens[index]}`;
  // A part of a character comes as `bytes:\\xe4`. Control characters have pictures of their own.
  return text
    .replace(/^bytes:(?=\\x)/, "")
    .replaceAll("\n", "↵\n")
    .replaceAll("\t", "⇥\t")
    .replace(/[\0-\x08\x0b-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)));
}

const FIRST_PIECE = 2 ** 18;
const PIECE = 8 * 2 ** 20;

/** Yields where the lines of a file begin, and the last ends, as far as it was read: one list that grows.
 *
 * What is in the lines is not looked at. The first piece is small, so that there is soon something to show.
 */
export async function* indexLines(file: Blob): AsyncGenerator<{ ends: number[]; share: number }> {
  const ends: number[] = [0];
  let end = 0;
  for (let begin = 0; begin < file.size; begin = end) {
    end = Math.min(begin + (begin === 0 ? FIRST_PIECE : PIECE), file.size);
    const piece = new Uint8Array(await file.slice(begin, end).arrayBuffer());
    for (let at = piece.indexOf(10); at >= 0; at = piece.indexOf(10, at + 1)) ends.push(begin + at + 1);
    if (end === file.size && ends[ends.length - 1] !== end) ends.push(end);
    yield { ends, share: end / file.size };
  }
}
