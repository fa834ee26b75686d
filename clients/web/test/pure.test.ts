import assert from "node:assert/strict";
import { test } from "node:test";
import { type Curve, align, curveFor, CHARTS, groups, merge, smooth } from "../src/curves.ts";
import { age, brief, bytes, count, number, short, stateOf, word } from "../src/format.ts";
import { lineage } from "../src/lineage.ts";
import { EventParser } from "../src/sse.ts";
import { indexLines, label, parseTrajectory, scaleOf, shade, versionsOf } from "../src/trajectory.ts";

function curve(steps: number[], means: (number | null)[]): Curve {
  return { name: "loss", steps, means, minima: means, maxima: means, times: steps };
}

test("newer buckets replace those of the same step and keep the order", () => {
  const merged = merge(curve([0, 2, 4], [1, 2, 3]), curve([2, 6], [9, 4]));
  assert.deepEqual(merged.steps, [0, 2, 4, 6]);
  assert.deepEqual(merged.means, [1, 9, 3, 4]);
  assert.deepEqual(merge(undefined, merged), merged);
  assert.deepEqual(merge(merged, curve([], [])), merged);
  assert.deepEqual(merge(curve([4], [1]), curve([0], [2])).steps, [0, 4]);
});

test("a smoothed line begins at its first value and skips what is missing", () => {
  const line = smooth([2, null, 4], 0.5);
  assert.equal(line[0], 2);
  assert.equal(line[1], null);
  assert.ok(Math.abs((line[2] as number) - 10 / 3) < 1e-12);
  assert.deepEqual(smooth([1, 5], 0), [1, 5]);
});

test("lines share one axis, with holes where they have no point", () => {
  const [xs, first, second] = align([
    { xs: [0, 1], ys: [5, 6] },
    { xs: [1, 2], ys: [7, 8] },
  ]);
  assert.deepEqual(xs, [0, 1, 2]);
  assert.deepEqual(first, [5, 6, null]);
  assert.deepEqual(second, [null, 7, 8]);
});

test("a chart takes the first of its metrics that a run has", () => {
  const loss = CHARTS.find((kind) => kind.key === "loss");
  assert.ok(loss);
  const measured = { ...curve([0], [1]), name: "trainer/loss" };
  assert.equal(curveFor(loss, new Map([["trainer/loss", measured]])), measured);
  assert.equal(curveFor(loss, new Map()), undefined);
});

test("the chart of lengths has what recipes report, before what trainers measure", () => {
  const lengths = CHARTS.find((kind) => kind.key === "length");
  assert.ok(lengths);
  const curves = new Map(["trainer/sequence_length", "response_tokens"].map((name) => [name, { ...curve([0], [1]), name }]));
  assert.equal(curveFor(lengths, curves)?.name, "response_tokens");
});

test("a run that takes operations is told by what goes on in it, another one by its state", () => {
  assert.equal(stateOf({ name: "r", state: "STATE_ACTIVE", activity: "ACTIVITY_FINISHED" }), "finished");
  assert.equal(stateOf({ name: "r", state: "STATE_ACTIVE", activity: "ACTIVITY_IDLE" }), "idle");
  assert.equal(stateOf({ name: "r", state: "STATE_MOVING" }), "moving");
});

test("metrics are grouped by the part before the last slash", () => {
  assert.deepEqual(groups(["b", "trainer/x", "a", "env/all/y"]), [
    ["", ["a", "b"]],
    ["env/all", ["env/all/y"]],
    ["trainer", ["trainer/x"]],
  ]);
});

test("ages, sizes and numbers are short", () => {
  const now = Date.parse("2026-01-02T00:00:00Z");
  assert.equal(age("2026-01-01T23:59:13Z", now), "47s");
  assert.equal(age("2026-01-01T20:30:00Z", now), "3h");
  assert.equal(age("2026-01-09T00:00:00Z", now), "0s");
  assert.equal(age(undefined, now), "");
  assert.equal(bytes(532), "532 B");
  assert.equal(bytes(2_954_991), "3.0 MB");
  assert.equal(number(0.000012), "1.20e-5");
  assert.equal(number(12345), "12,345");
  assert.equal(number(1.23456), "1.235");
  assert.equal(number(null), "–");
  assert.equal(number(Number.NaN), "–");
  assert.equal(count(1, "run"), "1 run");
  assert.equal(count(2000, "run"), "2,000 runs");
  assert.equal(count(2, "match", "matches"), "2 matches");
  assert.equal(short("projects/p/trainingRuns/r/checkpoints/c"), "r/c");
  assert.equal(short("tiny"), "tiny");
  assert.equal(brief("76d1bbae4ddb5cf1b7899107"), "76d1bbae4d…");
  assert.equal(brief("run-1"), "run-1");
  assert.equal(word("POINT_ROLLOUT_END", "POINT_"), "rollout end");
});

