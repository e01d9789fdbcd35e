"""Turns findings into issues: hysteresis, one open issue per cause and group of layers, nothing ever raised."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gradflow_export.records.ignored import Ignored, note_of_ignored
from gradflow_export.records.lost import DISABLED
from gradflow_export.records.step_record import Issue, IssueType, Note, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule
from gradflow_export.rules.history import History, Kind, Kinds
from gradflow_export.rules.unclipped import before_clipping

_log = logging.getLogger("gradflow_export")

NOT_TRAINING = frozenset({"eval", "evaluation", "val", "valid", "validation", "test"})

_Key = tuple[IssueType, str, str]
_WHOLE = "\0"
MEANT = "\0ignored"
"""End of the cause of a finding that is ignored, so that it shares no issue with one that is not."""


@dataclass
class _Watch:
    """How often in a row one condition held, or did not, at one layer.

    Attributes:
        held: Whether it held in the last record that shows it, be it for sure or not.
        since: The first step in a row at which it held.
        before: Number of steps directly before that in which nothing was read that would show it.
        read: What was read in every record in which it held: a record that lacks some of it shows nothing else, unless
            that is read only where something is found.
    """

    held: bool = False
    read: frozenset[str] = frozenset()
    since: int = 0
    before: int = 0
    positives: int = 0
    negatives: int = 0
    barred_until: int = -1


@dataclass
class _Open:
    """An issue that is open, and the conditions that keep it so."""

    rule: int
    number: int
    keys: set[_Key]


class Judge:
    """Asks every rule about every record, in order, and keeps the issues of a run; gradient norms are before clipping.

    Args:
        rules: What to look for, as :func:`gradflow_export.profiles.profile` returns them.
        strict: Let a failing rule raise; for tests. Otherwise it is logged once, counted and disabled.
        keep: How many healed issues are remembered; the oldest go first.

    Attributes:
        ignored: What is not reported.
        on_doubt: Called with the step of a record in which a rule that few concern found what it is not yet sure of.
    """

    on_doubt: Callable[[int], object] | None = None

    def __init__(self, rules: Sequence[Rule], strict: bool = False, keep: int = 1000) -> None:
        self._rules = tuple(sorted(rules, key=lambda rule: rule.quiet))
        self._strict, self._keep = strict, keep
        self.ignored = Ignored()
        self._quiet: set[int] = set()
        self._noted: list[Issue | Note] = []
        self._history = History({name for rule in self._rules for name in rule.remembers})
        self._watches: list[dict[_Key, _Watch]] = [{} for _ in self._rules]
        self._open: list[_Open] = []
        self._issues: dict[int, Issue] = {}
        self._count = 0
        self._failures: dict[str, int] = {}
        self._set_aside: set[int] = set()
        self._doubted = False
        self._kinds = Kinds([rule.judged for rule in self._rules])
        self._kind = Kind(())
        self._last: dict[int, StepRecord] = {}

    def begin_again(self) -> None:
        """Forget all records and issues, as for a new session."""
        ignored = self.ignored
        Judge.__init__(self, self._rules, self._strict, self._keep)
        self.ignored = ignored

    @property
    def issues(self) -> tuple[Issue, ...]:
        """Every issue in its latest state, in order of opening; ignored ones are none."""
        return tuple(issue for number, issue in self._issues.items() if number not in self._quiet)

    def take_notes(self) -> list[Note]:
        """Return what would have opened or healed since this was asked last, had it not been ignored, and failures."""
        noted, self._noted = self._noted, []
        return [item if isinstance(item, Note) else note_of_ignored(item) for item in noted]

    @property
    def failures(self) -> Mapping[str, int]:
        """How often each rule failed inside, by name; a rule in here has been disabled."""
        return MappingProxyType(dict(self._failures))

    def check(self, record: StepRecord) -> tuple[Issue, ...]:
        """Judge one record.

        Args:
            record: The next record; steps rise. Records of a validation phase are left alone.

        Returns:
            Issues that opened or became worse (``healed_step`` is None) and issues that healed at this step.
        """
        if record.phase.lower() in NOT_TRAINING:
            return ()
        record = before_clipping(record)
        self._history.add(record)
        self._doubted = False
        events: list[int] = []
        loss = record.value("loss")
        self._kind = kind = self._kinds.of(record)
        for index in kind.rules:
            rule = self._rules[index]
            if rule.final:
                self._last[index] = record
            if index in self._set_aside or (rule.quiet and self._open and self._numerical()):
                continue
            events += self._ask(index, rule, record, loss)
        for index in sorted({item.rule for item in self._open if item.number not in events} - self._set_aside):
            events += self._ask(index, self._rules[index], record, loss, concerned=False)
        kind.last = record.step
        self._noted += [self._issues[number] for number in events if number in self._quiet]
        told = tuple(self._issues[number] for number in events if number not in self._quiet)
        if self._open or any(self._watches):
            self._forget(record.step)
        if self._doubted and self.on_doubt is not None:
            self.on_doubt(record.step)
        return told

    def end(self) -> tuple[Issue, ...]:
        """Judge the end of the run; return what opened or became worse because nothing is left to come."""
        self._history.ended = True
        last, self._last = ({} if self._numerical() else self._last), {}
        asked = [
            self._ask(index, self._rules[index], last[index], None) for index in sorted(last.keys() - self._set_aside)
        ]
        return tuple(self._issues[number] for events in asked for number in events if number not in self._quiet)

    def _ask(self, index: int, rule: Rule, record: StepRecord, loss: float | None, concerned: bool = True) -> list[int]:
        """Return the places of the issues that a rule opened or closed; what it returns may be what fails."""
        try:
            if not concerned:
                return self._heal(index, rule, record.step, refuted=True)
            findings = _split(rule.check(record, self._history), self.ignored)
            if not findings:
                self._kind.clean.add(index)
            if findings or (self._watches[index] and not self._blind(index, loss)):
                return self._settle(index, rule, record, findings)
        except Exception:
            if self._strict:
                raise
            self._failures[rule.name] = self._failures.get(rule.name, 0) + 1
            self._set_aside.add(index)
            self._noted.append(Note(DISABLED, f"rule {rule.name}", record.step))
            _log.warning("rule %r failed at step %d and is disabled", rule.name, record.step, exc_info=True)
        return []

    def _settle(self, index: int, rule: Rule, record: StepRecord, findings: tuple[Finding, ...]) -> list[int]:
        """Return the numbers of the issues that opened, became worse or healed."""
        watches, step = self._watches[index], record.step
        read, usual = rule.judged.intersection((*record.metrics, *record.facts)), self._kinds.usual(index)
        seen: dict[_Key, Finding] = {}
        for finding in findings:
            for key in _keys(rule, finding):
                seen.setdefault(key, finding)
        for key, finding in seen.items():
            watch = watches.setdefault(key, _Watch())
            if not watch.held:
                last = self._kinds.last(rule.shown, record)
                before = max(step - 1 - max(last, self._history.begun), 0)  # none where the end is judged
                watch.since, watch.before, watch.read = step, before, read
            since = step + 1 if finding.since is None else max(finding.since, self._history.begun + 1)
            if since <= watch.since:
                known, last = finding.before, self._history.last_read(rule.shown, since)
                watch.since, watch.before = since, since - 1 - last if known is None else known
            watch.read &= read
        for key, watch in watches.items():
            shown = (watch.read & usual) <= read
            watch.held = key in seen or (watch.held and not shown)
            if key in seen and seen[key].sure:
                watch.positives, watch.negatives = watch.positives + 1, 0
            elif key in seen or shown:
                watch.positives, watch.negatives = 0, watch.negatives + 1
        events = self._heal(index, rule, step)
        events += filter(None, [self._raise_issue(index, rule, step, finding) for finding in findings if finding.sure])
        return events

    def _heal(self, index: int, rule: Rule, step: int, refuted: bool = False) -> list[int]:
        """Close what has not been found for long, or what the history now refutes."""
        events: list[int] = []
        watches = self._watches[index]
        for item in [item for item in self._open if item.rule == index]:
            issue, over = self._issues[item.number], all(watches[key].negatives >= rule.heal for key in item.keys)
            if rule.refuted(issue, self._history) if refuted else over and not rule.lasts(issue, self._history):
                self._issues[item.number] = replace(issue, healed_step=step)
                self._open.remove(item)
                events.append(item.number)
                for key in item.keys:
                    watches[key].barred_until = step + rule.cooldown
        return events

    def _raise_issue(self, index: int, rule: Rule, step: int, finding: Finding) -> int | None:
        watches = self._watches[index]
        keys = _keys(rule, finding)
        late = self._history.ended and finding.severity < Severity.MEDIUM  # the end is no time for remarks
        if late or _explained(rule, step, finding, self._issues.values()):
            return None
        mine = next((item for item in self._open if item.rule == index and not item.keys.isdisjoint(keys)), None)
        if mine is not None and self._grow(mine, finding):
            return mine.number
        free = [key for key in keys if watches[key].barred_until < step and not self._covered(rule, key, finding)]
        if not any(finding.urgent or watches[key].positives >= rule.patience for key in free):
            self._doubted |= bool(free) and self._kinds.seldom(index) and finding.severity >= Severity.MEDIUM
            return None
        layers = tuple(key[2] for key in free) if rule.by_layer else finding.layers
        finding = finding.about(layers) if finding.about is not None else finding
        since, earlier = min((watches[key].since, -watches[key].before) for key in free)
        self._count += 1
        self._issues[self._count] = Issue(
            issue_type=finding.issue_type,
            severity=finding.severity,
            layer=layers[0],
            step=since,
            value=finding.value,
            threshold=finding.threshold,
            message=finding.message,
            advice=finding.advice,
            layers=layers,
            cause=finding.origin,
            before=-earlier,
        )
        self._open.append(_Open(index, self._count, set(free)))
        if free[0][1].endswith(MEANT):
            self._quiet.add(self._count)
        return self._count

    def _grow(self, item: _Open, finding: Finding) -> bool:
        """Keep an open issue's worst state, and return whether it is worse; its key never changes."""
        issue = self._issues[item.number]
        if finding.severity <= issue.severity:
            return False
        self._issues[item.number] = replace(
            issue,
            severity=finding.severity,
            value=finding.value,
            threshold=finding.threshold,
            message=finding.message,
            advice=finding.advice,
        )
        return True

    def _covered(self, rule: Rule, key: _Key, finding: Finding) -> bool:
        """Whether an open issue already reports this: the same type, and the same layer where layers count.

        A remark covers remarks alone.
        """
        kind, cause, layer = key
        for item in self._open:
            if (item.number in self._quiet) != cause.endswith(MEANT):
                continue
            other, issue = self._rules[item.rule], self._issues[item.number]
            weighty = issue.severity >= min(finding.severity, Severity.MEDIUM)
            alike = issue.issue_type is kind and other.fixed == rule.fixed and weighty
            if alike and (layer in issue.layers or layer == _WHOLE):
                return True
        return False

    def _numerical(self, but: int | None = None) -> bool:
        """Whether the run is non-finite, as another rule than ``but`` found."""
        return IssueType.NUMERICAL in {self._issues[item.number].issue_type for item in self._open if item.rule != but}

    def _blind(self, index: int, loss: float | None) -> bool:
        """Whether a rule that finds nothing has seen nothing, because the run is not finite."""
        return self._numerical(index) or (loss is not None and not math.isfinite(loss))

    def _forget(self, step: int) -> None:
        """Drop what can no longer matter, so that memory stays bounded."""
        in_use = {(item.rule, key) for item in self._open for key in item.keys}
        for index, (rule, watches) in enumerate(zip(self._rules, self._watches, strict=True)):
            for key, watch in tuple(watches.items()):
                over = not watch.held and watch.negatives >= rule.heal
                if over and watch.barred_until < step and (index, key) not in in_use:
                    del watches[key]
        while len(self._issues) - len(self._open) > self._keep:
            numbers = {item.number for item in self._open}
            oldest = next(number for number in self._issues if number not in numbers)
            del self._issues[oldest]
            self._quiet.discard(oldest)


