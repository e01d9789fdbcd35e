// What runs are called: their folders, and where several share one, what tells them apart.
import type { RunSummary } from "../api";
import { formatCount } from "./format";

const BESIDE = / \[\d+-[0-9a-f-]+\]$/;
const labels = new Map<string, string>();

function folderText(run: string): string {
  const folder = run.replace(BESIDE, "");
  return folder === "." ? "(root)" : folder.replace(/\/\.$/, "");
}

/** Learns what tells the runs of one folder apart: their model, its size, else when they began. */
export function nameRuns(runs: readonly RunSummary[]): void {
  const folders = new Map<string, RunSummary[]>();
  for (const run of runs) {
    const folder = run.run.replace(BESIDE, "");
    const found = folders.get(folder);
    if (found === undefined) folders.set(folder, [run]);
    else found.push(run);
  }
  for (const found of folders.values()) {
    const facts: readonly ((run: RunSummary) => string)[] = [
      ({ model }) => model ?? "",
      ({ parameters }) => (parameters ? `${formatCount(parameters)} parameters` : ""),
    ];
    const telling = facts.filter((fact) => new Set(found.map(fact)).size > 1);
    const said = (run: RunSummary): string =>
      telling
        .map((fact) => fact(run))
        .filter(Boolean)
        .join(", ");
    const unique = new Set(found.map(said)).size === found.length;
    for (const run of found) {
      const text = [said(run), unique || run.started === null ? "" : `began ${when(run.started)}`]
        .filter(Boolean)
        .join(", ");
      if (found.length > 1) labels.set(run.run, `${folderText(run.run)}: ${text}`);
      else labels.delete(run.run);
    }
  }
}

export function runLabel(run: string): string {
  return labels.get(run) ?? folderText(run);
}

function when(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium", hour12: false });
}
