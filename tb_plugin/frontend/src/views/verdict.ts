// The answer before anyone clicks: a sentence, then what to do about it.
import type { RunMeta } from "../api";
import { el, keepChildren, setText } from "../dom";
import { formatNumber, formatStep } from "../model/format";
import { isProblem, issueKey, verdict, where, type Issue } from "../model/verdict";

const MARKS = { good: "\u2713", warn: "!", bad: "!", none: "\u2026" } as const;

export class VerdictView {
  readonly root = el("section", { attrs: { "aria-label": "Verdict" } });
  readonly #banner = el("div", { class: "card verdict", attrs: { "data-part": "verdict", role: "status" } });
  readonly #mark = el("div", { class: "mark", attrs: { "aria-hidden": "true" } });
  readonly #headline = el("h1");
  readonly #detail = el("p");
  readonly #courseTitle = el("span");
  readonly #courseText = el("b");
  readonly #learning = el("div", { class: "course", attrs: { "data-part": "course" } }, this.#courseTitle, this.#courseText);
  readonly #open = el("ul", { class: "issues", attrs: { "data-part": "open" } });
  readonly #pastTitle = el("summary");
  readonly #past = el("ul", { class: "issues past", attrs: { "data-part": "past" } });
  readonly #pastBox = el("details", {}, this.#pastTitle, this.#past);

  constructor(private readonly picked: (issue: Issue) => void) {
    this.root.style.cssText = "display:grid;gap:10px";
    this.#banner.append(this.#mark, el("div", { class: "said" }, this.#headline, this.#detail), this.#learning);
    this.root.append(this.#banner, this.#open, this.#pastBox);
    this.#pastBox.hidden = true;
  }

  show(issues: readonly Issue[], { last, lost, loss }: RunMeta): void {
    const said = verdict(issues, last, lost);
    setText(this.#courseTitle, loss ? "loss" : "");
    setText(this.#courseText, loss ? `${formatNumber(loss.first, 3)} \u2192 ${formatNumber(loss.last, 3)}` : "");
    this.#banner.className = `card verdict tone-${said.tone}`;
    setText(this.#mark, MARKS[said.tone]);
    setText(this.#headline, said.headline);
    setText(this.#detail, said.detail);
    const open = issues.filter((issue) => issue.state === "open");
    const past = issues.filter((issue) => issue.state !== "open");
    for (const [list, items] of [[this.#open, open], [this.#past, past]] as const) {
      keepChildren(list, items, issueKey, (issue) => this.#item(issue), () => undefined);
    }
    this.#open.hidden = open.length === 0;
    setText(this.#pastTitle, `${past.length} past ${past.length === 1 ? "issue" : "issues"}`);
    this.#pastBox.hidden = past.length === 0;
  }

  #item(issue: Issue): HTMLLIElement {
    const since =
      issue.healed_step === null
        ? `since step ${formatStep(issue.step)}${issue.state === "ended" ? ", in an earlier session" : ""}`
        : `step ${formatStep(issue.step)} \u2013 ${formatStep(issue.healed_step)}, healed`;
    const button = el(
      "button",
      { class: "card issue", attrs: { type: "button", "data-type": issue.issue_type, "data-problem": String(isProblem(issue)) } },
      el(
        "span",
        { class: "top" },
        el("span", { class: `badge sev-${issue.severity}`, text: issue.issue_type, title: issue.severity }),
        el("span", { class: "layer mono", text: where(issue), title: issue.layers.join("\n") }),
        el("span", { class: "since", text: since }),
      ),
      el("span", { class: "message", text: issue.message }),
      el("span", { class: "advice", text: `\u2192 ${issue.advice}` }),
    );
    button.addEventListener("click", () => this.picked(issue));
    return el("li", {}, button);
  }
}
