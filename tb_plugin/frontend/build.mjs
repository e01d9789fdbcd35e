// Builds the committed bundle; with --check, compares it with what is committed instead.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build, transform } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "tensorboard_plugin_gradflow", "static", "index.js");
const budget = 60_000;

function sources() {
  const found = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath ?? entry.path, entry.name));
  return [...found, join(here, "build.mjs"), join(here, "package-lock.json")]
    .map((path) => relative(here, path).split(sep).join("/"))
    .sort();
}

// tests/plugin/test_bundle.py computes the same: path, NUL, content, NUL of every source in order of path.
function sourceHash() {
  const hash = createHash("sha256");
  for (const path of sources()) {
    hash.update(path).update("\0").update(readFileSync(join(here, path))).update("\0");
  }
  return hash.digest("hex");
}

// The style sheet is a string in the code, which no minifier looks into by itself.
const smallStyle = {
  name: "small-style",
  setup(plugin) {
    plugin.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(readFileSync(path, "utf8"), { loader: "css", minify: true });
      return { contents: code, loader: "text" };
    });
  },
};

const licence = readFileSync(join(here, "node_modules", "uplot", "LICENSE"), "utf8").trim();
const result = await build({
  entryPoints: [join(here, "src", "main.ts")],
  bundle: true,
  minify: true,
  write: false,
  format: "esm",
  target: "es2022",
  charset: "ascii",
  legalComments: "none",
  plugins: [smallStyle],
  absWorkingDir: here,
  banner: { js: `// sources sha256:${sourceHash()}\n/* Contains uPlot.\n${licence}\n*/` },
});
const bundle = result.outputFiles[0].text;
const size = gzipSync(bundle, { level: 9 }).length;
console.log(`index.js: ${bundle.length} bytes, ${size} bytes gzip`);
if (size > budget) throw new Error(`the bundle has ${size} bytes gzip, ${budget} are allowed`);
if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== bundle) throw new Error("static/index.js is stale: run npm run build");
} else {
  writeFileSync(target, bundle);
}
