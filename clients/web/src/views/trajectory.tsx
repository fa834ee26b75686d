// A trajectory, token by token: of an episode, or from a file that the browser opens and keeps.

import { signal } from "@preact/signals";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { ApiError, get } from "../api.ts";
import { brief, count, number, short, word } from "../format.ts";
import { Age, Empty, Facts, Loading, Problem, Prose, State } from "../parts.tsx";
import { link } from "../router.ts";
import { key, NOTHING, watched } from "../store.ts";
import { type ColourBy, type Trajectory, indexLines, label, parseTrajectory, scaleOf, shade, versionsOf } from "../trajectory.ts";
import type { Episode } from "../types.ts";

const CHOICES: readonly (readonly [ColourBy, string])[] = [
  ["mask", "what was sampled"],
  ["logprob", "log-probability"],
  ["advantage", "advantage"],
  ["version", "version"],
];
const colourBy = signal<ColourBy>("mask");
/** How often an episode that is still played is read again. */
const REFRESH_MS = 2_000;
const ENDED = new Set(["STATE_SUBMITTED", "STATE_DEAD", "STATE_CANCELLED"]);

export function EpisodeView({ id }: { id: string }) {
  const [found, setFound] = useState<Episode | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [round, setRound] = useState(0);
  const isOver = found !== null && ENDED.has(found.state ?? "");
  useEffect(() => {
    // The list would cost more than the episode, and says less.
    watched.value = NOTHING;
    const abort = new AbortController();
    get<Episode>(`/episodes/${encodeURIComponent(id)}`, key.value, {}, abort.signal)
      .then(setFound)
      .catch((problem: unknown) => {
        if (problem instanceof ApiError) setError(problem);
      });
    return () => abort.abort();
  }, [id, round]);
  useEffect(() => {
    if (isOver) return undefined;
    const timer = window.setInterval(() => setRound((before) => before + 1), REFRESH_MS);
    return () => window.clearInterval(timer);
  }, [id, isOver]);
  if (error) return <Problem reason={error.reason} message={error.message} />;
  if (!found) return <Loading />;
  const trajectories = (found.trajectories ?? []).map(parseTrajectory);
  return (
    <>
      <p class="crumb">
        <a href={link("episodes")}>Episodes</a>
      </p>
      <h2>
        {brief(short(found.name))} <State value={word(found.state, "STATE_")} />
      </h2>
      <Facts
        rows={[
          ["Episode", <code>{short(found.name)}</code>],
          ["Reward", number(found.outcome?.reward)],
          ["Queue", found.queue],
          ["Task", found.task_id],
          ["Agent", found.client_id],
          ["Attempts", `${found.num_attempts ?? 0} of ${found.max_attempts ?? 0}`],
          ["Waits for", found.waiting_for && <Prose text={found.waiting_for} />],
          ["Registered", <Age time={found.create_time} />],
        ]}
      />
      {(found.failures ?? []).map((failure) => (
        <p key={failure} class="bad">
          {failure}
        </p>
      ))}
      {trajectories.length === 0 && <Empty title="Nothing was said yet">Tokens appear with the first model call of the agent.</Empty>}
      {trajectories.length > 0 && <Colours trajectories={trajectories} />}
      {trajectories.map((trajectory, index) => (
        <TokenView key={index} trajectory={trajectory} title={`Trajectory ${index + 1} of ${trajectories.length}`} />
      ))}
    </>
  );
}

/** A file whose lines are known as far as it was read. */
interface OpenFile {
  file: File;
  ends: readonly number[];
  share: number;
}

const opened = signal<OpenFile | null>(null);

async function open(file: File): Promise<void> {
  opened.value = { file, ends: [0], share: file.size === 0 ? 1 : 0 };
  for await (const found of indexLines(file)) {
    if (opened.value?.file !== file) return;
    opened.value = { file, ...found };
  }
}