test("events come whole, however the text is cut", () => {
  const text = 'event: ping\ndata: {"type":"ping"}\n\nevent: runs\ndata: {"type":"runs","n":1}\n\n: note\n\n';
  for (let cut = 0; cut <= text.length; cut += 1) {
    const parser = new EventParser();
    const found = [...parser.feed(text.slice(0, cut)), ...parser.feed(text.slice(cut))];
    assert.deepEqual(found, [
      { type: "ping" },
      { type: "runs", n: 1 },
    ]);
  }
});

test("a checkpoint descends from its run, and from what this began with", () => {
  const runs = new Map(
    [
      { name: "p/r2", source_checkpoint: "p/r1/checkpoints/a" },
      { name: "p/r1" },
    ].map((run) => [run.name, run]),
  );
  const copy = { name: "p/r3/checkpoints/c", source_checkpoint: "p/r2/checkpoints/b" };
  const saved = new Map([[copy.name, copy]]);
  assert.deepEqual(lineage(copy, saved, runs), ["p/r2/checkpoints/b", "p/r2", "p/r1/checkpoints/a", "p/r1"]);
  const loop = { name: "p/x/checkpoints/c", source_checkpoint: "p/x/checkpoints/c" };
  assert.deepEqual(lineage(loop, new Map([[loop.name, loop]]), runs), []);
});

const ROW = {
  tokens: [5, 6, 7],
  texts: ["a", "\n", "b"],
  mask: [0, 1, 1],
  logprobs: [0, -4, -0.01],
  advantages: [0, -2, 1],
  versions: [0, 3, 4],
  reward: 0.5,
  task: { id: 7 },
};

test("a trajectory is read with its facts, and one without tokens is refused", () => {
  const found = parseTrajectory(ROW);
  assert.equal(found.reward, 0.5);
  assert.deepEqual(found.facts, [["task", '{"id":7}']]);
  assert.equal(label(found, 1), "↵\n");
  const odd = parseTrajectory({ ...ROW, texts: ["bytes:\\xe4", "\u0003", "bytes: 3"] });
  assert.deepEqual([0, 1, 2].map((index) => label(odd, index)), ["\\xe4", "\u2403", "bytes: 3"]);
  assert.deepEqual(versionsOf(found), [3, 4]);
  assert.deepEqual(parseTrajectory({ tokens: [1, 2], mask: [0, 1], advantage: 2 }).advantages, [0, 2]);
  assert.throws(() => parseTrajectory({ reward: 1 }), /tokens/);
  assert.throws(() => parseTrajectory("x"), /object/);
});

test("colours say what was sampled, unlikely, worth it, and of which version", () => {
  const found = parseTrajectory(ROW);
  const by = (name: "mask" | "logprob" | "advantage" | "version") =>
    [0, 1, 2].map((index) => shade(found, name, index, scaleOf(found, name)));
  assert.deepEqual(by("mask"), ["", "q-mask", "q-mask"]);
  assert.deepEqual(by("logprob"), ["", "q-bad-4", ""]);
  assert.deepEqual(by("advantage"), ["", "q-bad-8", "q-good-4"]);
  assert.deepEqual(by("version"), ["", "q-version-0", "q-version-1"]);
});

async function linesOf(file: Blob): Promise<{ ends: number[]; shares: number[] }> {
  const shares: number[] = [];
  let ends: number[] = [];
  for await (const found of indexLines(file)) {
    ends = found.ends;
    shares.push(found.share);
  }
  return { ends, shares };
}

test("lines of a file are found without reading them", async () => {
  assert.deepEqual((await linesOf(new Blob(["ab\ncd\nef"]))).ends, [0, 3, 6, 8]);
  assert.deepEqual((await linesOf(new Blob(["ab\n"]))).ends, [0, 3]);
  assert.deepEqual((await linesOf(new Blob([]))).ends, []);
});

test("the first lines of a long file are there before the last ones", async () => {
  const line = `${"x".repeat(99)}\n`;
  const { ends, shares } = await linesOf(new Blob([line.repeat(100_000)]));
  assert.equal(ends.length, 100_001);
  assert.ok(ends.every((end, index) => end === 100 * index));
  assert.ok((shares[0] as number) < 0.05);
  assert.equal(shares.at(-1), 1);
});
