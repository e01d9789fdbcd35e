// The answer before anyone clicks: a sentence, then what to do about it.
import { el } from "../dom";
import { formatStep } from "../model/format";
import { isProblem, verdict, where, type Issue } from "../model/verdict";

const MARKS = { good: "\u2713", warn: "!", bad: "!", none: "\u2026" } as const;

export class VerdictView {
  readonly root = el("section", { attrs: { "aria-label": "Verdict" } });
  private readonly banner = el("div", { class: "card verdict", attrs: { "data-part": "verdict" } });
  private readonly open = el("ul", { class: "issues", attrs: { "data-part": "open" } });
  private readonly pastTitle = el("summary");
  private readonly past = el("ul", { class: "issues past", attrs: { "data-part": "past" } });
  private readonly pastBox = el("details", {}, this.pastTitle, this.past);

  constructor(private readonly picked: (issue: Issue) => void) {
    this.root.style.cssText = "display:grid;gap:10px";
    this.root.append(this.banner, this.open, this.pastBox);
    this.pastBox.hidden = true;
  }

  show(issues: readonly Issue[], last: number | null): void {
    const said = verdict(issues, last);
    this.banner.className = `card verdict tone-${said.tone}`;
    this.banner.replaceChildren(
      el("div", { class: "mark", text: MARKS[said.tone], attrs: { "aria-hidden": "true" } }),
      el("div", {}, el("h1", { text: said.headline }), el("p", { text: said.detail })),
    );
    const open = issues.filter((issue) => issue.state === "open");
    const past = issues.filter((issue) => issue.state !== "open");
    this.open.replaceChildren(...open.map((issue) => this.item(issue)));
    this.open.hidden = open.length === 0;
    this.past.replaceChildren(...past.map((issue) => this.item(issue)));
    this.pastTitle.textContent = `${past.length} past ${past.length === 1 ? "issue" : "issues"}`;
    this.pastBox.hidden = past.length === 0;
  }

  private item(issue: Issue): HTMLLIElement {
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
