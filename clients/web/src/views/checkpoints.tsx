// Checkpoints, each with what it descends from.

import { useEffect } from "preact/hooks";
import { bytes, count, number, short, word } from "../format.ts";
import { lineage } from "../lineage.ts";
import { Age, Empty, Missing, Table } from "../parts.tsx";
import { link } from "../router.ts";
import { lists, watched } from "../store.ts";
import type { Checkpoint } from "../types.ts";

export function CheckpointsView() {
  useEffect(() => {
    watched.value = { topics: ["checkpoints", "runs"], runs: [], names: [] };
  }, []);
  const list = lists.value.checkpoints;
  if (!list) return <Missing topic="checkpoints" />;
  const checkpoints = list.checkpoints ?? [];
  if (checkpoints.length === 0) {
    return (
      <Empty title="No checkpoints yet" command={'run.save_state("first").result()'}>
        A recipe saves one at its end; a loop of your own by:
      </Empty>
    );
  }
  return (
    <>
      <h2>{count(checkpoints.length, "checkpoint")}</h2>
      <CheckpointTable checkpoints={checkpoints} />
    </>
  );
}

export function CheckpointTable({ checkpoints }: { checkpoints: readonly Checkpoint[] }) {
  const saved = new Map([...(lists.value.checkpoints?.checkpoints ?? []), ...checkpoints].map((each) => [each.name, each]));
  const runs = new Map((lists.value.runs?.training_runs ?? []).map((run) => [run.name, run]));
  return (
    <Table
      caption="Checkpoints, newest first"
      heads={["Checkpoint", "Holds", { text: "Version", isNumber: true }, { text: "Size", isNumber: true }, "Descends from", "Expires", { text: "Saved", isNumber: true }]}
    >
      {checkpoints.map((each) => (
        <tr key={each.name}>
          <th scope="row">
            <code>{short(each.name)}</code>
            {each.state === "STATE_PUBLISHED" && <small>published</small>}
          </th>
          <td class="whole">{word(each.kind, "KIND_") === "training" ? "weights, optimizer" : "weights"}</td>
          <td class="number">{number(Number(each.version ?? 0))}</td>
          <td class="number">{bytes(Number(each.size_bytes ?? 0))}</td>
          <td>
            <Lineage names={lineage(each, saved, runs)} />
          </td>
          <td>{each.expire_time ? new Date(each.expire_time).toLocaleDateString() : "kept"}</td>
          <td class="number">
            <Age time={each.create_time} />
          </td>
        </tr>
      ))}
    </Table>
  );
}

function Lineage({ names }: { names: readonly string[] }) {
  return (
    <ol class="lineage">
      {names.map((name) => (
        <li key={name}>
          {name.includes("/checkpoints/") ? <code>{short(name)}</code> : <a href={link("runs", short(name))}>{short(name)}</a>}
        </li>
      ))}
    </ol>
  );
}
