// What stands on the axes of the map: numbers, and flags for what was noted at a step.
import type { Annotation } from "../api";
import { el, keepChildren } from "../dom";
import { formatStep } from "../model/format";

const EDGE = 10;

/** Labels at their places; `axis` has the box for them as its first child. */
export function placeTicks(
  axis: HTMLElement,
  width: number,
  ticks: readonly { readonly x: number; readonly text: string }[],
): void {
  const box = axis.children[0];
  if (box === undefined) return;
  const make = ({ text }: { readonly text: string }): HTMLElement => el("span", { text });
  keepChildren(
    box,
    ticks,
    ({ text }) => text,
    make,
    (label, { x }) => {
      label.style.left = `${x}px`;
      // What stands at an edge must not run into the axis beside it.
      label.style.transform = x < EDGE ? "none" : x > width - EDGE ? "translateX(-100%)" : "";
    },
  );
}

/** What was noted on the time axis, as flags that say it. */
export function showFlags(
  box: HTMLElement,
  annotations: readonly Annotation[],
  range: readonly [number, number],
  toX: (step: number) => number,
): void {
  const inView = annotations.filter(({ step }) => step >= range[0] && step < range[1]);
  const spoken = ({ kind, step, text }: Annotation): string =>
    `${kind.replace("_", " ")} at step ${formatStep(step)}: ${text}`;
  keepChildren(
    box,
    inView,
    ({ kind, step, text }) => `${kind}\n${step}\n${text}`,
    (note) =>
      el("i", {
        class: `flag ${/^[a-z_]+$/.test(note.kind) ? note.kind : ""}`,
        title: spoken(note),
        attrs: { role: "img", "aria-label": spoken(note) },
      }),
    (flag, { step }) => {
      flag.style.left = `${toX(step + 0.5)}px`;
    },
  );
}
