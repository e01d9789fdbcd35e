// The style sheet, part by part; later parts count for more.
import base from "./base.css";
import answer from "./answer.css";
import map from "./map.css";
import charts from "./charts.css";
import tables from "./tables.css";
import parts from "./parts.css";
import media from "./media.css";

export const STYLE = [base, answer, map, charts, tables, parts, media].join("\n");
