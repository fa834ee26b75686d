// Jobs, the queue, matches, episodes and samplers: lists that say what goes on.

import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "../api.ts";
import { brief, count, number, short, stateOf, word } from "../format.ts";
import { Age, Empty, Facts, Loading, Missing, Problem, Prose, State, Table } from "../parts.tsx";
import { link } from "../router.ts";
import { key, lists, watched } from "../store.ts";
import type { Episode, Match, Topic } from "../types.ts";

const ENDED_PHASES = new Set(["Succeeded", "Failed", "Cancelled"]);

function useTopics(...topics: Topic[]): void {
  useEffect(() => {
    watched.value = { topics, runs: [], names: [] };
  }, []);
}

export function JobsView() {
  useTopics("jobs");
  const list = lists.value.jobs;
  if (!list) return <Missing topic="jobs" />;
  const jobs = list.training_jobs ?? [];
  if (jobs.length === 0) {
    return (
      <Empty title="No jobs yet" command="tinsmith jobs submit --recipe rl --name first --steps 75 --set group_size=8">
        A job is a whole training, described once and run by the server or the cluster:
      </Empty>
    );
  }
  return (
    <>
      <h2>{count(jobs.length, "job")}</h2>
      <Table caption="Jobs" heads={["Job", "Phase", "Progress", { text: "Reward", isNumber: true }, "Time left", "Method", "Run", { text: "Submitted", isNumber: true }]}>
        {jobs.map((job) => {
          const { status = {} } = job;
          const progress = status.progress ?? {};
          return (
            <tr key={job.name}>
              <th scope="row">{short(job.name)}</th>
              <td>
                <State value={(status.phase ?? "pending").toLowerCase()} />
                {status.waiting_for && <small>waits for <Prose text={status.waiting_for} /></small>}
                {status.failure?.message && <small class="bad">{status.failure.message}</small>}
              </td>
              <td>
                {progress.max_steps ? (
                  <>
                    <progress max={progress.max_steps} value={progress.step ?? 0} aria-label={`Steps of ${short(job.name)}`} />{" "}
                    {progress.step ?? 0}/{progress.max_steps}
                  </>
                ) : (
                  "–"
                )}
              </td>
              <td class="number">{progress.reward || "–"}</td>
              <td>{progress.eta || "–"}</td>
              <td>{job.spec?.method?.type ?? ""}</td>
              <td>{progress.run ? <a href={link("runs", short(progress.run))}>{short(progress.run)}</a> : "–"}</td>
              <td class="number">
                <Age time={job.create_time} />
              </td>
            </tr>
          );
        })}
      </Table>
    </>
  );
}

interface Waiting {
  what: string;
  href: string;
  kind: string;
  state: string;
  waitsFor: string;
  since: string | undefined;
}

export function QueueView() {
  useTopics("runs", "jobs", "episodes", "matches");
  const { runs, jobs, episodes, matches } = lists.value;
  if (!runs) return <Missing topic="runs" />;
  const waiting: Waiting[] = [
    ...(jobs?.training_jobs ?? [])
      .filter((job) => !ENDED_PHASES.has(job.status?.phase ?? ""))
      .map((job) => ({
        what: short(job.name),
        href: link("jobs"),
        kind: "job",
        state: (job.status?.phase ?? "pending").toLowerCase(),
        waitsFor: job.status?.waiting_for ?? "",
        since: job.status?.queued_time ?? job.create_time,
      })),
    ...(runs.training_runs ?? [])
      .filter((run) => run.num_pending_operations || run.waiting_for)
      .map((run) => ({
        what: run.display_name || short(run.name),
        href: link("runs", short(run.name)),
        kind: run.num_pending_operations ? `run, ${count(run.num_pending_operations, "operation")}` : "run",
        state: stateOf(run),
        waitsFor: run.waiting_for ?? "",
        since: run.create_time,
      })),
    ...(matches?.matches ?? [])
      .filter((match) => match.waiting_for)
      .map((match) => ({
        what: short(match.name),
        href: link("matches", short(match.name)),
        kind: "match",
        state: word(match.state, "STATE_"),
        waitsFor: match.waiting_for ?? "",
        since: match.create_time,
      })),
    ...(episodes?.episodes ?? [])
      .filter((episode) => episode.waiting_for)
      .map((episode) => ({
        what: short(episode.name),
        href: link("episodes", short(episode.name)),
        kind: `episode of ${episode.queue ?? "default"}`,
        state: word(episode.state, "STATE_"),
        waitsFor: episode.waiting_for ?? "",
        since: episode.create_time,
      })),
  ];
  if (waiting.length === 0) {
    return (
      <Empty title="Nothing waits" command="tinsmith jobs submit --recipe supervised --name second --set data=chat.jsonl">
        Jobs, runs with operations, matches and episodes stand here with what they wait for. To hand in a job:
      </Empty>
    );
  }
  return (
    <>
      <h2>{waiting.length} under way</h2>
      <Table caption="What is under way and what it waits for" heads={["What", "Waits for", "State", { text: "Since", isNumber: true }]}>
        {waiting.map((each) => (
          <tr key={each.href + each.what}>
            <th scope="row">
              <a href={each.href}>{brief(each.what)}</a>
              <small>{each.kind}</small>
            </th>
            <td>{each.waitsFor ? <Prose text={each.waitsFor} /> : "nothing: it runs"}</td>
            <td>
              <State value={each.state} />
            </td>
            <td class="number">
              <Age time={each.since} />
            </td>
          </tr>
        ))}
      </Table>
    </>
  );
}

