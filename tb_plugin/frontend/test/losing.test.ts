import assert from "node:assert/strict";
import { test } from "node:test";
import { greatestDrop, isBorder, leftOf, leftText } from "../src/model/losing";

const moment = (values: (number | "NaN" | null)[]): Parameters<typeof leftOf>[1] => ({
  step: 40,
  sites: values.map((_, i) => `h.${i}`),
  values,
});

test("what is left is told from the loss back, and where most is lost", () => {
  const run = leftOf("a", moment([Math.log(0.01), Math.log(0.5), 0]));
  assert.deepEqual(run.sites, ["h.2", "h.1", "h.0"]);
  assert.equal(greatestDrop(run.sites, run.left)?.site, "h.0");
  assert.equal(leftText(run), "at step 40; largest change at h.0: ×0.0200");
});

test("where nothing arrived there is no number, and it is said how often", () => {
  const run = leftOf("a", moment([null, null, -1]));
  assert.deepEqual(run.left.nats, [-1, null, null]);
  assert.equal(leftText(run), "at step 40; largest change at h.2: ×0.368; nothing arrives at 2 of 3 blocks");
  assert.equal(leftText(leftOf("a", moment([null]))), "at step 40; nothing arrives at 1 of 1 blocks");
  assert.equal(
    leftText(leftOf("a", moment([null, "NaN", 0]))),
    "at step 40; largest change at h.2: ×1.00; nothing arrives at 1 of 3 blocks; NaN or Inf at 1 of 3 blocks",
  );
});

test("where start of another chain nothing is lost, and that is not told as a gradient that did not arrive", () => {
  const run = leftOf("a", moment([-1, -0.5, null, -2]));
  assert.deepEqual(
    run.sites.map((_, i) => isBorder(run.left, i)),
    [false, true, false, false],
  );
  assert.equal(leftText(run), "at step 40; largest change at h.3: ×0.135");
});

test("a run that holds no block gains has a legend entry that says so", () => {
  assert.equal(leftText(leftOf("a", undefined)), "no block gains");
});
