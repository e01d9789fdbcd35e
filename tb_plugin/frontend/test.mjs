// Bundles the tests with the sources they import and runs them with node's own runner.
import { spawnSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { build } from "esbuild";

const tests = readdirSync("test").filter((name) => name.endsWith(".test.ts"));
await build({
  entryPoints: tests.map((name) => `test/${name}`),
  bundle: true,
  platform: "node",
  format: "esm",
  outdir: "build/test",
  outExtension: { ".js": ".mjs" },
});
const run = spawnSync(
  process.execPath,
  ["--test", ...tests.map((name) => `build/test/${name.replace(/\.ts$/, ".mjs")}`)],
  {
    stdio: "inherit",
  },
);
process.exit(run.status ?? 1);
