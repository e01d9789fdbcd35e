"""The gain report: one small HTML page without scripts that says what is wrong and shows gains by depth and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from gradflow_export.records.step_record import Issue
from gradflow_export.records.verdict import Verdict
from gradflow_export.writers.gain_advice import gain_advice
from gradflow_export.writers.gain_book import NORM, Flags, Floats, GainMap, Profile, extremeness

MOST_ROWS = 40
MOST_ISSUES = 12

_LEVELS = 6
_ROW, _NAMES, _MAP, _BARS = 16, 190, 480, 260
_NAME_LETTERS = 26

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1c1e;--soft:#5f6368;--line:#d5d8dc;--none:#e9eaec;--red:#c0392b;
--blue:#1f5fae;--bar:#4a6fa5;--bad:#b3261e;--good:#1e6b3a}
@media(prefers-color-scheme:dark){:root{--bg:#17181a;--fg:#e8e8ea;--soft:#a3a7ad;--line:#3a3d42;--none:#2a2c30;
--red:#ff7b63;--blue:#5aa9ff;--bar:#7fa6de;--bad:#ff8a80;--good:#7bd49a}}
body{margin:0;padding:14px;background:var(--bg);color:var(--fg);font:13px/1.45 system-ui,sans-serif}
h1{font-size:16px;margin:0 0 2px}h2{font-size:13px;margin:14px 0 4px}p{margin:0 0 6px;color:var(--soft)}
.bad,.warn{color:var(--bad)}.good{color:var(--good)}.figures{display:flex;flex-wrap:wrap;gap:0 28px}
section p{max-width:670px}svg{display:block;max-width:100%;height:auto}
text{fill:var(--fg);font:11px system-ui,sans-serif}.soft{fill:var(--soft)}
.none{fill:var(--none)}.r{fill:var(--red)}.b{fill:var(--blue)}.bar{fill:var(--bar)}.over{fill:transparent}
.over:hover{fill:var(--fg);fill-opacity:.12}.frame{fill:none;stroke:var(--line)}.odd{fill:var(--fg)}
.ink{stroke:var(--bg);fill:none}
table{border-collapse:collapse;margin-top:4px}th,td{text-align:left;padding:3px 12px 3px 0;vertical-align:top;
border-top:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500;border:0}td.w{white-space:normal;overflow-wrap:anywhere}
"""


@dataclass(frozen=True)
class Rows:
    """Neighbouring layers that share a row of a figure, so that a page of 4000 layers stays small.

    Attributes:
        names: What is written beside each row.
        titles: What is said of each row in full.
        starts: Number of the first layer of each row.
    """

    names: tuple[str, ...]
    titles: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether a row stands for several layers."""
        return len(self.starts) > 1 and self.starts[1] > 1

    @classmethod
    def of(cls, sites: Sequence[str], most: int = MOST_ROWS) -> Rows:
        """Spread layers over a number of rows.

        Args:
            sites: Names in depth order.
            most: Greatest number of rows.
        """
        each = max(1, math.ceil(len(sites) / most))
        starts = tuple(range(0, len(sites), each))
        names, titles = [], []
        for start in starts:
            group = [printable(site) or "(whole model)" for site in sites[start : start + each]]
            more = f" +{len(group) - 1}" if len(group) > 1 else ""
            names.append(_short(group[0], _NAME_LETTERS - len(more)) + more)
            titles.append(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}")
        return cls(tuple(names), tuple(titles), starts)

    def worst(self, values: Floats, present: Flags) -> tuple[Floats, Flags]:
        """Return of each row the value farthest from 1.

        Args:
            values: Shape ``[..., sites]``.
            present: False where nothing arrived. Shape: as ``values``.

        Returns:
            Values and presence. Shape: ``[..., rows]``.
        """
        far = extremeness(values, present)
        ends = (*self.starts[1:], values.shape[-1])
        picked = np.stack(
            [np.argmax(far[..., a:b], axis=-1) + a for a, b in zip(self.starts, ends, strict=True)], axis=-1
        )
        return np.take_along_axis(values, picked, axis=-1), np.take_along_axis(present, picked, axis=-1)


def gain_report(
    gains: GainMap | None,
    norms: Profile | None,
    issues: Sequence[Issue],
    verdict: Verdict,
    *,
    step: int,
    found: int,
    model: str = "",
) -> str:
    """Return the report as one HTML page: no scripts, nothing loaded, light and dark.

    Args:
        gains: The gains so far; ``None`` where no blocks are watched.
        norms: The newest gradient norms by depth.
        issues: What is open, worst first.
        verdict: On the run so far.
        step: The newest step.
        found: How many issues were found so far, healed ones included.
        model: Name of the model.
    """
    what = f" of {escape(_short(printable(model), 60))}" if model else ""
    body = [
        f"<h1><span class={verdict.tone}>{escape(_short(printable(str(verdict)), 160, start=True))}</span></h1>",
        f"<p>Gain report{what} at step {step}; {_healed(found, len(issues))}</p>",
    ]
    body += ["<div class=figures>", _map_figure(gains), _norm_figure(norms), "</div>", _advice(gains)]
    body.append(_issue_table(issues))
    # The policy is a second fence behind the escaping: whatever a layer is called, no script of this page ever runs.
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8"><title>Gain report</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def printable(text: str) -> str:
    """Replace what cannot be shown or encoded: control characters, changes of direction, lone surrogates."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _healed(found: int, still: int) -> str:
    return f"{found} issue{'' if found == 1 else 's'} found so far, {still} open"


