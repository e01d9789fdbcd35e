// What is shown, as a table to take away.
import { cellKind, type Series } from "./series";

export type CsvCell = string | number | null;

/** Rows as RFC 4180 wants them. A text that a spreadsheet would run as a formula is made plain by an apostrophe. */
export function csv(rows: readonly (readonly CsvCell[])[]): string {
  return rows.map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
}

/** A series, one line per site and column; missing is empty, NaN and the infinities are named. */
export function seriesRows(series: Series): readonly (readonly CsvCell[])[] {
  const rows: CsvCell[][] = [["site", "first_step", "last_step", "wall_time", ...series.blocks.keys()]];
  series.sites.forEach((site, row) => {
    for (let c = 0; c < series.columns; c++) {
      const at = row * series.columns + c;
      const values = [...series.blocks.values()].map(({ values, bits }) =>
        cellKind(bits[at] ?? 0) === "missing" ? null : (values[at] ?? null),
      );
      rows.push([site, series.first[c] ?? null, series.last[c] ?? null, series.wall[c] ?? null, ...values]);
    }
  });
  return rows;
}

/** A name that every file system takes. */
export function fileName(...parts: readonly string[]): string {
  return parts
    .join("_")
    .replace(/[^\w.-]+/g, "-")
    .slice(0, 120);
}

function csvCell(cell: CsvCell): string {
  if (cell === null) return "";
  const text = typeof cell === "string" && /^[=+\-@\t\r]/.test(cell) ? `'${cell}` : String(cell);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
