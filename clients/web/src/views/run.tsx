// One run: what it is, all its curves, its checkpoints and where it comes from.

import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api.ts";
import { Chart } from "../chart.tsx";
import { CHARTS, groups } from "../curves.ts";
import { short, stateOf } from "../format.ts";
import { Age, Empty, Facts, Loading, Problem, Prose, State } from "../parts.tsx";
import { link } from "../router.ts";
import { curves, key, lists, watched } from "../store.ts";
import type { Checkpoint, Run } from "../types.ts";
import { CheckpointTable } from "./checkpoints.tsx";
import { ChartControls, axis, smoothing } from "./runs.tsx";

const ORDER = CHARTS.flatMap((kind) => kind.names);
const HINTS = new Map(CHARTS.flatMap((kind) => kind.names.map((name) => [name, kind.hint] as const)));

/** What every training has comes first. */
function inOrder(names: readonly string[]): string[] {
  const rank = (name: string): number => (ORDER.indexOf(name) + ORDER.length + 1) % (ORDER.length + 1);
  return [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

const UNPLACED = new Set(["STATE_CREATING", "STATE_FAILED"]);

function path(id: string): string {
  return `/runs/${encodeURIComponent(id)}`;
}

export function RunView({ id }: { id: string }) {
  const [found, setFound] = useState<Run | null>(null);
  const [saved, setSaved] = useState<Checkpoint[]>([]);
  const [error, setError] = useState<ApiError | null>(null);
  const [savedError, setSavedError] = useState<ApiError | null>(null);
  useEffect(() => {
    watched.value = { topics: ["runs", "checkpoints"], runs: [id], names: [] };
    const abort = new AbortController();
    setFound(null);
    setSaved([]);
    setError(null);
    get<Run>(path(id), key.value, {}, abort.signal)
      .then(setFound)
      .catch((problem: unknown) => {
        if (problem instanceof ApiError) setError(problem);
      });
    return () => abort.abort();
  }, [id]);

  const live = lists.value.runs?.training_runs?.find((run) => short(run.name) === id);
  const run = found && { ...found, ...live };
  // The list may say that a run is finished no more, by leaving the time out.
  const finished = (live ?? found)?.finish_time;
  // No trainer can be asked about a run that was never placed. What was saved meanwhile shows in
  // the list over all runs, which holds its newest part alone.
  const isPlaced = run !== null && !UNPLACED.has(run.state ?? "");
  const newest = lists.value.checkpoints;
  useEffect(() => {
    if (!isPlaced) return undefined;
    const abort = new AbortController();
    get<{ checkpoints?: Checkpoint[] }>(`${path(id)}/checkpoints`, key.value, {}, abort.signal)
      .then((list) => {
        setSaved(list.checkpoints ?? []);
        setSavedError(null);
      })
      .catch((problem: unknown) => {
        if (problem instanceof ApiError) setSavedError(problem);
      });
    return () => abort.abort();
  }, [id, isPlaced, newest]);
  if (error && !run) return <Problem reason={error.reason} message={error.message} />;
  if (!run) return <Loading />;
  const lora = run.adapter?.lora;
  const known = curves.value.get(id);
  return (
    <>
      <p class="crumb">
        <a href={link("runs")}>Runs</a>
      </p>
      <div class="bar">
        <h2>
          {run.display_name || id} <State value={stateOf(run)} />
        </h2>
        <ChartControls />
      </div>
      {run.replay_diverged && (
        <p class="problem">After a failure, replay gave other bits than the first execution: results before and after may differ.</p>
      )}
      {run.failure && (
        <div class="problem">
          <p class="title">This run could not be placed.</p>
          <p><Prose text={run.failure} /></p>
        </div>
      )}
      <Facts
        rows={[
          ["Run", <code>{id}</code>],
          ["Model", run.base_model],
          ["Trains", lora ? `LoRA, rank ${lora.rank}` : "all weights"],
          ["Created", <Age time={run.create_time} />],
          ["Finished", finished && <Age time={finished} />],
          ["Trainer", run.worker?.replace("workers/", "")],
          ["Waits for", run.waiting_for && <Prose text={run.waiting_for} />],
          ["Began from", run.source_checkpoint && <Origin name={run.source_checkpoint} />],
          ...Object.entries(run.labels ?? {}).slice(0, 12),
        ]}
      />
      <RunCurves id={id} />
      {known && known.curves.size === 0 && run.state !== "STATE_FAILED" && (
        <Empty title="No curves yet" command={'run.log_metrics({"reward": 0.5}, step=0)'}>
          Loss, gradient norm, KL and entropy come with the first optimizer step; your own metrics by:
        </Empty>
      )}
      <section aria-labelledby="saved">
        <h2 id="saved">Checkpoints</h2>
        {savedError && <Problem reason={savedError.reason} message={savedError.message} />}
        {saved.length > 0 && <CheckpointTable checkpoints={saved} />}
        {saved.length === 0 && !savedError && <p class="muted">{isPlaced ? "Nothing saved yet." : "A run that was not placed has none."}</p>}
      </section>
    </>
  );
}

function Origin({ name }: { name: string }) {
  const run = short(name).split("/")[0] ?? "";
  return <a href={link("runs", run)}>{short(name)}</a>;
}

function RunCurves({ id }: { id: string }) {
  const known = curves.value.get(id);
  if (!known) return <Loading />;
  return (
    <>
      {groups(known.curves.keys()).map(([group, names]) => (
        <section key={group} aria-label={group || "Metrics"}>
          <h3>{group || "Metrics"}</h3>
          <div class="charts small">
            {inOrder(names).map((name) => {
              const curve = known.curves.get(name);
              const hint = HINTS.get(name);
              return (
                curve && (
                  <Chart
                    key={name}
                    title={group ? name.slice(group.length + 1) : name}
                    {...(hint ? { hint } : {})}
                    series={[{ label: name, colour: 0, curve }]}
                    smoothing={smoothing.value}
                    axis={axis.value}
                    height={120}
                  />
                )
              );
            })}
          </div>
        </section>
      ))}
    </>
  );
}