def _map_figure(gains: GainMap | None) -> str:
    title = "Gain by depth and step"
    if gains is None or not gains.sites:
        why = "No gain was measured: no chain of blocks is watched, or none was read yet."
        return f"<section><h2>{title}</h2><p>{why}</p></section>"
    rows = Rows.of(gains.sites)
    values, present = rows.worst(gains.values, gains.present)
    columns, count = values.shape
    body = [_names(rows), f'<g transform="translate({_NAMES} 0) scale({_MAP / columns:.4f} {_ROW})">']
    body += _cells(values, present)
    body.append("</g>")
    body += (
        _over(_NAMES, row, _MAP, f"{rows.titles[row]}: {_range(values[:, row], present[:, row], gains.spans)}")
        for row in range(count)
    )
    body.append(f"<rect class=frame x={_NAMES} width={_MAP} height={count * _ROW} />")
    body += _step_axis(gains.spans, count * _ROW)
    joined = f"Each column keeps the extreme of {gains.readings} readings. " if gains.readings > 1 else ""
    joined += "Layers marked + share a row with those that follow; it shows their extreme. " if rows.shared else ""
    legend = (
        f"{joined}<span style='color:var(--blue)'>Blue: the block damps the gradient</span>, uncoloured: it keeps it, "
        "<span style='color:var(--red)'>red: it enlarges it</span>; full colour from 8-fold on. Grey: not measured, "
        "crossed: NaN or Inf."
    )
    return (
        f"<section><h2>{title}</h2>{_svg(_NAMES + _MAP + 10, count * _ROW + 20, title, body)}<p>{legend}</p></section>"
    )


