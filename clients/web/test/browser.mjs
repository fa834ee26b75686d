// Drives the page in Chromium: `node browser.mjs`, told what to do by a line of JSON on stdin.
//
// In: {chromium, url, key, out, state, run, file}. Out: one line of JSON, {problems, figures}. A problem is
// an error of the console, a finding of axe-core, a request that leaves the server, or a view
// that does not show what it should.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const task = JSON.parse(readFileSync(0, "utf8"));
const require = createRequire(import.meta.url);
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const WIDE = { width: 1280, height: 860 };
const NARROW = { width: 400, height: 860 };
const PATIENCE_MS = 60_000;

const problems = [];
const figures = {};
const browser = await chromium.launch({ executablePath: task.chromium, args: FLAGS });
const context = await browser.newContext({ viewport: WIDE, colorScheme: "light" });
context.setDefaultTimeout(PATIENCE_MS);
const page = await context.newPage();
let expectsErrors = false;

page.on("console", (message) => {
  if (["error", "warning"].includes(message.type()) && !expectsErrors) {
    problems.push(`console: ${message.text()}`);
  }
});
page.on("pageerror", (error) => problems.push(`page: ${error.message}`));
page.on("request", (request) => {
  if (!request.url().startsWith(task.url)) problems.push(`request leaves the server: ${request.url()}`);
});

async function logIn() {
  await page.goto(`${task.url}/`);
  await page.getByLabel("API key").fill(task.key);
  await page.keyboard.press("Enter");
  await page.getByRole("navigation").waitFor();
}

async function open(view) {
  await page.evaluate((to) => (location.hash = to), `#/${view}`);
}

async function shows(text) {
  await page.getByText(text).first().waitFor();
}

async function check(name) {
  await page.evaluate(AXE);
  const found = await page.evaluate(() => globalThis.axe.run());
  for (const violation of found.violations) {
    const where = violation.nodes.map((node) => node.target.join(" ")).slice(0, 3);
    problems.push(`axe, ${name}: ${violation.id} at ${where.join(", ")}`);
  }
}

async function picture(name, { isFull = false } = {}) {
  if (task.out) await page.screenshot({ path: `${task.out}/${name}.png`, fullPage: isFull, animations: "disabled" });
}

/** Looks at a view in both themes and on a phone; the light and wide picture is kept always. */
async function look(name, { all = false } = {}) {
  await check(`${name}, light`);
  await picture(name);
  if (!all) return;
  await page.emulateMedia({ colorScheme: "dark" });
  await page.waitForTimeout(150);
  await check(`${name}, dark`);
  await picture(`${name}-dark`);
  await page.setViewportSize(NARROW);
  await page.waitForTimeout(150);
  const isWide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  if (isWide) problems.push(`${name} is wider than 400 pixels`);
  await check(`${name}, 400 px`);
  await picture(`${name}-narrow`);
  await page.setViewportSize(WIDE);
  await page.emulateMedia({ colorScheme: "light" });
  await page.waitForTimeout(150);
}

/** Opens a row of a table by keys alone: Tab to its link, then Enter. */
async function keyboardPath() {
  await page.locator("body").press("Tab");
  const seen = [];
  for (let presses = 0; presses < 80; presses += 1) {
    const at = await page.evaluate(() => ({
      tag: document.activeElement?.tagName ?? "",
      href: document.activeElement?.getAttribute("href") ?? "",
      isOutlined: getComputedStyle(document.activeElement ?? document.body).outlineStyle !== "none",
    }));
    seen.push(at.href || at.tag);
    if (at.tag !== "BODY" && !at.isOutlined) problems.push(`focus cannot be seen at ${at.href || at.tag}`);
    if (at.href.startsWith("#/runs/")) {
      await page.keyboard.press("Enter");
      await page.getByRole("heading", { name: "Checkpoints" }).waitFor();
      return;
    }
    await page.keyboard.press("Tab");
  }
  problems.push(`no run is reached by Tab: ${seen.join(" ")}`);
}