export function MatchesView() {
  useTopics("matches");
  const list = lists.value.matches;
  if (!list) return <Missing topic="matches" />;
  const matches = list.matches ?? [];
  if (matches.length === 0) {
    return (
      <Empty title="No matches yet" command="tinsmith run self_play data=kuhn num_steps=50">
        A match keeps several agents in step in one environment. Ratings of a league are curves of its run. For self-play:
      </Empty>
    );
  }
  return (
    <>
      <h2>{count(matches.length, "match", "matches")}</h2>
      <Table
        caption="Matches, newest first"
        heads={["Match", "State", "Agents", { text: "Epoch", isNumber: true }, { text: "Open games", isNumber: true }, { text: "Age", isNumber: true }]}
      >
        {matches.map((match) => (
          <tr key={match.name}>
            <th scope="row">
              <a href={link("matches", short(match.name))}>{brief(short(match.name))}</a>
            </th>
            <td>
              <State value={word(match.state, "STATE_")} />
              {match.waiting_for && <small>waits for <Prose text={match.waiting_for} /></small>}
              {match.failure && <small class="bad">{match.failure}</small>}
            </td>
            <td>{(match.agents ?? []).map((agent) => agent.agent).join(", ")}</td>
            <td class="number">{number(Number(match.next_barrier?.epoch ?? 0))}</td>
            <td class="number">{number(match.num_open_games ?? 0)}</td>
            <td class="number">
              <Age time={match.create_time} />
            </td>
          </tr>
        ))}
      </Table>
    </>
  );
}

export function MatchView({ id }: { id: string }) {
  useTopics("matches");
  const [found, setFound] = useState<Match | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  // Read again whenever the list says that something changed.
  const revision = JSON.stringify(lists.value.matches?.matches?.find((each) => short(each.name) === id));
  useEffect(() => {
    const abort = new AbortController();
    get<Match>(`/matches/${encodeURIComponent(id)}`, key.value, {}, abort.signal)
      .then(setFound)
      .catch((problem: unknown) => {
        if (problem instanceof ApiError) setError(problem);
      });
    return () => abort.abort();
  }, [id, revision]);
  if (error && !found) return <Problem reason={error.reason} message={error.message} />;
  if (!found) return <Loading />;
  const results = new Map((found.results ?? []).map((each) => [each.agent, each]));
  const order = [...results.keys()];
  const agents = [...(found.agents ?? [])].sort((a, b) => order.indexOf(a.agent) - order.indexOf(b.agent));
  const barrier = word(found.next_barrier?.point, "POINT_");
  return (
    <>
      <p class="crumb">
        <a href={link("matches")}>Matches</a>
      </p>
      <h2>
        {brief(id)} <State value={word(found.state, "STATE_")} />
      </h2>
      <Facts
        rows={[
          ["Match", <code>{id}</code>],
          ["Epoch", number(Number(found.next_barrier?.epoch ?? 0))],
          ["Next barrier", barrier],
          ["Open games", number(found.num_open_games ?? 0)],
          ["Games of an epoch", number(found.num_games ?? 0)],
          ["Waits for", found.waiting_for],
          ["Failure", found.failure],
          ["Created", <Age time={found.create_time} />],
        ]}
      />
      <Table
        caption={`Agents of ${id}, the strongest first`}
        heads={["Agent", "Plays", "State", { text: "Rating", isNumber: true }, { text: "Games", isNumber: true }, { text: "Won", isNumber: true }, { text: "Mean reward", isNumber: true }]}
      >
        {agents.map((agent) => {
          const result = results.get(agent.agent);
          return (
            <tr key={agent.agent}>
              <th scope="row">{agent.agent}</th>
              <td>{short(agent.model ?? "") || "–"}</td>
              <td>
                <State value={word(agent.state, "STATE_")} />
                {agent.failure && <small class="bad">{agent.failure}</small>}
              </td>
              <td class="number">{result ? `${Math.round(result.elo)} ± ${Math.round(result.error)}` : "–"}</td>
              <td class="number">{number(result?.games ?? 0)}</td>
              <td class="number">{result ? number(result.wins) : "–"}</td>
              <td class="number">{result ? number(result.mean) : "–"}</td>
            </tr>
          );
        })}
      </Table>
    </>
  );
}