def _cells(values: Floats, present: Flags) -> Iterable[str]:
    """Yield one path per colour; runs of equal cells are one piece of it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.log2(np.abs(values)) * 2
    odd = present & ~np.isfinite(values)
    levels = np.clip(np.rint(np.where(np.isnan(steps), 0, steps)), -_LEVELS, _LEVELS).astype(int)
    kinds = np.where(~present, 100, np.where(odd, 200, levels))
    paths: dict[int, list[str]] = {}
    for row in range(kinds.shape[1]):
        line = kinds[:, row]
        edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        for start, end in pairwise(edges):
            kind = int(line[start])
            if kind:
                paths.setdefault(kind, []).append(f"M{start} {row}h{end - start}v1h{start - end}z")
                if kind == 200:
                    crosses = (f"M{at} {row}l1 1m-1 0l1-1" for at in range(start, end))
                    paths.setdefault(201, []).extend(crosses)
    for kind, pieces in sorted(paths.items()):
        yield f"<path {_paint(kind)} d='{''.join(pieces)}'/>"


def _paint(kind: int) -> str:
    if kind == 201:
        return "class=ink vector-effect=non-scaling-stroke"
    if kind >= 100:
        return "class=odd" if kind == 200 else "class=none"
    return f"class={'r' if kind > 0 else 'b'} fill-opacity={abs(kind) / _LEVELS:.2f}"


def _range(values: Floats, present: Flags, spans: Sequence[tuple[int, int]]) -> str:
    if not present.any():
        return "not measured"
    worst = int(np.argmax(extremeness(values, present)))
    first, last = spans[worst]
    when = f"step {first}" if first == last else f"steps {first} to {last}"
    good = values[present & np.isfinite(values)]
    between = f"gain {good.min():.3g} to {good.max():.3g}, " if len(good) else ""
    return f"{between}furthest from 1: {values[worst]:.3g} in {when}"


def _step_axis(spans: Sequence[tuple[int, int]], top: int) -> Iterable[str]:
    count = len(spans)
    for at in sorted({0, count // 4, count // 2, 3 * count // 4, count - 1}):
        anchor = "start" if at == 0 else "end" if at == count - 1 else "middle"
        step = spans[at][1] if at == count - 1 else spans[at][0]
        x = _NAMES + _MAP * (at + (at == count - 1)) / count
        if count > 12 or at in (0, count - 1):
            told = f"step {step}" if at == 0 else f"{step}"
            yield f"<text class=soft x={x:.0f} y={top + 14} text-anchor={anchor}>{told}</text>"


def _norm_figure(norms: Profile | None) -> str:
    if norms is None or not norms.sites:
        return ""
    what = "the blocks' outputs" if norms.metric == NORM else "the layers' parameters"
    title = f"Gradient norm of {what} at step {norms.step}"
    rows = Rows.of(norms.sites)
    values, present = rows.worst(norms.values, norms.present)
    good = present & np.isfinite(values) & (values > 0)
    logs = np.log10(values, where=good, out=np.zeros_like(values))
    low, high = (math.floor(logs[good].min()), math.ceil(logs[good].max())) if good.any() else (0, 1)
    low, high = (low - 1, high) if low == high else (low, high)
    body, bottom = [_names(rows)], len(values) * _ROW
    for row, value in enumerate(values.tolist()):
        y = row * _ROW
        if good[row]:
            width = max(2.0, _BARS * (float(logs[row]) - low) / (high - low))
            body.append(f"<rect class=bar x={_NAMES} y={y + 4} width={width:.1f} height=8 />")
        else:
            text = "0" if present[row] and value == 0 else f"{value}" if present[row] else "not measured"
            body.append(f"<text class=soft x={_NAMES + 4} y={y + 12}>{text}</text>")
        said = f"{value:.4g}" if present[row] else "not measured"
        body.append(_over(_NAMES, row, _BARS, f"{rows.titles[row]}: gradient norm {said}"))
    body.append(f'<path class=frame d="M{_NAMES} 0v{bottom}h{_BARS}"/>')
    for power, anchor, x in ((low, "start", _NAMES), (high, "end", _NAMES + _BARS)):
        body.append(f"<text class=soft x={x} y={bottom + 14} text-anchor={anchor}>1e{power}</text>")
    return f"<section><h2>{escape(title)}</h2>{_svg(_NAMES + _BARS + 10, bottom + 20, title, body)}</section>"


def _advice(gains: GainMap | None) -> str:
    """Say what most of the newest gains have in common, and what to do about it."""
    newest = None if gains is None else gains.newest
    if newest is None:
        return ""
    each = zip(newest.values.tolist(), newest.present.tolist(), strict=True)
    told, *advice = gain_advice(value if here else None for value, here in each) or ("",)
    if not told:
        return ""
    items = "".join(f"<li>{escape(what)}" for what in advice)
    return f"<section><h2>Gains at step {newest.step}</h2><p>{escape(told)}</p><ul>{items}</ul></section>"


def _issue_table(issues: Sequence[Issue]) -> str:
    if not issues:
        return ""
    head = "".join(f"<th>{name}" for name in ("type", "severity", "layer", "since step", "value", "what to do"))
    body = "".join(
        f"<tr><td>{issue.issue_type.value}<td>{issue.severity.name}"
        f"<td class=w>{escape(_short(printable(issue.layer) or '(whole model)', 80))}{_others(issue)}<td>{issue.step}"
        f"<td>{issue.value:.4g} (mark {issue.threshold:.4g})"
        f"<td class=w>{escape(_short(printable(issue.advice), 300, start=True))}"
        for issue in issues[:MOST_ISSUES]
    )
    rest = f"<p>and {len(issues) - MOST_ISSUES} more</p>" if len(issues) > MOST_ISSUES else ""
    return f"<h2>Open issues</h2><table><tr>{head}{body}</table>{rest}"


def _others(issue: Issue) -> str:
    return f" and {len(issue.layers) - 1} more" if len(issue.layers) > 1 else ""


def _names(rows: Rows) -> str:
    return "".join(
        f"<text x={_NAMES - 6} y={row * _ROW + 12} text-anchor=end>{escape(name)}</text>"
        for row, name in enumerate(rows.names)
    )


def _over(x: int, row: int, width: int, text: str) -> str:
    told = escape(_short(text, 240))
    return f"<rect class=over x={x} y={row * _ROW} width={width} height={_ROW}><title>{told}</title></rect>"


def _svg(width: int, height: int, title: str, body: Iterable[str]) -> str:
    return (
        f'<svg width={width} height={height} viewBox="0 0 {width} {height}" role=img aria-label="{escape(title)}">'
        f"{''.join(body)}</svg>"
    )


def _short(text: str, letters: int, *, start: bool = False) -> str:
    """Cut a text; of a layer's name the end is kept, which is what tells layers apart."""
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1]}…" if start else f"…{text[-(letters - 1) :]}"