export function TrajectoriesView() {
  useEffect(() => {
    watched.value = NOTHING;
  }, []);
  const input = useRef<HTMLInputElement>(null);
  const [isOver, setOver] = useState(false);
  const current = opened.value;
  return (
    <div
      class={isOver ? "drop over" : "drop"}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        const file = event.dataTransfer?.files[0];
        if (file) void open(file);
      }}
    >
      <div class="bar">
        <h2>{current ? current.file.name : "Trajectories"}</h2>
        <span>
          <input
            ref={input}
            id="file"
            class="hidden"
            type="file"
            accept=".jsonl,.json,.ndjson"
            onChange={(event) => {
              const file = event.currentTarget.files?.[0];
              if (file) void open(file);
            }}
          />
          <label for="file" class="button">
            Open a file
          </label>
        </span>
      </div>
      {current ? (
        <FileView current={current} />
      ) : (
        <Empty title="Open a file of trajectories" command="tinsmith run rl data=arithmetic num_steps=50">
          Recipes write what was played as lines of JSON into the folder of their experiment. Choose such a file, or drop it
          here: it stays in this browser and is sent nowhere. Episodes of the server are under{" "}
          <a href={link("episodes")}>Episodes</a>.
        </Empty>
      )}
    </div>
  );
}

function FileView({ current }: { current: OpenFile }) {
  const total = current.ends.length - 1;
  const [index, setIndex] = useState(0);
  const [shown, setShown] = useState<Trajectory | string | null>(null);
  const [begin, end] = [current.ends[index] ?? 0, current.ends[index + 1] ?? 0];
  useEffect(() => setIndex(0), [current.file]);
  useEffect(() => {
    if (end === 0) return undefined;
    let isCurrent = true;
    void current.file
      .slice(begin, end)
      .text()
      .then((text) => {
        let found: Trajectory | string;
        try {
          found = parseTrajectory(JSON.parse(text));
        } catch (problem) {
          found = `Line ${index + 1} is no trajectory: ${(problem as Error).message}`;
        }
        if (isCurrent) setShown(found);
      });
    return () => {
      isCurrent = false;
    };
  }, [current.file, begin, end]);
  const isWhole = current.share === 1;
  if (total === 0) return isWhole ? <Empty title="The file is empty" /> : <Loading />;
  const go = (to: number): void => setIndex(Math.min(Math.max(to, 0), total - 1));
  return (
    <>
      <div class="bar pager">
        <button type="button" onClick={() => go(index - 1)} disabled={index === 0}>
          Previous
        </button>
        <label>
          <span class="hidden">Number of the trajectory</span>
          <input type="number" min={1} max={total} value={index + 1} onChange={(event) => go(Number(event.currentTarget.value) - 1)} />
        </label>
        <span>of {count(total, "line")}{isWhole ? "" : " so far"}</span>
        {!isWhole && <progress aria-label="Reading the file" max={1} value={current.share} />}
        <button type="button" onClick={() => go(index + 1)} disabled={index === total - 1}>
          Next
        </button>
      </div>
      {typeof shown === "string" && <p class="problem">{shown}</p>}
      {shown !== null && typeof shown !== "string" && (
        <>
          <Facts rows={[["Reward", number(shown.reward)], ...shown.facts]} />
          <Colours trajectories={[shown]} />
          <TokenView trajectory={shown} title={`Trajectory ${index + 1}`} />
        </>
      )}
    </>
  );
}

/** What colours the tokens of the trajectories of a view. */
function Colours({ trajectories }: { trajectories: readonly Trajectory[] }) {
  const name = useId();
  const has = (column: "logprobs" | "advantages" | "versions"): boolean => trajectories.some((each) => each[column].length > 0);
  const known = { mask: true, logprob: has("logprobs"), advantage: has("advantages"), version: has("versions") };
  return (
    <fieldset class="colours">
      <legend class="hidden">Colour tokens by</legend>
      {CHOICES.map(([value, text]) => (
        <label key={value} class={known[value] ? "" : "off"}>
          <input type="radio" name={name} value={value} checked={colourBy.value === value} disabled={!known[value]} onChange={() => (colourBy.value = value)} />
          {text}
        </label>
      ))}
    </fieldset>
  );
}