const STATES = {
  async empty() {
    await page.goto(`${task.url}/`);
    await page.getByLabel("API key").waitFor();
    await look("log-in", { all: true });
    expectsErrors = true;
    await page.getByLabel("API key").fill("tsk_000000000000_nonsense");
    await page.keyboard.press("Enter");
    await page.getByRole("alert").getByText("KEY_INVALID").waitFor();
    expectsErrors = false;
    await logIn();
    for (const [view, text] of [
      ["runs", "No runs yet"],
      ["jobs", "No jobs yet"],
      ["queue", "Nothing waits"],
      ["matches", "No matches yet"],
      ["episodes", "No episodes yet"],
      ["trajectories", "Open a file of trajectories"],
      ["checkpoints", "No checkpoints yet"],
      ["samplers", "No weights are loaded"],
    ]) {
      await open(view);
      await shows(text);
      await look(`empty-${view}`);
    }
    await page.getByRole("button", { name: "Log out" }).click();
    await page.getByLabel("API key").waitFor();
    if (await page.evaluate(() => sessionStorage.length + localStorage.length + document.cookie.length)) {
      problems.push("something is left after logging out");
    }
  },

  async live() {
    await logIn();
    await shows("grpo, live");
    await page.locator(".chart canvas").first().waitFor();
    await page.waitForTimeout(1500);
    await look("runs", { all: true });
    const row = page.locator("tr", { hasText: "grpo, live" });
    const before = await row.innerText();
    await page.waitForFunction(
      (text) => [...document.querySelectorAll("tr")].some((each) => each.innerText.includes("grpo, live") && each.innerText !== text),
      before,
    );
    await page.getByLabel("Smooth").fill("0.9");
    await picture("runs-smoothed");
    await keyboardPath();
    await open("runs");
    await page.getByLabel("Smooth").fill("0.6");
    await page.getByRole("link", { name: "grpo, live" }).click();
    await page.locator(".charts.small canvas").nth(5).waitFor();
    await look("run", { all: true });
    for (const [view, text] of [
      ["jobs", "waits"],
      ["queue", "under way"],
      ["matches", "learner, script"],
      ["episodes", "submitted"],
      ["checkpoints", "step-260"],
      ["samplers", "Weights in samplers"],
    ]) {
      await open(view);
      await shows(text);
      await look(view, { all: view === "queue" });
    }
    await open("matches");
    await page.locator("tr", { hasText: "learner, script" }).getByRole("link").click();
    await shows("Mean reward");
    await look("match");
    await open("episodes");
    await page.locator("tr", { hasText: "submitted" }).getByRole("link").first().click();
    await page.locator(".tokens .q-mask").first().waitFor();
    await page.getByLabel("log-probability").first().check();
    await page.locator(".tokens .text").first().focus();
    await page.keyboard.press("End");
    await page.getByText("sampled · log-probability").first().waitFor();
    await look("episode", { all: true });
  },

  async failed() {
    await logIn();
    const row = page.locator("tr", { hasText: "out of room" });
    await row.getByText("failed").waitFor();
    await look("failed-run");
    await row.getByRole("link").click();
    await shows("could not be placed");
    await shows("A run that was not placed has none");
    await look("failed-run-alone");
    await open("runs/nothing");
    expectsErrors = true;
    await shows("There is no such run");
    expectsErrors = false;
  },

  async many() {
    await logIn();
    await shows("sweep 999");
    await look("many-runs", { all: true });
    const begin = Date.now();
    await page.reload();
    await page.locator("tbody tr").nth(99).waitFor();
    figures["page with 1,000 runs opens"] = (Date.now() - begin) / 1000;
    for (let loads = 0; loads < 12; loads += 1) {
      const button = page.getByRole("button", { name: "Load older runs" });
      if (!(await button.isVisible())) break;
      const rows = await page.locator("tbody tr").count();
      await button.click();
      await page.locator("tbody tr").nth(rows).waitFor();
    }
    await page.getByLabel("Filter runs").fill("sweep 7");
    await page.getByRole("link", { name: "sweep 7", exact: true }).waitFor();
    await check("1,000 runs, filtered");
    await picture("many-runs-filtered");
  },

  async slow() {
    const devtools = await context.newCDPSession(page);
    await page.goto(`${task.url}/`);
    await page.getByLabel("API key").fill(task.key);
    await devtools.send("Network.enable");
    await devtools.send("Network.emulateNetworkConditions", {
      offline: false,
      latency: 6000,
      downloadThroughput: 20_000,
      uploadThroughput: 20_000,
    });
    await page.keyboard.press("Enter");
    await page.getByRole("status").getByText("slow").first().waitFor();
    await look("slow-network");
    await shows("grpo lr");
    expectsErrors = true;
    await devtools.send("Network.emulateNetworkConditions", {
      offline: false,
      latency: 0,
      downloadThroughput: -1,
      uploadThroughput: -1,
    });
    await page.reload();
    await page.locator(".dot.live").waitFor();
    await page.evaluate(() => globalThis.dispatchEvent(new Event("offline")));
    await devtools.send("Network.emulateNetworkConditions", { offline: true, latency: 0, downloadThroughput: -1, uploadThroughput: -1 });
    await open("jobs");
    await page.getByText("Connection lost").waitFor();
    await look("lost-connection");
    await devtools.send("Network.emulateNetworkConditions", { offline: false, latency: 0, downloadThroughput: -1, uploadThroughput: -1 });
    await page.locator(".dot.live").waitFor();
  },

  async long() {
    await logIn();
    await shows("100,000 steps");
    /** The median of how long each of some acts takes until what it opens is painted. */
    const measure = async (name, acts) => {
      const seconds = [];
      for (const { before, act, until } of acts) {
        await before?.();
        const begin = await page.evaluate(() => performance.now());
        await act();
        await until.waitFor();
        const end = await page.evaluate(() => new Promise((painted) => requestAnimationFrame(() => painted(performance.now()))));
        seconds.push((end - begin) / 1000);
      }
      figures[name] = seconds.sort((a, b) => a - b)[Math.floor(seconds.length / 2)];
    };
    const away = async () => {
      await open("samplers");
      await shows("Models");
    };
    const thrice = (each) => [0, 1, 2].map(() => each);
    await measure(
      "run of 100,000 steps opens",
      thrice({ before: away, act: () => open(`runs/${task.run}`), until: page.locator(".charts.small canvas").nth(5) }),
    );
    await look("long-run");
    await measure(
      "list of 100,000 episodes opens",
      thrice({ before: away, act: () => open("episodes"), until: page.locator("tbody tr").nth(49) }),
    );
    const episodes = await page.locator("tbody th a").evaluateAll((links) => links.slice(0, 5).map((link) => link.hash.slice(2)));
    await measure(
      "episode by token opens",
      episodes.map((view) => ({ before: away, act: () => open(view), until: page.locator(".tokens .text span").nth(9) })),
    );
    await open("trajectories");
    const input = page.locator("input[type=file]");
    await measure("file of 100,000 trajectories opens", [
      { act: () => input.setInputFiles(task.file), until: page.locator(".tokens .text span").nth(9) },
    ]);
    await page.getByText("of 100,000 lines", { exact: true }).waitFor();
    const box = page.getByLabel("Number of the trajectory");
    await measure(
      "trajectory by token opens",
      [50_000, 100_000, 7, 70_001, 2].map((line) => ({
        act: async () => {
          await box.fill(String(line));
          await box.blur();
        },
        until: page.locator(".facts dd").getByText(String(line - 1), { exact: true }).first(),
      })),
    );
    await page.getByLabel("advantage").check();
    await look("trajectory", { all: true });
  },
};

try {
  await STATES[task.state]();
} catch (error) {
  problems.push(`${task.state}: ${error.message}`);
  await picture(`problem-${task.state}`).catch(() => undefined);
}
await browser.close();
console.log(JSON.stringify({ problems, figures }));