def _explained(rule: Rule, step: int, finding: Finding, known: Iterable[Issue]) -> bool:
    """Whether another issue explains a finding, or is more than a remark on the same and over by now."""

    def explains(issue: Issue) -> bool:
        if issue.issue_type in finding.follows_from or issue.cause in finding.follows_from:
            over = issue.healed_step is not None and issue.healed_step + rule.cooldown < step
            return not over and issue.severity >= min(finding.severity, Severity.MEDIUM)  # remarks explain remarks
        same = (finding.issue_type, finding.layers[:1]) == (issue.issue_type, (issue.layer,))
        begun = finding.since is not None and finding.since < (issue.healed_step or 0)
        return same and begun and finding.severity < Severity.MEDIUM <= issue.severity

    return any(map(explains, known))


def _keys(rule: Rule, finding: Finding) -> list[_Key]:
    return [(finding.issue_type, finding.cause, unit) for unit in (finding.layers if rule.by_layer else (_WHOLE,))]


def _split(findings: tuple[Finding, ...], ignored: Ignored) -> tuple[Finding, ...]:
    """Return findings, those of which some layers are ignored in two parts; see :data:`MEANT`."""
    out: list[Finding] = []
    for finding in findings if ignored.pairs else ():
        meant = tuple(layer for layer in finding.layers if ignored.covers(finding.issue_type, layer))
        others = tuple(layer for layer in finding.layers if layer not in meant)
        out += [replace(finding, layers=others)] if others else []
        out += [replace(finding, layers=meant, cause=finding.cause + MEANT)] if meant else []
    return tuple(out) if ignored.pairs else findings
