// Where a checkpoint comes from: its run, the checkpoint that this began from, and so on.

export interface RunOrigin {
  name: string;
  source_checkpoint?: string;
}

export interface CheckpointOrigin {
  name: string;
  source_checkpoint?: string;
}

/** Return the resources that a checkpoint descends from, the nearest first. */
export function lineage(
  checkpoint: CheckpointOrigin,
  checkpoints: ReadonlyMap<string, CheckpointOrigin>,
  runs: ReadonlyMap<string, RunOrigin>,
): string[] {
  const found: string[] = [];
  const seen = new Set<string>();
  let name: string | undefined = checkpoint.name;
  while (name !== undefined && !seen.has(name)) {
    seen.add(name);
    if (name !== checkpoint.name) found.push(name);
    const copied: string | undefined = checkpoints.get(name)?.source_checkpoint;
    const run: string = name.split("/checkpoints/")[0] ?? "";
    if (!copied && run !== name) found.push(run);
    name = copied || runs.get(run)?.source_checkpoint || undefined;
  }
  return found;
}
