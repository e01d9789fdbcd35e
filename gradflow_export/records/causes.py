"""Which issue explains which: what people read names each cause once, with its consequences (floor 0).

Types form a graph without cycles, :data:`EXPLAINS`. Between two issues of a run it holds where they overlap in time
and, for some types, in layers. The flat list that programs read keeps every issue, each with what explains it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType

from gradflow_export.records.issues import Issue, IssueType, Severity

Key = tuple[str, str, int]

LAG = 1
"""Steps by which a consequence may be seen before what explains it."""


class Where(enum.Enum):
    """Where a consequence shows."""

    LAYERS = enum.auto()
    """In the layers of the cause, in what lies within them, or around them."""
    RUN = enum.auto()
    """Anywhere in the model."""


_L, _R, _T = Where.LAYERS, Where.RUN, IssueType
_STEPS = MappingProxyType({_T.EXPLODING: _R, _T.LOSS_SPIKE: _R, _T.UNSTABLE: _R, _T.DIVERGING: _R})
_SHUT = MappingProxyType({_T.VANISHING: _R, _T.STAGNATION: _L, _T.BOTTLENECK: _L})

EXPLAINS: Mapping[IssueType, Mapping[IssueType, Where]] = MappingProxyType({
    _T.NUMERICAL: {**_STEPS, _T.STAGNATION: _R, _T.SATURATION: _R, _T.DEAD: _R},
    _T.NOT_TRAINING: {
        _T.STAGNATION: _L, _T.VANISHING: _L, _T.BOTTLENECK: _L, _T.NOT_LEARNING: _R, _T.LEARNING_RATE: _L,
    },
    _T.LEARNING_RATE: {**_STEPS, _T.NUMERICAL: _R, _T.STAGNATION: _R, _T.ROTATION: _R, _T.NOT_LEARNING: _R,
        _T.SATURATION: _R, _T.VANISHING: _L, _T.RANK_COLLAPSE: _L, _T.COLLAPSE: _L, _T.BOTTLENECK: _R,
    },
    _T.BAD_INIT: {
        **_STEPS, **_SHUT, _T.STAGNATION: _R, _T.DEAD: _R, _T.SATURATION: _R, _T.NUMERICAL: _R, _T.RANK_COLLAPSE: _R,
        _T.HEAD_REDUNDANCY: _L, _T.NOT_LEARNING: _R, _T.LEARNING_RATE: _R,
    },
    _T.DATA_SCALE: {
        **_STEPS, _T.LEARNING_RATE: _R, _T.DEAD: _R, _T.SATURATION: _R, _T.NUMERICAL: _R, _T.NOT_LEARNING: _R,
        _T.STAGNATION: _R,
    },
    _T.STALE_GRAD: {
        **_STEPS, _T.LEARNING_RATE: _R, _T.BOTTLENECK: _R, _T.NUMERICAL: _R, _T.NOT_LEARNING: _R, _T.SATURATION: _R,
        _T.DEAD: _R, _T.VANISHING: _R,
    },
    _T.WRONG_LOSS: {
        **_STEPS, _T.NUMERICAL: _R, _T.STAGNATION: _R, _T.NOT_LEARNING: _R, _T.SATURATION: _R, _T.DEAD: _R,
    },
    _T.BAD_TARGETS: {_T.NOT_LEARNING: _R},
    _T.CAPACITY: {_T.NOT_LEARNING: _R},
    _T.DEAD: {**_SHUT, _T.NOT_LEARNING: _R, _T.COLLAPSE: _R},
    _T.SATURATION: {**_SHUT, _T.COLLAPSE: _R},
    _T.VANISHING: {_T.STAGNATION: _R, _T.BOTTLENECK: _R, _T.RECURRENT_SUBCRITICAL: _L},
    _T.DIVERGING: {_T.EXPLODING: _R, _T.LOSS_SPIKE: _R, _T.UNSTABLE: _R, _T.NOT_LEARNING: _R},
    _T.EXPLODING: {_T.LOSS_SPIKE: _R, _T.UNSTABLE: _R, _T.BOTTLENECK: _R, _T.ATTENTION_COLLAPSE: _R},
    _T.UNSTABLE: {_T.LOSS_SPIKE: _R},
    _T.ROTATION: {_T.UNSTABLE: _R},
    _T.RECURRENT_SUPERCRITICAL: {_T.EXPLODING: _L},
    _T.RANK_COLLAPSE: {_T.HEAD_REDUNDANCY: _R},
    _T.ATTENTION_COLLAPSE: {_T.HEAD_REDUNDANCY: _L},
    _T.MEMORY_LEAK: {_T.MEMORY_USAGE: _R},
    _T.BOTTLENECK: {},
    _T.STAGNATION: {},
    _T.LOSS_SPIKE: {},
    _T.MEMORY_USAGE: {},
    _T.HEAD_REDUNDANCY: {},
    _T.POLICY_COLLAPSE: {},
    _T.EXCESS_EXPLORATION: {},
    _T.RECURRENT_SUBCRITICAL: {},
    _T.OPTIMIZER_STATE: {_T.LEARNING_RATE: _R, _T.NOT_LEARNING: _R},
    _T.DESYNC: {},
    _T.EVAL_RANDOM: {},
    _T.NOT_LEARNING: {},
    _T.LEAKAGE: {},
    _T.UNDERFLOW: {
        _T.STAGNATION: _R, _T.NOT_TRAINING: _R, _T.LEARNING_RATE: _R, _T.VANISHING: _R, _T.NOT_LEARNING: _R,
    },
    _T.COLLAPSE: {_T.NOT_LEARNING: _R},
    _T.OVERFITTING: {},
})  # fmt: skip
"""What each type explains, and where. :func:`with_causes` says when."""

ENDS_IN: Mapping[IssueType, frozenset[IssueType]] = MappingProxyType({
    _T.LEARNING_RATE: frozenset((_T.DEAD,)),
    _T.EXPLODING: frozenset((_T.NUMERICAL, _T.DEAD)),
    _T.DIVERGING: frozenset((_T.NUMERICAL, _T.DEAD)),
})  # fmt: skip
"""What a type ends in that began in an earlier step: growth in an overflow, steps too large in units that are dead.

