import assert from "node:assert/strict";
import { test } from "node:test";
import { Recent } from "../src/model/recent";

test("an answer is asked for once, by two at the same time as well, and again after it was forgotten", async () => {
  const recent = new Recent<number>(100, () => 1);
  let asked = 0;
  const ask = async (): Promise<number> => ++asked;
  assert.deepEqual(await Promise.all([recent.get("a", ask), recent.get("a", ask)]), [1, 1]);
  assert.equal(await recent.get("b", ask), 2);
  recent.forget();
  assert.equal(await recent.get("a", ask), 3);
});

test("what was used longest ago goes first where the budget is exceeded", async () => {
  const recent = new Recent<string>(10, (answer) => answer.length);
  let asked = 0;
  const ask = (answer: string) => async (): Promise<string> => (asked++, answer);
  for (const key of ["aaaa", "bbbb", "aaaa", "cccc"]) await recent.get(key, ask(key));
  assert.equal(asked, 3);
  await recent.get("aaaa", ask("aaaa"));
  assert.equal(asked, 3);
  await recent.get("bbbb", ask("bbbb"));
  assert.equal(asked, 4);
});

test("an answer larger than the budget is passed on and not kept", async () => {
  const recent = new Recent<string>(3, (answer) => answer.length);
  let asked = 0;
  const ask = async (): Promise<string> => (asked++, "long");
  assert.equal(await recent.get("k", ask), "long");
  assert.equal(await recent.get("k", ask), "long");
  assert.equal(asked, 2);
});

test("a failure is told to whoever asked and not kept", async () => {
  const recent = new Recent<number>(10, () => 1);
  await assert.rejects(
    recent.get("k", () => Promise.reject(new Error("gone"))),
    /gone/,
  );
  assert.equal(await recent.get("k", async () => 7), 7);
});
