// What the page knows: who reads, how the connection is, lists and curves. Views read signals.

import { batch, effect, signal } from "@preact/signals";
import { ApiError, NetworkError, get, listen } from "./api.ts";
import { type Curve, OVERVIEW_NAMES, merge } from "./curves.ts";
import type { ServerEvent } from "./sse.ts";
import type { Lists, Topic } from "./types.ts";

const KEY = "tinsmith.key";
const MAX_PAUSE_S = 15;
const MAX_POINTS = 600;
const SLOW_MS = 4_000;
/** A run that grew to this many points is read anew, in wider buckets. */
const TOO_MANY_POINTS = 4 * MAX_POINTS;

export interface Me {
  project: string;
  role: string;
}

export type Connection =
  | { state: "none" }
  | { state: "connecting"; isSlow: boolean }
  | { state: "live" }
  | { state: "lost"; why: string; retryAtMs: number };

export interface RunCurves {
  width: number;
  revision: number;
  curves: ReadonlyMap<string, Curve>;
  isGone: boolean;
}

/** What a view wants to be kept up to date. */
export interface Watch {
  topics: readonly Topic[];
  runs: readonly string[];
  /** Which metrics of the runs; all if empty. */
  names: readonly string[];
}

export const NOTHING: Watch = { topics: [], runs: [], names: [] };

export const key = signal(sessionStorage.getItem(KEY) ?? "");
export const me = signal<Me | null>(null);
export const loginError = signal("");
export const connection = signal<Connection>({ state: "none" });
export const lists = signal<Partial<{ [T in Topic]: Lists[T] }>>({});
export const listErrors = signal<Partial<Record<Topic, { reason: string; message: string }>>>({});
export const curves = signal<ReadonlyMap<string, RunCurves>>(new Map());
export const now = signal(Date.now());
export const watched = signal<Watch>(NOTHING);

window.setInterval(() => (now.value = Date.now()), 1_000);

/** Takes a key, once the server says whose it is. */
export async function logIn(text: string): Promise<void> {
  const wanted = text.trim();
  loginError.value = "";
  try {
    const found = await get<Me>("/me", wanted);
    sessionStorage.setItem(KEY, wanted);
    batch(() => {
      key.value = wanted;
      me.value = found;
    });
  } catch (error) {
    if (error instanceof ApiError && error.isDenied) logOut();
    loginError.value =
      error instanceof ApiError ? `${error.message} (${error.reason})` : (error as Error).message;
  }
}

/** Forgets the key and all that was read with it. */
export function logOut(): void {
  sessionStorage.removeItem(KEY);
  batch(() => {
    key.value = "";
    me.value = null;
    lists.value = {};
    listErrors.value = {};
    curves.value = new Map();
    connection.value = { state: "none" };
  });
}

function take(event: ServerEvent, names: readonly string[]): void {
  if (event.type === "begin" || event.type === "ping") {
    connection.value = { state: "live" };
  } else if (event.type === "error") {
    const { reason, message } = event["error"] as { reason: string; message: string };
    throw new ApiError(/^(KEY|ROLE)_/.test(reason) ? 401 : 500, reason, message);
  } else if (event.type === "gone") {
    put(event["run"] as string, { width: 0, revision: 0, curves: new Map(), isGone: true });
  } else if (event.type === "curves") {
    takeCurves(event, names);
  } else {
    takeList(event as ServerEvent & { type: Topic });
  }
}

function put(run: string, found: RunCurves): void {
  curves.value = new Map(curves.value).set(run, found);
}

function takeCurves(event: ServerEvent, names: readonly string[]): void {
  const run = event["run"] as string;
  const width = event["bucket_steps"] as number;
  const known = curves.value.get(run);
  const isSame = known !== undefined && known.width === width;
  const merged = new Map(isSame ? known.curves : []);
  for (const update of event["curves"] as Curve[]) {
    merged.set(update.name, merge(merged.get(update.name), update));
  }
  put(run, { width, revision: event["revision"] as number, curves: merged, isGone: false });
  if ([...merged.values()].some((curve) => curve.steps.length > TOO_MANY_POINTS)) {
    forget(run);
    watched.value = { ...watched.value, names };
  }
}

function forget(run: string): void {
  const rest = new Map(curves.value);
  rest.delete(run);
  curves.value = rest;
}

function takeList(event: ServerEvent & { type: Topic }): void {
  const error = event["error"] as { reason: string; message: string } | undefined;
  const errors = { ...listErrors.value };
  delete errors[event.type];
  if (error) errors[event.type] = error;
  batch(() => {
    listErrors.value = errors;
    if (!error) lists.value = { ...lists.value, [event.type]: event["content"] };
  });
}

let lastNames = "";

async function follow(wanted: Watch, signal: AbortSignal): Promise<void> {
  let pauseS = 1;
  while (!signal.aborted) {
    const slow = window.setTimeout(() => {
      if (!signal.aborted && connection.value.state !== "live") {
        connection.value = { state: "connecting", isSlow: true };
      }
    }, SLOW_MS);
    try {
      await listen(
        {
          topic: wanted.topics,
          summary: wanted.topics.includes("runs") ? OVERVIEW_NAMES : [],
          name: wanted.names,
          max_points: MAX_POINTS,
          chart: wanted.runs.map((run) => {
            const known = curves.value.get(run);
            return `${run}:${known?.width ?? 0}:${known?.revision ?? 0}`;
          }),
        },
        key.value,
        signal,
        (event) => {
          pauseS = 1;
          if (!signal.aborted) take(event, wanted.names);
        },
      );
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.isDenied) {
        logOut();
        loginError.value = `${error.message} (${error.reason})`;
        return;
      }
      if (!(error instanceof ApiError || error instanceof NetworkError)) throw error;
      connection.value = { state: "lost", why: error.message, retryAtMs: Date.now() + pauseS * 1_000 };
      await pause(pauseS, signal);
      pauseS = Math.min(pauseS * 2, MAX_PAUSE_S);
    } finally {
      window.clearTimeout(slow);
    }
  }
}

let wake: () => void = () => undefined;

function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = window.setTimeout(resolve, seconds * 1_000);
    wake = () => {
      window.clearTimeout(timer);
      resolve();
    };
    signal.addEventListener("abort", wake);
  });
}

/** Tries to connect at once. */
export function retryNow(): void {
  wake();
}

window.addEventListener("online", retryNow);

/** Keeps one stream open for what is watched, and begins another when that changes. */
export function start(): void {
  if (key.value) void logIn(key.value);
  effect(() => {
    const wanted = watched.value;
    if (me.value === null) return undefined;
    if (wanted.topics.length === 0 && wanted.runs.length === 0) return undefined;
    const names = wanted.names.join("\n");
    // Curves of other metrics have another revision to go on from.
    if (names !== lastNames) {
      lastNames = names;
      queueMicrotask(() => (curves.value = new Map()));
    }
    const abort = new AbortController();
    // Views that follow each other ask once.
    const timer = window.setTimeout(() => {
      if (connection.peek().state !== "live") {
        connection.value = { state: "connecting", isSlow: false };
      }
      void follow(wanted, abort.signal);
    }, 30);
    return () => {
      window.clearTimeout(timer);
      abort.abort();
    };
  });
}
