// Parts that every view uses: states, tables, empty lists, errors.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { connection, listErrors, now } from "./store.ts";
import { age } from "./format.ts";
import type { Topic } from "./types.ts";

type Tone = "good" | "busy" | "wait" | "bad" | "calm";

const TONES: Record<string, Tone> = {
  active: "good",
  running: "good",
  training: "good",
  succeeded: "calm",
  submitted: "calm",
  finished: "calm",
  idle: "calm",
  claimed: "good",
  playing: "good",
  creating: "busy",
  moving: "busy",
  starting: "busy",
  restarting: "busy",
  queued: "wait",
  pending: "wait",
  waiting: "wait",
  suspended: "wait",
  gathering: "wait",
  failed: "bad",
  dead: "bad",
  lost: "bad",
  aborted: "bad",
};

/** A state: a word, and a dot that repeats it. */
export function State({ value, tone }: { value: string; tone?: Tone }) {
  return (
    <span class={`state ${tone ?? TONES[value] ?? "calm"}`}>
      <i aria-hidden="true" />
      {value || "unknown"}
    </span>
  );
}

/** Text of the server: what stands between backticks is code. */
export function Prose({ text }: { text: string }) {
  return <>{text.split("`").map((part, index) => (index % 2 === 1 ? <code key={index}>{part}</code> : part))}</>;
}

/** How long ago something was; the exact time is its title. */
export function Age({ time }: { time: string | undefined }) {
  return time ? (
    <time dateTime={time} title={new Date(time).toLocaleString()}>
      {age(time, now.value)}
    </time>
  ) : (
    <>–</>
  );
}

interface TableProps {
  caption: string;
  heads: readonly (string | { text: string; isNumber?: boolean; isHidden?: boolean })[];
  children: ComponentChildren;
}

export function Table({ caption, heads, children }: TableProps) {
  return (
    <div class="scroll" role="region" aria-label={caption} tabIndex={0}>
      <table>
        <caption class="hidden">{caption}</caption>
        <thead>
          <tr>
            {heads.map((head) => {
              const { text, isNumber, isHidden } =
                typeof head === "string" ? { text: head, isNumber: false, isHidden: false } : head;
              return (
                <th key={text} scope="col" class={isNumber ? "number" : isHidden ? "narrow" : ""}>
                  {isHidden ? <span class="hidden">{text}</span> : text}
                </th>
              );
            })}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** What an empty list says: what it would show, and the command that fills it. */
export function Empty({ title, children, command }: { title: string; children?: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p class="title">{title}</p>
      {children && <p>{children}</p>}
      {command && (
        <pre tabIndex={0}>
          <code>{command}</code>
        </pre>
      )}
    </div>
  );
}

/** What stands in for a list that is not there yet, or cannot be read. */
export function Missing({ topic }: { topic: Topic }) {
  const error = listErrors.value[topic];
  if (error) return <Problem reason={error.reason} message={error.message} />;
  return <Loading />;
}

export function Loading() {
  const [isShown, show] = useState(false);
  useEffect(() => {
    const timer = window.setTimeout(() => show(true), 300);
    return () => window.clearTimeout(timer);
  }, []);
  if (!isShown) return <div class="loading" />;
  const isSlow = connection.value.state === "connecting" && connection.value.isSlow;
  return (
    <p class="loading" role="status">
      {isSlow ? "Still loading: the network or the server is slow." : "Loading…"}
    </p>
  );
}

const WORDS: Record<string, string> = {
  JOBS_DISABLED: "Jobs are off on this server.",
  RUN_NOT_FOUND: "There is no such run, or it is of another project.",
  EPISODE_NOT_FOUND: "There is no such episode, or it is of another project.",
  ROLE_MISSING: "This key may not read that; ask for one with the role viewer.",
};

export function Problem({ reason, message }: { reason: string; message: string }) {
  return (
    <div class="problem" role="alert">
      <p class="title">{WORDS[reason] ?? "This could not be read."}</p>
      <p>
        {message} <code>{reason}</code>
      </p>
    </div>
  );
}

export function Facts({ rows }: { rows: readonly (readonly [string, ComponentChildren])[] }) {
  return (
    <dl class="facts">
      {rows
        .filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false)
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}
