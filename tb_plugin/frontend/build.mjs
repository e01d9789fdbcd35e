// Builds the committed bundle; with --check, compares it with what is committed instead.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build, transform } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "tensorboard_plugin_gradflow", "static", "index.js");
const budget = 90_000;

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
    hash
      .update(path)
      .update("\0")
      .update(readFileSync(join(here, path)))
      .update("\0");
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

// Parts of uPlot that this panel does not use, but that are reached through an object, so that no bundler can leave them out.
const unused = [
  "uPlot.join = join;",
  "(paths.stepped = stepped);",
  "(paths.bars    = bars);",
  "(paths.spline  = monotoneCubic);",
];
const lessOfUplot = {
  name: "less-of-uplot",
  setup(plugin) {
    plugin.onLoad({ filter: /uPlot\.esm\.js$/ }, ({ path }) => {
      let contents = readFileSync(path, "utf8");
      for (const line of unused) {
        if (!contents.includes(line))
          throw new Error(`uPlot has no line ${line} any more: look at what it is called now`);
        contents = contents.replace(line, "");
      }
      return { contents, loader: "js" };
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
  plugins: [smallStyle, lessOfUplot],
  absWorkingDir: here,
  banner: {
    js: `// sources sha256:${sourceHash()}\n/* Contains uPlot, less what this panel does not draw with.\n${licence}\n*/`,
  },
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
