// When: every issue as a bar over the same steps as the map, from its first step to its healing.
import { el, FILLING, keepChildren, setText } from "../dom";
import { formatStep } from "../model/format";
import { endOf, inOrder, layOut, neighbour, type Bar } from "../model/strip";
import { issueKey, since, where, type Issue } from "../model/verdict";

const [LANE, MOST_LANES, LEAST_SHARE] = [26, 2, 0.14];

export class StripView {
  readonly #bands = el("div");
  readonly #cursor = el("div", { class: `vline ${FILLING}` });
  readonly #lanes = el("div", { class: "lanes", attrs: { "data-part": "lanes" } }, this.#bands, this.#cursor);
  readonly #previous = el(
    "button",
    { class: "btn", attrs: { type: "button", "aria-label": "Previous issue" } },
    el("span", { text: "\u2039 ", attrs: { "aria-hidden": "true" } }),
    "Previous",
  );
  readonly #next = el(
    "button",
    { class: "btn", attrs: { type: "button", "aria-label": "Next issue" } },
    "Next",
    el("span", { text: " \u203a", attrs: { "aria-hidden": "true" } }),
  );
  readonly #count = el("span");
  readonly root = el(
    "section",
    { class: "card strip", attrs: { "aria-label": "Issues over time", "data-part": "strip" } },
    el("h2", { text: "Issues over time" }),
    this.#lanes,
    el("div", { class: "steps" }, this.#previous, this.#next, this.#count),
  );
  #issues: readonly Issue[] = [];
  #chosen: Issue | null = null;
  #bars: readonly { readonly bar: Bar; readonly button: HTMLElement }[] = [];
  #ends: readonly [number, number] = [0, 1];
  #range: readonly [number, number] = [0, 1];
  #step = 0;

  constructor(private readonly picked: (issue: Issue) => void) {
    this.root.hidden = true;
    this.#previous.addEventListener("click", () => this.#go(-1));
    this.#next.addEventListener("click", () => this.#go(1));
  }

  show(issues: readonly Issue[], first: number, last: number): void {
    this.#issues = inOrder(issues);
    this.#ends = [first, last];
    const before = this.#chosen;
    this.#chosen = this.#issues.find((issue) => before !== null && sameIssue(issue, before)) ?? null;
    this.root.hidden = issues.length === 0;
    this.#lay();
  }

  #lay(): void {
    const [first, last] = this.#ends;
    const strip = layOut(this.#issues, last, (last - first) * LEAST_SHARE, MOST_LANES, this.#chosen);
    const found: { readonly bar: Bar; readonly button: HTMLElement }[] = [];
    keepChildren(
      this.#bands,
      strip.bars,
      ({ issue }) => issueKey(issue),
      (bar) => this.#button(bar),
      (button, bar) => found.push({ bar, button }),
    );
    this.#bars = found;
    for (const { bar, button } of found) button.style.top = `${bar.lane * LANE + 1}px`;
    this.#lanes.style.height = `${Math.max(1, strip.lanes) * LANE}px`;
    setText(this.#count, strip.hidden > 0 ? `${formatStep(strip.hidden)} more` : `${this.#issues.length} in all`);
    this.#place();
  }

  /** Shows these steps, as the map does. */
  showRange(range: readonly [number, number]): void {
    this.#range = range;
    this.#cursor.classList.remove(FILLING);
    this.#place();
  }

  showStep(step: number): void {
    // Of several issues at one step the chosen one stays chosen, until somebody goes elsewhere.
    if (this.#step !== step && this.#chosen?.step !== step) this.#chosen = null;
    this.#step = step;
    const at = this.#share(step + 0.5);
    this.#cursor.hidden = at < 0 || at > 1;
    this.#cursor.style.left = `${at * 100}%`;
    this.#previous.disabled = neighbour(this.#issues, this.#chosen, step, -1) === null;
    this.#next.disabled = neighbour(this.#issues, this.#chosen, step, 1) === null;
    for (const { bar, button } of this.#bars) button.classList.toggle("chosen", bar.issue === this.#chosen);
  }

  choose(issue: Issue): void {
    this.#chosen = this.#issues.find((item) => sameIssue(item, issue)) ?? null;
    if (!this.#bars.some(({ bar }) => bar.issue === this.#chosen)) this.#lay();
  }

  #go(by: 1 | -1): void {
    const issue = neighbour(this.#issues, this.#chosen, this.#step, by);
    if (issue !== null) this.picked(issue);
  }

  #share(step: number): number {
    return (step - this.#range[0]) / (this.#range[1] - this.#range[0]);
  }

  #place(): void {
    for (const { bar, button } of this.#bars) {
      const [from, to] = [Math.max(0, this.#share(bar.from)), Math.min(1, this.#share(bar.to + 1))];
      button.hidden = from >= 1 || to <= 0;
      button.style.left = `min(${from * 100}%, 100% - 24px)`;
      button.style.width = `${Math.max(0, to - from) * 100}%`;
    }
    this.showStep(this.#step);
  }

  #button(bar: Bar): HTMLElement {
    const { issue } = bar;
    const until = issue.healed_step === null ? "" : `, healed at ${formatStep(issue.healed_step)}`;
    const ended = issue.state === "ended" ? `, last seen at ${formatStep(endOf(issue, this.#ends[1]))}` : "";
    const text = `${issue.issue_type} ${where(issue)}`;
    const label = `${issue.severity} ${text} ${since(issue)}${until}${ended}`;
    const past = issue.state === "open" ? "" : "past";
    const button = el("button", {
      class: `sev-${issue.severity} ${past}`,
      text,
      title: label,
      attrs: { type: "button", "aria-label": label },
    });
    button.addEventListener("click", () => this.picked(issue));
    return button;
  }
}

function sameIssue(a: Issue, b: Issue): boolean {
  return a.issue_type === b.issue_type && a.layer === b.layer && a.step === b.step;
}