export function EpisodesView() {
  useTopics("episodes");
  const list = lists.value.episodes;
  if (!list) return <Missing topic="episodes" />;
  const episodes = list.episodes ?? [];
  if (episodes.length === 0) {
    return (
      <Empty title="No episodes yet" command="tinsmith run rl_episodes queue=rl data=tasks.jsonl">
        Episodes are played by agents anywhere. Their tokens are recorded, and shown here. A loop that registers some:
      </Empty>
    );
  }
  return (
    <>
      <h2>{count(episodes.length, "episode")}{list.next_page_token ? ", the newest" : ""}</h2>
      <Table
        caption="Episodes, newest first"
        heads={["Episode", "State", { text: "Reward", isNumber: true }, "Queue", "Task", "Agent", { text: "Calls", isNumber: true }, { text: "Age", isNumber: true }]}
      >
        {episodes.map((episode) => (
          <EpisodeRow key={episode.name} episode={episode} />
        ))}
      </Table>
    </>
  );
}

function EpisodeRow({ episode }: { episode: Episode }) {
  const failures = episode.failures ?? [];
  return (
    <tr>
      <th scope="row">
        <a href={link("episodes", short(episode.name))}>{brief(short(episode.name))}</a>
        {episode.type === "TYPE_EVAL" && <small>eval</small>}
      </th>
      <td>
        <State value={word(episode.state, "STATE_")} />
        {episode.waiting_for && <small>waits for <Prose text={episode.waiting_for} /></small>}
        {failures.length > 0 && <small class="bad">{failures[failures.length - 1]}</small>}
      </td>
      <td class="number">{number(episode.outcome?.reward)}</td>
      <td>{episode.queue}</td>
      <td>{episode.task_id}</td>
      <td>{episode.client_id}</td>
      <td class="number">{number(episode.num_model_calls ?? 0)}</td>
      <td class="number">
        <Age time={episode.end_time ?? episode.create_time} />
      </td>
    </tr>
  );
}

export function SamplersView() {
  useTopics("capabilities", "samplers");
  const models = lists.value.capabilities?.models;
  const weights = lists.value.samplers?.weights ?? [];
  if (!lists.value.capabilities) return <Missing topic="capabilities" />;
  if (!models || models.length === 0) {
    return (
      <Empty title="No model is served" command="tinsmith up --model DIR">
        Trainers and samplers say what they serve when they start:
      </Empty>
    );
  }
  return (
    <>
      <h2>Models</h2>
      <Table caption="Models that are served" heads={["Model", "Family", { text: "Weights", isNumber: true }, { text: "Context", isNumber: true }, "Bits", "Trains", "Samples", { text: "Runs", isNumber: true }]}>
        {models.map(({ model = {}, ...served }) => (
          <tr key={model.base_model}>
            <th scope="row">{model.base_model}</th>
            <td>{model.family}</td>
            <td class="number">{number(Number(model.num_parameters ?? 0))}</td>
            <td class="number">{number(model.max_context_tokens ?? 0)}</td>
            <td>
              {word(model.exactness, "EXACTNESS_")}, {model.dtype}
            </td>
            <td>{served.trainable ? "yes" : "no"}</td>
            <td>{served.sampleable ? "yes" : "no"}</td>
            <td class="number">
              {served.num_runs ?? 0} of {served.max_runs ?? 0}
            </td>
          </tr>
        ))}
      </Table>
      <h2>Weights in samplers</h2>
      {weights.length === 0 ? (
        <Empty title="No weights are loaded" command={'tinsmith sample "Repeat: tin" --base-model tiny'}>
          They are loaded with the first sample:
        </Empty>
      ) : (
        <Table caption="Weights in samplers" heads={["Source", { text: "Version", isNumber: true }, { text: "Sequences", isNumber: true }]}>
          {weights.map((each) => (
            <tr key={`${each.source} ${each.version}`}>
              <th scope="row">{short(each.source ?? "")}</th>
              <td class="number">{number(Number(each.version ?? 0))}</td>
              <td class="number">{number(each.num_active_sequences ?? 0)}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
