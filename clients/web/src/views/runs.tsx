// Runs: curves of the chosen ones over each other, and the list to choose from.

import { signal, useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { get } from "../api.ts";
import { type Axis, Chart, NUM_COLOURS, type Series } from "../chart.tsx";
import { CHARTS, OVERVIEW_NAMES, type ChartKind, curveFor } from "../curves.ts";
import { count, number, short, stateOf } from "../format.ts";
import { Age, Empty, Missing, Prose, State, Table } from "../parts.tsx";
import { link } from "../router.ts";
import { curves, key, lists, watched } from "../store.ts";
import type { Lists, Run } from "../types.ts";

const MAX_CHOSEN = NUM_COLOURS;
const FIRST_CHOSEN = 4;

/** Runs in the charts, each at the place of its colour; null until the first list is there. */
const chosen = signal<(string | null)[] | null>(null);
export const smoothing = signal(0);
export const axis = signal<Axis>("step");

const older = signal<{ runs: Run[]; token: string | null }>({ runs: [], token: null });

function modelOf(run: Run): string {
  const rank = run.adapter?.lora?.rank;
  return `${run.base_model ?? ""}${rank ? `, LoRA ${rank}` : run.adapter?.full ? ", full" : ""}`;
}

function lastOf(run: Run, chart: string): { value: number | null; step: number; time: string } | undefined {
  const names = CHARTS.find((kind) => kind.key === chart)?.names ?? [];
  const metric = names.map((name) => run.metrics?.[name]).find((each) => each !== undefined);
  return metric && { value: metric.last_value, step: metric.last_step, time: metric.update_time };
}

export function activityOf(run: Run): { step: number | null; time: string | undefined } {
  const all = Object.values(run.metrics ?? {});
  if (all.length === 0) return { step: null, time: run.create_time };
  const time = all.map((each) => each.update_time).sort().at(-1);
  return { step: Math.max(...all.map((each) => each.last_step)), time };
}

function toggle(run: string): void {
  const places = [...(chosen.value ?? [])];
  const at = places.indexOf(run);
  if (at >= 0) places[at] = null;
  else {
    const free = places.indexOf(null);
    places[free >= 0 ? free : places.length] = run;
  }
  chosen.value = places;
}

export function RunsView() {
  const filter = useSignal("");
  const first = lists.value.runs?.training_runs ?? [];
  const names = new Set(first.map((run) => run.name));
  const runs = [...first, ...older.value.runs.filter((run) => !names.has(run.name))];
  const token = older.value.token ?? lists.value.runs?.next_page_token ?? "";

  useEffect(() => {
    if (chosen.value !== null || first.length === 0) return;
    const withCurves = first.filter((run) => Object.keys(run.metrics ?? {}).length > 0);
    chosen.value = withCurves.slice(0, FIRST_CHOSEN).map((run) => short(run.name));
  }, [first.length]);

  const places = chosen.value ?? [];
  const shown = places.filter((run): run is string => run !== null);
  useEffect(() => {
    watched.value = { topics: ["runs"], runs: shown, names: OVERVIEW_NAMES };
  }, [shown.join(" ")]);

  if (lists.value.runs === undefined) return <Missing topic="runs" />;
  if (runs.length === 0) {
    return (
      <Empty
        title="No runs yet"
        command="tinsmith run supervised data=pig_latin base_model=tiny num_steps=200"
      >
        A run appears as soon as it is created, by a recipe, a job, the SDK or a program for the tinker SDK. In another
        terminal:
      </Empty>
    );
  }
  const wanted = filter.value.trim().toLowerCase();
  const found = runs.filter((run) =>
    `${run.name} ${run.display_name ?? ""} ${run.base_model ?? ""} ${stateOf(run)}`.toLowerCase().includes(wanted),
  );

  const more = async (): Promise<void> => {
    const page = await get<Lists["runs"]>("/runs", key.value, {
      page_size: 100,
      page_token: token,
      summary: OVERVIEW_NAMES,
    });
    older.value = {
      runs: [...older.value.runs, ...(page.training_runs ?? [])],
      token: page.next_page_token ?? "",
    };
  };

  return (
    <>
      <Curves runs={runs} places={places} />
      <section aria-labelledby="list-of-runs">
        <div class="bar">
          <h2 id="list-of-runs">{count(runs.length, "run")}{token ? ", the newest" : ""}</h2>
          <label class="filter">
            <span class="hidden">Filter runs</span>
            <input
              type="search"
              placeholder="Filter by name, model, state"
              value={filter.value}
              onInput={(event) => (filter.value = event.currentTarget.value)}
            />
          </label>
        </div>
        <Table
          caption="Runs, newest first"
          heads={[
            { text: "In charts", isHidden: true },
            "Run",
            "State",
            { text: "Step", isNumber: true },
            { text: "Reward", isNumber: true },
            { text: "Loss", isNumber: true },
            { text: "KL", isNumber: true },
            "Model",
            { text: "Updated", isNumber: true },
          ]}
        >
          {found.map((run) => (
            <RunRow key={run.name} run={run} colour={places.indexOf(short(run.name))} isFull={shown.length >= MAX_CHOSEN} />
          ))}
        </Table>
        {found.length === 0 && <p class="muted">No run matches “{filter.value}”{token ? " among those that are loaded" : ""}.</p>}
        {token && (
          <button type="button" class="quiet" onClick={() => void more()}>
            Load older runs
          </button>
        )}
      </section>
    </>
  );
}

function RunRow({ run, colour, isFull }: { run: Run; colour: number; isFull: boolean }) {
  const id = short(run.name);
  const activity = activityOf(run);
  const isChosen = colour >= 0;
  return (
    <tr class={isChosen ? "chosen" : ""}>
      <td>
        <input
          type="checkbox"
          class={isChosen ? `swatch run-${colour % NUM_COLOURS}` : "swatch"}
          checked={isChosen}
          disabled={!isChosen && isFull}
          aria-label={`Show ${id} in the charts`}
          onChange={() => toggle(id)}
        />
      </td>
      <th scope="row">
        <a href={link("runs", id)}>{run.display_name || id}</a>
        {run.display_name && <small>{id}</small>}
      </th>
      <td>
        <State value={stateOf(run)} />
        {run.waiting_for && <small>waits for <Prose text={run.waiting_for} /></small>}
        {run.replay_diverged && <small class="bad">replay diverged</small>}
      </td>
      <td class="number">{number(activity.step)}</td>
      <td class="number">{number(lastOf(run, "reward")?.value)}</td>
      <td class="number">{number(lastOf(run, "loss")?.value)}</td>
      <td class="number">{number(lastOf(run, "kl")?.value)}</td>
      <td>{modelOf(run)}</td>
      <td class="number">
        <Age time={activity.time} />
      </td>
    </tr>
  );
}

function Curves({ runs, places }: { runs: readonly Run[]; places: readonly (string | null)[] }) {
  const labels = new Map(runs.map((run) => [short(run.name), run.display_name || short(run.name)]));
  const known = curves.value;
  const charts = useMemo(
    () =>
      CHARTS.map((kind): [ChartKind, Series[]] => [
        kind,
        places.flatMap((run, colour) => {
          const curve = run === null ? undefined : curveFor(kind, known.get(run)?.curves ?? new Map());
          return run === null || !curve ? [] : [{ label: labels.get(run) ?? run, colour, curve }];
        }),
      ]),
    [known, places],
  ).filter(([, series]) => series.length > 0);
  const shown = places.filter((run) => run !== null);
  if (charts.length === 0) {
    return (
      <p class="muted note">
        {shown.length > 0
          ? "The chosen runs have no curves yet: the first step brings them."
          : "Tick runs below to lay their curves over each other."}
      </p>
    );
  }
  return (
    <section aria-label="Curves">
      <div class="bar">
        <ul class="legend" aria-label="Runs in the charts">
          {places.map((run, colour) =>
            run === null ? null : (
              <li key={run}>
                <i class={`line run-${colour % NUM_COLOURS}`} aria-hidden="true" />
                {labels.get(run) ?? run}
              </li>
            ),
          )}
        </ul>
        <ChartControls />
      </div>
      <div class="charts">
        {charts.map(([kind, series]) => (
          <Chart key={kind.key} title={kind.title} hint={kind.hint} series={series} smoothing={smoothing.value} axis={axis.value} />
        ))}
      </div>
    </section>
  );
}

export function ChartControls() {
  return (
    <div class="controls">
      <label>
        Smooth
        <input
          type="range"
          min="0"
          max="0.98"
          step="0.02"
          value={smoothing.value}
          onInput={(event) => (smoothing.value = Number(event.currentTarget.value))}
        />
      </label>
      <label>
        Over
        <select value={axis.value} onChange={(event) => (axis.value = event.currentTarget.value as Axis)}>
          <option value="step">steps</option>
          <option value="time">time</option>
        </select>
      </label>
    </div>
  );
}
