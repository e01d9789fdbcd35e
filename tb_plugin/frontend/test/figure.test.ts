import assert from "node:assert/strict";
import { test } from "node:test";
import { histogramFigure, lineFigure, mapFigure, type LineFigure } from "../src/model/figure";

const HOSTILE = '<img src=x onerror="1">&\'';
const LINE: LineFigure = {
  name: "gain: run",
  xs: [0, 1, 2, 3],
  xLabel: "optimizer step",
  xTicks: [{ at: 0, text: "0" }],
  yLabel: "gain (nats)",
  curves: [],
  log: false,
  range: [0, 3],
  marks: [],
};
const FOUND = {
  metric: "parameter.gradient",
  site: "w",
  total: 2,
  histograms: [
    { step: 10, edges: [-1, 0, 1], counts: [1, 3], nonfinite: 0 },
    { step: 20, edges: [-2, 0, 2], counts: [4, 0], nonfinite: 7 },
  ],
};

test("names in figures are text", () => {
  const map = mapFigure(
    {
      name: HOSTILE,
      image: "data:image/png;base64,AA==",
      width: 100,
      height: 20,
      range: [0, 10],
      rows: [{ at: 3, text: HOSTILE }],
      colours: { label: HOSTILE, ramp: ["red"], ticks: [{ at: 0, text: "<" }] },
    },
    "sans",
  );
  const curves = [{ label: HOSTILE, colour: "red", values: [1, 2] }];
  const lines = lineFigure({ ...LINE, name: HOSTILE, yLabel: HOSTILE, xLabel: HOSTILE, curves }, "serif");
  const bins = histogramFigure({ ...FOUND, site: HOSTILE }, false, "red", HOSTILE, "sans");
  for (const text of [map, lines, bins]) {
    assert.ok(!text.includes("<img"));
    assert.match(text, /&lt;img src=x onerror=&quot;1&quot;&gt;&amp;/);
  }
});

test("a figure is black on white, in the chosen font, and both axes say their quantity", () => {
  for (const [font, family] of [
    ["sans", "Helvetica"],
    ["serif", "Times New Roman"],
  ] as const) {
    const text = lineFigure({ ...LINE, curves: [{ label: "", colour: "red", values: [1, 2, 3, 4] }] }, font);
    assert.match(text, new RegExp(`font-family="${family}[^"]*" font-size="12" fill="#000"`));
    assert.ok(text.includes('<rect width="100%" height="100%" fill="#fff"/>'));
    assert.match(text, />optimizer step<\/text>/);
    assert.match(text, /rotate\(-90\)" text-anchor="middle">gain \(nats\)<\/text>/);
    assert.ok(!/<text[^>]*>gain: run</.test(text));
  }
});

test("lines break where there is no number, on either axis", () => {
  const path = (log: boolean): string =>
    /<path d="(M[^"]*)" fill="none" stroke="red"/.exec(
      lineFigure({ ...LINE, log, curves: [{ label: "", colour: "red", values: [1, 10, null, 100] }] }, "sans"),
    )?.[1] ?? "";
  for (const log of [true, false]) assert.equal(path(log).split("M").length, 3);
  const [first, second, third] = [...path(true).matchAll(/ ([\d.]+)/g)].map(([, y]) => Number(y));
  assert.ok(Math.abs((first ?? 0) - 2 * (second ?? 0) + (third ?? 0)) < 0.3);
});

test("a logarithmic axis has powers of ten", () => {
  const curves = [{ label: "", colour: "red", values: [1e-3, 1, 1e3, 1e6] }];
  const text = lineFigure({ ...LINE, log: true, curves }, "sans");
  for (const word of ["10\u207b\u00b2", ">1<", "10\u00b2", "10\u2074"]) assert.ok(text.includes(word), word);
});

test("histograms are ridges or a heat map, with the entries that are no number", () => {
  const ridges = histogramFigure(FOUND, false, "blue", "gradient", "sans");
  assert.ok(ridges.includes("7 NaN/Inf"));
  const heat = histogramFigure(FOUND, true, "blue", "gradient", "sans");
  assert.equal(heat.split('fill="blue"').length - 1, 3);
  assert.ok(heat.includes('fill="#c02a34"'));
});

test("nothing to draw is still a figure", () => {
  for (const log of [true, false]) {
    const text = lineFigure({ ...LINE, xs: [], log }, "sans");
    assert.match(text, /^<svg .*<\/svg>$/);
    assert.ok(!text.includes("NaN"));
  }
  assert.match(histogramFigure({ ...FOUND, total: 0, histograms: [] }, true, "b", "g", "sans"), /^<svg .*<\/svg>$/);
});