Only what is HIGH or worse ends so. Where :data:`EXPLAINS` has the two the other way round, the earlier one explains.
"""

BEGINS: Mapping[IssueType, frozenset[IssueType]] = MappingProxyType(
    dict.fromkeys((_T.DEAD, _T.SATURATION), frozenset((_T.DIVERGING, _T.LOSS_SPIKE)))
)
"""What begins with a type, in steps of which none is known to have been earlier: units die, and the loss leaps.

A loss that leaps later is news of its own. One that had risen before ends in it, see :data:`ENDS_IN`.
"""

STANDING = frozenset((
    _T.NOT_TRAINING, _T.LEARNING_RATE, _T.BAD_INIT, _T.DATA_SCALE, _T.STALE_GRAD, _T.WRONG_LOSS, _T.BAD_TARGETS,
    _T.CAPACITY, _T.LEAKAGE,
))  # fmt: skip
"""Types that tell how a program is written: true from the beginning, whenever they were noticed."""


@dataclass(frozen=True)
class Group:
    """An issue, and those it explains.

    Attributes:
        head: The cause, as severe as the worst of what it explains while it lasts.
        consequences: What it explains, directly or by another one, worst first.
    """

    head: Issue
    consequences: tuple[Issue, ...] = ()

    @property
    def also(self) -> str:
        """The consequences in a few words; empty without any.

        Each is its type and its first layer.
        """
        shown = [f"{issue.issue_type} in {issue.layer or 'the whole model'}" for issue in self.consequences[:_SHOWN]]
        more = len(self.consequences) - _SHOWN
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


_SHOWN = 5


def with_causes(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """Return the same issues in the same order, each with the issue that explains it.

    An issue explains another where :data:`EXPLAINS` has their types, the layers fit, and the times overlap. Types that
    are :data:`STANDING` explain at any time, others what began with them, a step before, or later. What has healed
    explains nothing that is still there, and a note (``INFO``, ``LOW``) nothing that is worse. Of several causes the
    worst counts, of these one that shows in the layers of the issue, of these the earliest; a cause that is explained
    itself passes on to what explains it. What grew in earlier steps explains what :data:`ENDS_IN` says, and is not
    explained by it; what began with it is, as :data:`BEGINS` says.

    Args:
        issues: Of one run.
    """
    found = tuple(issues)
    by_type: dict[IssueType, list[Issue]] = {}
    for issue in found:
        if EXPLAINS[issue.issue_type] or issue.issue_type in ENDS_IN:
            by_type.setdefault(issue.issue_type, []).append(issue)
    causes_of = {kind: _Causes(members) for kind, members in by_type.items()}
    direct: dict[Key, Issue] = {}
    for issue in found:
        causes = [
            (-cause.severity, where is Where.RUN, cause.step, cause)
            for kind, members in causes_of.items()
            if (where := _where(kind, issue.issue_type)) is not None
            and (cause := members.explaining(issue, where)) is not None
        ]
        for *_, cause in sorted(causes, key=itemgetter(0, 1, 2)):
            if issue.key not in (cause.key, _root(cause, direct)):  # times that overlap by a step may lead round
                direct[issue.key] = cause
                break
    roots = (_root(issue, direct) if direct else None for issue in found)
    # Most have none: a copy of each takes longer than all the rest.
    return tuple(
        issue if issue.explained_by == root else replace(issue, explained_by=root)
        for issue, root in zip(found, roots, strict=True)
    )


def _where(kind: IssueType, other: IssueType) -> Where | None:
    """Return where one type explains another; ``None`` where it does not."""
    return Where.RUN if other in ENDS_IN.get(kind, ()) or other in BEGINS.get(kind, ()) else EXPLAINS[kind].get(other)


def _begins(cause: Issue, effect: Issue) -> bool:
    """Whether a cause is of a type that another one begins with, and both may have begun in the same step."""
    first = cause.step - cause.before
    known = effect.issue_type in BEGINS.get(cause.issue_type, ())
    return known and first <= effect.step and effect.step - effect.before <= cause.step + LAG


def groups(issues: Iterable[Issue]) -> tuple[Group, ...]:
    """Return the causes, open ones first, the worst first, each with what it explains.

    Args:
        issues: Of one run; what explains them is found anew.
    """
    found = with_causes(issues)
    behind: dict[Key, list[Issue]] = {}
    for issue in found:
        if issue.explained_by is not None:
            behind.setdefault(issue.explained_by, []).append(issue)
    out = [
        Group(_as_severe(issue, behind.get(issue.key, ())), tuple(sorted(behind.get(issue.key, ()), key=worst_first)))
        for issue in found
        if issue.explained_by is None
    ]
    return tuple(sorted(out, key=lambda group: worst_first(group.head)))


def in_order(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """Return all issues as they were reported: open ones first, worst first, causes before what they explain.

    Args:
        issues: Of one run; what explains them is found anew.
    """
    found = {issue.key: issue for issue in with_causes(issues)}
    order = [found[each.key] for group in groups(found.values()) for each in (group.head, *group.consequences)]
    return tuple(sorted(order, key=lambda issue: not issue.open))


def _as_severe(issue: Issue, consequences: Iterable[Issue]) -> Issue:
    worst = max((each.severity for each in consequences if each.open == issue.open), default=issue.severity)
    return replace(issue, severity=worst) if worst > issue.severity else issue


def worst_first(issue: Issue) -> tuple[bool, int, int]:
    """Sort key: open ones first, the worst first, then by step."""
    return not issue.open, -issue.severity, issue.step


class _Causes:
    """The issues of one type, worst and earliest first, by layer: there may be thousands."""

    def __init__(self, issues: Iterable[Issue]) -> None:
        self._all = [_Cause(issue) for issue in sorted(issues, key=lambda issue: (-issue.severity, issue.step))]
        self._at: dict[str, list[int]] = {}
        self._around: dict[str, list[int]] = {}
        for place, cause in enumerate(self._all):
            for table, names in ((self._at, cause.names), (self._around, cause.around)):
                for name in names:
                    table.setdefault(name, []).append(place)

    def explaining(self, issue: Issue, where: Where) -> Issue | None:
        """Return the first that explains an issue."""
        places: Iterable[int] = range(len(self._all))
        if where is Where.LAYERS:
            layer = issue.layers[0] if issue.layers else ""
            named = ("", layer, *_around(layer))
            near = {place for name in named for place in self._at.get(name, ())}
            places = sorted(near.union(self._around.get(layer, ())))
        return next((self._all[place].issue for place in places if self._all[place].explains(issue)), None)


class _Cause:
    """An issue, and the names of its layers ready to be compared."""

    def __init__(self, issue: Issue) -> None:
        self.issue = issue
        self.names = frozenset(issue.layers)
        self.around = frozenset(part for name in issue.layers for part in _around(name))

    def explains(self, other: Issue) -> bool:
        """Whether this issue explains one of a type that it may explain."""
        mine = self.issue
        grew = other.issue_type in ENDS_IN.get(mine.issue_type, ())
        first = mine.step - mine.before if mine.issue_type in STANDING else mine.step
        if grew and (not (first < other.step and mine.severity >= Severity.HIGH) or _begins(other, mine)):
            return False
        if not self._fits(other) or mine.severity < min(other.severity, Severity.MEDIUM):
            return False
        if "" in self.names or _where(mine.issue_type, other.issue_type) is Where.RUN:
            return True
        return all(
            layer in self.names or layer in self.around or not self.names.isdisjoint(_around(layer))
            for layer in other.layers
        )

    def _fits(self, other: Issue) -> bool:
        """Whether the times of this issue and of what it may explain fit."""
        mine = self.issue
        if other.open and not mine.open:
            return False
        if other.issue_type in BEGINS.get(mine.issue_type, ()):
            return _begins(mine, other)
        if mine.issue_type in ENDS_IN.get(other.issue_type, ()) and other.step < mine.step:
            return False
        healed = mine.healed_step is not None and mine.healed_step + LAG < other.step
        return mine.issue_type in STANDING or (mine.step <= other.step + LAG and not healed)


def _around(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter, but for the whole model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _root(issue: Issue, direct: Mapping[Key, Issue]) -> Key | None:
    cause = direct.get(issue.key)
    if cause is None:
        return None
    while (further := direct.get(cause.key)) is not None:
        cause = further
    return cause.key


def layers_explained_by(kind: IssueType) -> Sequence[IssueType]:
    """Return the types that one of this type explains in its own layers."""
    return [other for other, where in EXPLAINS[kind].items() if where is Where.LAYERS]
