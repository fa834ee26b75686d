// Builds the page into the gateway's package: `npm run build`. The files are committed, so that
// neither users nor images need npm; `make page-check` fails if they are stale.
import { build } from "esbuild";
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const out = process.argv[2] ?? here("../../services/gateway/tinsmith_gateway/page/static");

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { page: here("src/main.tsx"), style: here("src/style.css") },
  outdir: out,
  bundle: true,
  minify: true,
  target: "es2022",
  format: "esm",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
});
cpSync(here("src/index.html"), `${out}/index.html`);
cpSync(here("src/icon.svg"), `${out}/icon.svg`);

// What is built in keeps its licence beside it.
const shipped = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];
const texts = shipped.map((name) => {
  const { version, license } = JSON.parse(readFileSync(here(`node_modules/${name}/package.json`), "utf8"));
  const text = readFileSync(here(`node_modules/${name}/LICENSE`), "utf8").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync(`${out}/licences.txt`, texts.join("\n----\n\n"));
