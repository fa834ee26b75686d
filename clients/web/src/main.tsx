// The frame: who reads, where to go, how the connection is, and the view.

import { render } from "preact";
import { place, link } from "./router.ts";
import { connection, key, logOut, me, now, retryNow, start } from "./store.ts";
import { CheckpointsView } from "./views/checkpoints.tsx";
import { EpisodesView, JobsView, MatchView, MatchesView, QueueView, SamplersView } from "./views/lists.tsx";
import { LoginView } from "./views/login.tsx";
import { RunView } from "./views/run.tsx";
import { RunsView } from "./views/runs.tsx";
import { EpisodeView, TrajectoriesView } from "./views/trajectory.tsx";
import { Loading } from "./parts.tsx";

const VIEWS: readonly (readonly [string, string])[] = [
  ["runs", "Runs"],
  ["jobs", "Jobs"],
  ["queue", "Queue"],
  ["matches", "Matches"],
  ["episodes", "Episodes"],
  ["trajectories", "Trajectories"],
  ["checkpoints", "Checkpoints"],
  ["samplers", "Samplers"],
];

function View() {
  const { view, id } = place.value;
  switch (view) {
    case "runs":
      return id ? <RunView id={id} /> : <RunsView />;
    case "jobs":
      return <JobsView />;
    case "queue":
      return <QueueView />;
    case "matches":
      return id ? <MatchView id={id} /> : <MatchesView />;
    case "episodes":
      return id ? <EpisodeView id={id} /> : <EpisodesView />;
    case "trajectories":
      return <TrajectoriesView />;
    case "checkpoints":
      return <CheckpointsView />;
    case "samplers":
      return <SamplersView />;
    default:
      return (
        <p class="muted">
          There is no view of this name. <a href={link("runs")}>Runs</a>
        </p>
      );
  }
}

function Connection() {
  const found = connection.value;
  if (found.state === "lost") {
    const left = Math.max(0, Math.ceil((found.retryAtMs - now.value) / 1000));
    return (
      <p class="banner">
        <span role="alert">Connection lost: {found.why}. What is shown may be old.</span>{" "}
        <span aria-hidden="true">{left > 0 ? `Next attempt in ${left} s.` : "Trying…"}</span>{" "}
        <button type="button" onClick={retryNow}>
          Try now
        </button>
      </p>
    );
  }
  const isSlow = found.state === "connecting" && found.isSlow;
  return isSlow ? (
    <p class="banner" role="status">
      Connecting is slow; what is shown may be old.
    </p>
  ) : null;
}

function Page() {
  if (!key.value) return <LoginView />;
  if (me.value === null) return <Loading />;
  const { view } = place.value;
  const title = VIEWS.find(([name]) => name === view)?.[1] ?? "Tinsmith";
  document.title = `${title} · Tinsmith`;
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>
        Skip to the content
      </a>
      <header>
        <p class="brand">
          <img src="/page/icon.svg" alt="" width="22" height="22" /> Tinsmith
        </p>
        <nav aria-label="Views">
          <ul>
            {VIEWS.map(([name, text]) => (
              <li key={name}>
                <a href={link(name)} aria-current={name === view ? "page" : undefined}>
                  {text}
                </a>
              </li>
            ))}
          </ul>
        </nav>
        <p class="who">
          <span class={`dot ${connection.value.state}`} aria-hidden="true" />
          <span title={`role ${me.value.role}`}>
            {me.value.project}
            {connection.value.state === "live" || connection.value.state === "lost" ? ` · ${connection.value.state}` : ""}
          </span>
          <button type="button" class="quiet" onClick={logOut}>
            Log out
          </button>
        </p>
      </header>
      <main id="main" tabIndex={-1}>
        <h1 class="hidden">{title}</h1>
        <Connection />
        <View />
      </main>
    </div>
  );
}

start();
const root = document.getElementById("page");
if (root) {
  root.textContent = "";
  render(<Page />, root);
}
