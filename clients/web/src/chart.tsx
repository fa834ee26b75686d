// A chart of one metric over several runs: uPlot on a canvas, and the same in words for readers
// without it.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { type Curve, align, smooth } from "./curves.ts";
import { number } from "./format.ts";

export interface Series {
  label: string;
  /** Which of the colours of runs. */
  colour: number;
  curve: Curve;
}

export type Axis = "step" | "time";

interface Props {
  title: string;
  hint?: string;
  series: readonly Series[];
  smoothing: number;
  axis: Axis;
  height?: number;
}

export const NUM_COLOURS = 8;
const SYNC = uPlot.sync("step");
const FEW_POINTS = 12;
/** Between marks of the axis of steps and seconds: whole numbers alone. */
const INCREMENTS = [...Array(15).keys()].flatMap((power) => [1, 2, 5, 25].map((digits) => digits * 10 ** power)).sort((a, b) => a - b);

function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function columns(props: Props): uPlot.AlignedData {
  return align(
    props.series.map(({ curve }) => {
      const begin = curve.times.find((time) => time !== null) ?? 0;
      const xs = props.axis === "step" ? curve.steps : curve.times.map((time) => (time ?? begin) - begin);
      return { xs, ys: smooth(curve.means, props.smoothing) };
    }),
  ) as uPlot.AlignedData;
}

/** The range of steps; a single one stands in the middle. */
function xRange(plot: uPlot, min: number, max: number): [number, number] {
  const [only, second] = plot.data[0] ?? [];
  return only !== undefined && second === undefined ? [only - 1, only + 1] : [min, max];
}

function options(
  props: Props,
  width: number,
  height: number,
  onPoint: (index: number | null) => void,
): uPlot.Options {
  const faint = { stroke: style("--muted"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
  const font = `11px ${style("--sans")}`;
  const xValues = (_: uPlot, values: number[]): string[] =>
    values.map((value) => (value < 0 ? "" : props.axis === "step" ? compact(value) : duration(value)));
  return {
    width,
    height,
    padding: [8, 14, 0, 0],
    cursor: { sync: { key: SYNC.key, setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { show: false },
    scales: { x: { time: false, range: xRange } },
    axes: [
      { ...faint, font, size: 24, space: 40, values: xValues, incrs: INCREMENTS },
      { ...faint, font, size: 52, space: 22, values: (_: uPlot, values: number[]) => values.map(compact) },
    ],
    series: [
      {},
      ...props.series.map(({ label, colour }) => ({
        label,
        stroke: style(`--run-${colour % NUM_COLOURS}`),
        width: 1.5,
        spanGaps: true,
        // A line needs two points; where a run has just begun there is only the first.
        points: { show: (plot: uPlot) => (plot.data[0]?.length ?? 0) <= FEW_POINTS, size: 5 },
      })),
    ],
    hooks: { setCursor: [(plot: uPlot) => onPoint(plot.cursor.idx ?? null)] },
  };
}

/** The values at a point, in the colours of their lines; the last ones if there is no point. */
function ReadOut({ props, point }: { props: Props; point: number | null }) {
  const data = point === null ? null : columns(props);
  const x = point === null ? undefined : data?.[0][point];
  return (
    <span class="readout">
      {x !== undefined && <span>{props.axis === "step" ? compact(x) : duration(x)}</span>}
      {props.series.map(({ label, colour, curve }, line) => {
        const value =
          x !== undefined && point !== null
            ? data?.[line + 1]?.[point]
            : curve.means.findLast((each) => each !== null);
        return (
          <span key={label + colour} class={`ink-${colour % NUM_COLOURS}`}>
            {number(value)}
          </span>
        );
      })}
    </span>
  );
}

function compact(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return `${+value.toFixed(4)}`;
}

function duration(seconds: number): string {
  if (seconds >= 7200) return `${(seconds / 3600).toFixed(1)}h`;
  return seconds >= 120 ? `${(seconds / 60).toFixed(1)}m` : `${Math.round(seconds)}s`;
}

function describe(props: Props): string {
  const lines = props.series.map(({ label, curve }) => {
    const values = curve.means.filter((value): value is number => value !== null);
    const last = curve.steps[curve.steps.length - 1] ?? 0;
    return `${label}: from ${number(values[0])} to ${number(values[values.length - 1])} at step ${last}`;
  });
  return `${props.title}. ${lines.join("; ")}`;
}

/** A chart in a figure with its title and last values. */
export function Chart(props: Props) {
  const place = useRef<HTMLDivElement>(null);
  const [point, setPoint] = useState<number | null>(null);
  const plot = useRef<uPlot | null>(null);
  const shape = `${props.axis} ${props.series.map((each) => `${each.label}:${each.colour}`).join(" ")}`;
  const height = props.height ?? 150;

  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    let drawn: uPlot | null = null;
    const draw = (): void => {
      drawn?.destroy();
      drawn = new uPlot(options(props, element.clientWidth || 300, height, setPoint), columns(props), element);
      plot.current = drawn;
      SYNC.sub(drawn);
    };
    draw();
    const resize = new ResizeObserver(() => {
      if (drawn && element.clientWidth > 0 && element.clientWidth !== drawn.width) {
        drawn.setSize({ width: element.clientWidth, height });
      }
    });
    resize.observe(element);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    theme.addEventListener("change", draw);
    return () => {
      resize.disconnect();
      theme.removeEventListener("change", draw);
      if (drawn) SYNC.unsub(drawn);
      drawn?.destroy();
      plot.current = null;
    };
  }, [shape, height]);

  useEffect(() => {
    plot.current?.setData(columns(props));
  }, [shape, props.smoothing, ...props.series.map((each) => each.curve)]);

  return (
    <figure class="chart">
      <figcaption>
        <span class="title" title={props.hint}>
          {props.title}
        </span>
        <ReadOut props={props} point={point} />
      </figcaption>
      <div class="plot" ref={place} role="img" aria-label={describe(props)} />
      {props.hint && <p class="hint">{props.hint}</p>}
    </figure>
  );
}