export function TokenView({ trajectory, title }: { trajectory: Trajectory; title: string }) {
  const name = useId();
  const [at, setAt] = useState(0);
  const [isHeld, hold] = useState(false);
  const by = colourBy.value;
  const scale = scaleOf(trajectory, by);
  const length = Math.max(trajectory.tokens.length, trajectory.texts.length);
  const move = (to: number): void => {
    const next = Math.min(Math.max(to, 0), length - 1);
    setAt(next);
    hold(true);
    document.getElementById(`${name}-${next}`)?.scrollIntoView({ block: "nearest" });
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 16, ArrowUp: -16, Home: -length, End: length };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    move(at + step);
  };
  const onPoint = (event: Event): void => {
    const index = (event.target as HTMLElement).dataset["at"];
    if (index !== undefined) setAt(Number(index));
  };
  return (
    <section class="tokens" aria-labelledby={`${name}-title`}>
      <div class="bar">
        <h3 id={`${name}-title`}>
          {title} <small>{count(length, "token")}</small>
        </h3>
        <Key trajectory={trajectory} by={by} scale={scale} />
      </div>
      <div
        class="text"
        tabIndex={0}
        role="textbox"
        aria-readonly="true"
        aria-multiline="true"
        aria-label="Tokens; arrow keys go from one to the next"
        aria-describedby={`${name}-detail`}
        onKeyDown={onKeyDown}
        onPointerOver={isHeld ? undefined : onPoint}
        onClick={onPoint}
      >
        <Tokens name={name} trajectory={trajectory} by={by} scale={scale} at={at} length={length} />
      </div>
      <Detail name={name} trajectory={trajectory} at={at} />
    </section>
  );
}

function Tokens({ name, trajectory, by, scale, at, length }: { name: string; trajectory: Trajectory; by: ColourBy; scale: number; at: number; length: number }) {
  const spans = [];
  for (let index = 0; index < length; index += 1) {
    spans.push(
      <span key={index} id={`${name}-${index}`} data-at={index} class={`${shade(trajectory, by, index, scale)}${index === at ? " at" : ""}`}>
        {label(trajectory, index)}
      </span>,
    );
    if (trajectory.texts.length === 0) spans.push(" ");
  }
  return <>{spans}</>;
}

function Detail({ name, trajectory, at }: { name: string; trajectory: Trajectory; at: number }) {
  const probability = Math.exp(trajectory.logprobs[at] ?? Number.NaN);
  const isSampled = (trajectory.mask[at] ?? 0) > 0;
  return (
    <p id={`${name}-detail`} class="detail" role="status">
      <b>token {at + 1}</b> id {trajectory.tokens[at] ?? "–"} · {isSampled ? "sampled" : "context"}
      {isSampled && trajectory.logprobs.length > 0 && ` · log-probability ${number(trajectory.logprobs[at])} (${(100 * probability).toFixed(1)} %)`}
      {isSampled && trajectory.advantages.length > 0 && ` · advantage ${number(trajectory.advantages[at])}`}
      {isSampled && trajectory.versions.length > 0 && ` · version ${trajectory.versions[at]}`}
    </p>
  );
}

function Key({ trajectory, by, scale }: { trajectory: Trajectory; by: ColourBy; scale: number }) {
  if (by === "mask") return <span class="key"><span class="q-mask">sampled</span> context</span>;
  if (by === "version") {
    return (
      <span class="key">
        {versionsOf(trajectory).slice(0, 6).map((version, index) => (
          <span key={version} class={`q-version-${index}`}>{version}</span>
        ))}
      </span>
    );
  }
  if (by === "logprob") return <span class="key">likely <span class="q-bad-2">–2</span><span class="q-bad-5">–5</span><span class="q-bad-8">–8</span> unlikely</span>;
  return <span class="key"><span class="q-bad-8">{number(-scale)}</span><span>0</span><span class="q-good-8">{number(scale)}</span></span>;
}
