// The answer before anyone clicks: a sentence, how the loss went, and what to do.
import type { RunMeta } from "../api";
import { el, keepChildren, setText, svg } from "../dom";
import { formatNumber, formatStep, threeDigits } from "../model/format";
import { groupIssues, type Group } from "../model/groups";
import { sparkline } from "../model/health";
import { finiteRow, lastReading, type Series } from "../model/series";
import { saidOf, type Places } from "../model/architecture";
import {
  fixOf,
  isProblem,
  issueKey,
  sentence,
  since,
  where,
  whereIn,
  type Issue,
  type Verdict,
} from "../model/verdict";

const MARKS = { good: "\u2713", warn: "!", bad: "!", none: "\u2026" } as const;
const [OPEN_CARDS, MOST_LISTED, SPARK_WIDTH, SPARK_HEIGHT] = [3, 40, 170, 40];

/** What is said of how an issue went on, by the issue's key. */
export type Courses = ReadonlyMap<string, string>;

export class VerdictView {
  readonly root = el("section", { attrs: { "aria-label": "Verdict" } });
  readonly #banner = el("div", { class: "card verdict", attrs: { "data-part": "verdict", role: "status" } });
  readonly #mark = el("div", { class: "mark", attrs: { "aria-hidden": "true" } });
  readonly #headline = el("h1");
  readonly #detail = el("p");
  readonly #fix = el("p", { class: "fix", attrs: { "data-part": "fix" } });
  readonly #other = el("p", { class: "other", attrs: { "data-part": "verdict-other" } });
  readonly #path = svg("path", {});
  readonly #spark = svg(
    "svg",
    {
      width: SPARK_WIDTH,
      height: SPARK_HEIGHT,
      role: "img",
      "aria-label": "loss over the whole run",
      "data-part": "loss-spark",
    },
    this.#path,
  );
  readonly #courseTitle = el("span");
  readonly #courseText = el("b");
  readonly #learning = el(
    "div",
    { class: "course", attrs: { "data-part": "course" } },
    this.#courseTitle,
    this.#courseText,
  );
  readonly #open = el("ul", { class: "issues", attrs: { "data-part": "open" } });
  readonly #moreTitle = el("summary");
  readonly #more = el("ul", { class: "issues", attrs: { "data-part": "more" } });
  readonly #moreBox = el("details", {}, this.#moreTitle, this.#more);
  readonly #pastTitle = el("summary");
  readonly #past = el("ul", { class: "issues past", attrs: { "data-part": "past" } });
  readonly #pastBox = el("details", {}, this.#pastTitle, this.#past);
  #courses: Courses = new Map();
  #first: number | null = null;
  /** Where a layer is called, and where its class is defined. */
  #places: (layer: string) => Places = () => ({ called: "", defined: "" });

  /** `around` shows the readings before and after the step at which an issue began. */
  constructor(
    private readonly picked: (issue: Issue) => void,
    private readonly around: (issue: Issue) => void,
  ) {
    this.root.className = "answer";
    this.#banner.append(
      this.#mark,
      el("div", { class: "said" }, this.#headline, this.#detail, this.#fix, this.#other),
      this.#spark,
      this.#learning,
    );
    this.root.append(this.#banner, this.#open, el("div", { class: "folds" }, this.#moreBox, this.#pastBox));
    this.#pastBox.hidden = this.#moreBox.hidden = this.#other.hidden = true;
  }

  show(issues: readonly Issue[], { loss, said }: RunMeta, places: (layer: string) => Places): void {
    this.#places = places;
    const fix = fixOf(issues);
    setText(this.#courseTitle, loss ? "loss" : "");
    setText(this.#courseText, loss ? `${threeDigits(loss.first)} \u2192 ${threeDigits(loss.last)}` : "");
    this.#learning.title = loss ? "Medians of the first five and the last five losses" : "";
    this.#first = loss?.first ?? null;
    this.#banner.className = `card verdict tone-${said.tone}`;
    setText(this.#mark, MARKS[said.tone]);
    setText(this.#headline, sentence(said.headline));
    setText(this.#detail, sentence(said.detail));
    setText(this.#fix, fix === "" ? "" : `\u2192 ${fix}`);
    this.#fix.title = fix;
    this.#fix.hidden = fix === "";
    const groups = groupIssues(issues.filter((issue) => issue.state !== "healed"));
    const past = issues.filter((issue) => issue.state === "healed");
    this.#list(this.#open, groups.slice(0, OPEN_CARDS));
    this.#list(this.#more, groups.slice(OPEN_CARDS));
    this.#list(this.#past, groupIssues(past));
    this.#open.hidden = groups.length === 0;
    const folded = groups.length - OPEN_CARDS;
    setText(
      this.#moreTitle,
      `${formatStep(Math.max(0, folded))} more ${folded === 1 ? "kind of issue" : "kinds of issues"}`,
    );
    this.#moreBox.hidden = folded <= 0;
    setText(this.#pastTitle, `${formatStep(past.length)} past ${past.length === 1 ? "issue" : "issues"}`);
    this.#pastBox.hidden = past.length === 0;
  }

  /** The verdict of the run compared with, null for none. */
  showOther(said: readonly [string, Verdict] | null): void {
    this.#other.hidden = said === null;
    if (said === null) return;
    const [run, { tone, headline, detail }] = said;
    this.#other.className = `other tone-${tone}`;
    setText(this.#other, `${MARKS[tone]} ${run}: ${headline}: ${detail}`);
  }

  /** The loss of the whole run, whatever is in view below; null where the run holds none. */
  showLoss(series: Series | null): void {
    const block = series?.blocks.values().next().value;
    const values =
      series === null || block === undefined ? [] : finiteRow(series, block, 0, false).map((value) => value ?? NaN);
    this.#spark.toggleAttribute("hidden", values.length < 2);
    this.#path.setAttribute("d", pathOf(values));
    // Medians of finite losses say nothing of a run that ends without one.
    const last = (block === undefined ? null : lastReading(block)) ?? 0;
    this.#courseText.classList.toggle("broken", !Number.isFinite(last));
    if (Number.isFinite(last)) return;
    setText(this.#courseTitle, "loss");
    setText(
      this.#courseText,
      `${this.#first === null ? "" : `${threeDigits(this.#first)} \u2192 `}${formatNumber(last)}`,
    );
    this.#learning.title = "The median of the first five finite losses, and the last one";
  }

  /** Says on each card how its quantity is now, and how it was when it was worst. */
  showCourses(courses: Courses): void {
    this.#courses = courses;
    for (const button of this.root.querySelectorAll<HTMLElement>(".issue")) this.#course(button);
  }

  #course(button: HTMLElement): void {
    const node = button.querySelector<HTMLElement>(".now");
    const text = this.#courses.get(button.dataset["key"] ?? "") ?? "";
    if (node === null) return;
    setText(node, text);
    node.hidden = text === "";
  }

  #list(list: HTMLElement, groups: readonly Group[]): void {
    const key = ({ key, head, rest, also }: Group): string =>
      [key, issueKey(head), rest.length, issueKey(rest.at(-1) ?? head), ...also.map(issueKey)].join("\n");
    keepChildren(
      list,
      groups,
      key,
      (group) => this.#group(group),
      () => undefined,
    );
  }

  #group({ head, rest, also, layers }: Group): HTMLLIElement {
    const card = el("li", { class: "card group" }, this.#item(head, whereIn(head.layer, layers.length)));
    const closer = el("button", {
      class: "around",
      text: `20 readings around step ${formatStep(head.step)}`,
      attrs: { type: "button", "data-part": "around" },
    });
    closer.addEventListener("click", () => this.around(head));
    card.append(closer);
    const places = saidOf(this.#places(head.layer));
    if (places.length > 0)
      card.append(
        el("span", {
          class: "source mono",
          text: places.join(", "),
          title: `${head.layer}: ${places.join(", ")}`,
          attrs: { "data-part": "source" },
        }),
      );
    if (also.length > 0)
      card.append(
        this.#folded(also, `also seen: ${[...new Set(also.map(({ issue_type }) => issue_type))].join(", ")}`),
      );
    if (rest.length > 0) card.append(this.#folded(rest, `${formatStep(rest.length)} more of this kind`));
    return card;
  }

  #folded(issues: readonly Issue[], title: string): HTMLElement {
    const listed = issues.slice(0, MOST_LISTED).map((issue) => el("li", {}, this.#item(issue, where(issue))));
    const left = issues.length - listed.length;
    const more =
      left > 0
        ? el("li", { class: "left", text: `and ${formatStep(left)} more: the table below names their layers` })
        : null;
    return el("details", { class: "rest" }, el("summary", { text: title }), el("ul", {}, ...listed, more));
  }

  #item(issue: Issue, place: string): HTMLElement {
    const when =
      issue.healed_step === null
        ? `${since(issue)}${issue.state === "ended" ? ", in an earlier session" : ""}`
        : `step ${formatStep(issue.step)} \u2013 ${formatStep(issue.healed_step)}, healed`;
    const button = el(
      "button",
      {
        class: "issue",
        attrs: {
          type: "button",
          "data-type": issue.issue_type,
          "data-key": issueKey(issue),
          "data-problem": String(isProblem(issue)),
        },
      },
      el(
        "span",
        { class: "top" },
        el("span", { class: `badge sev-${issue.severity}`, text: issue.issue_type, title: issue.severity }),
        el("span", { class: "layer mono", text: place, title: issue.layers.slice(0, MOST_LISTED).join("\n") }),
        el("span", { class: "since", text: when }),
      ),
      el("span", { class: "message", text: issue.message, title: issue.message }),
      el("span", { class: "now", attrs: { "data-part": "now" } }),
      el("span", { class: "advice", text: `\u2192 ${issue.advice}`, title: issue.advice }),
    );
    this.#course(button);
    button.addEventListener("click", () => {
      for (const other of this.root.querySelectorAll(".issue.chosen")) other.classList.remove("chosen");
      button.classList.add("chosen");
      this.picked(issue);
    });
    return button;
  }
}

function pathOf(values: readonly number[]): string {
  let [path, open] = ["", false];
  for (const point of sparkline(values, false, SPARK_WIDTH, SPARK_HEIGHT)) {
    if (point !== null) path += `${open ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    open = point !== null;
  }
  return path;
}
