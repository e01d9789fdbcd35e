"""Finds layers that are given what carries no gradient, though it was computed from layers that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from gradflow_export.autograd_graph.loss_graph import LAYERS, Node
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, sources, through, walk
from gradflow_export.checks.leakage import MOST_NODES, Graph
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.function_spy import Spy
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import layers_of, only, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import owner

MOST_DRAWS = 32
"""Draws of one step that are remembered."""
FLAT = frozenset((Op.CEIL, Op.FLOOR, Op.NORMAL, Op.ROUND, Op.SIGN, Op.TRUNC))
"""Nodes whose gradient is 0 everywhere: steps, and draws that are no ``rsample``."""


class Draws:
    """Remembers what was drawn by ``sample()`` from distributions that could be differentiated, while it is installed.

    A draw whose ``log_prob`` is asked for is one of a score function, and forgotten.
    """

    def __init__(self, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._made: list[tuple[Tensor, list[Node]]] = []
        self._asked: set[int] = set()
        self._drew, self._ask = guard(self._sampled), guard(self._judged)

    def install(self, until: ExitStack) -> None:
        """Begin to see draws.

        Args:
            until: Puts every method back when it is closed, and forgets what was drawn.
        """
        until.callback(self.forget)
        named = (getattr(distributions, name) for name in distributions.__all__)
        for kind in [Distribution, *(each for each in named if isinstance(each, type))]:
            for name, see in (("sample", self._drew), ("log_prob", self._ask)):
                if name in vars(kind) and issubclass(kind, Distribution):
                    spy = Spy(kind, name, see, result=True)
                    spy.install()
                    until.callback(spy.remove)

    def forget(self) -> None:
        """Forget what was drawn."""
        self._made, self._asked = [], set()

    def behind(self, entered: Tensor) -> list[Node]:
        """Return what made the parameters of the distribution that gave what entered a layer, or some of its features.

        Args:
            entered: What the layer saved.
        """
        made = (nodes for draw, nodes in self._made if draw.data_ptr() not in self._asked and _holds(entered, draw))
        return next(made, [])

    def _sampled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        drawn, source = kwargs["result"], args[0]
        if not (isinstance(drawn, Tensor) and source.has_rsample) or drawn.requires_grad or not drawn.numel():
            return
        nodes = _made_by(source)
        if len(self._made) < MOST_DRAWS and nodes:
            self._made.append((local(drawn), nodes))

    def _judged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[1] if len(args) > 1 else kwargs.get("value")
        if isinstance(value, Tensor):
            self._asked.add(local(value).data_ptr())


def _made_by(source: Distribution) -> list[Node]:
    """Return what made the parameters of a distribution, as far as they have a graph."""
    base = getattr(source, "base_dist", None)
    inner = _made_by(base) if isinstance(base, Distribution) else []
    held = [value for value in vars(source).values() if isinstance(value, Tensor)]
    return inner + [value.grad_fn for value in held if value.grad_fn is not None]


def _holds(entered: Tensor, draw: Tensor) -> bool:
    """Whether these are the same memory, or, where nothing waits for a device, the same numbers beside others."""
    if entered.data_ptr() == draw.data_ptr():
        return True
    if entered.device.type != "cpu" or draw.device.type != "cpu" or entered.dim() < 2 or draw.dim() < 2:
        return False
    a, b = entered.reshape(-1, entered.shape[-1]), draw.reshape(-1, draw.shape[-1])
    if len(a) != len(b) or not 0 < b.shape[1] < a.shape[1] or a.dtype != b.dtype:
        return False
    return torch.equal(a[:, : b.shape[1]], b) or torch.equal(a[:, -b.shape[1] :], b)


def cut_off(graph: Graph, names: Mapping[int, str], draws: Draws) -> dict[str, bool]:
    """Return the layers that make what passes no gradient on to them, and with True those that receive it.

    Args:
        graph: All that is behind a loss.
        names: Names of modules by the ``id`` of their parameters.
        draws: What was drawn in this step.
    """
    kinds = {node: kind_of(node) for node in graph.nodes}
    found = ((node, owner_of(node, names)) for node, kind in kinds.items() if kind in LAYERS)
    layers = {node: name for node, name in found if name is not None}
    flat = not FLAT.isdisjoint(kinds.values())
    makers, takers, members = dict[str, bool](), dict[str, bool](), set(layers.values())
    for node, name in layers.items():
        attribute, data, _ = LAYERS[kinds[node]]
        entered = saved(node, attribute) if below(node, data) is None else None
        steps = draws.behind(entered) if entered is not None else []
        if flat and below(node, data) is not None:
            steps = _steps_before(graph, node, below(node, data), layers)
        nearest = _nearest(steps, names)
        # The loss has another part that they train by, and nowhere does a gradient go from this layer to them.
        if nearest and set(nearest) <= members and not _leads(layers, name, nearest):
            makers.update(dict.fromkeys(nearest, False))
            takers[name] = True
    return {**makers, **{name: value for name, value in takers.items() if name not in makers}}


def _leads(layers: Mapping[Node, str], taker: str, makers: list[str]) -> bool:
    """Whether elsewhere a gradient does go from a layer to one of those that made what it is given here."""
    own = (node for node, name in layers.items() if name == taker)
    behind = walk(own, into=lambda node: kind_of(node) not in FLAT)
    return any(layers.get(node) in makers for node in behind)


def _steps_before(graph: Graph, layer: Node, source: Node, layers: Mapping[Node, str]) -> list[Node]:
    """Return the steps behind which all layers before a layer lie, where nothing but such layers takes them."""
    passed = set(walk([source], past=lambda node: node not in layers and kind_of(node) not in FLAT))
    if not passed.isdisjoint(layers):
        return []
    steps = {node for node in passed if kind_of(node) in FLAT}
    passed -= steps
    before = {layers[node] for node in walk(steps) if node in layers}
    # Also with a loss of its own, as where a score is computed by hand, or with the same weights again.
    others = [taker for step in steps for taker in graph.takers.get(step, ()) if taker not in passed]
    above = {layers[node] for node in graph.above([layer]) if node in layers}
    alone = all(taker in layers for taker in others) and before.isdisjoint({*above, layers[layer]})
    return [node for step in steps for node in sources(step)] if alone else []


def _nearest(nodes: list[Node], names: Mapping[int, str]) -> list[str]:
    """Return the layers that stand nearest behind some nodes, each once."""
    behind = walk(nodes, past=lambda node: owner_of(node, names) is None, most=MOST_NODES)
    found = (owner_of(node, names) for node in behind)
    return list(dict.fromkeys(name for name in found if name is not None))


def owner_of(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the module whose weight a layer's node multiplies, ``None`` where it is no layer of the model.

    Args:
        node: A node of the graph.
        names: Names of modules by the ``id`` of their parameters.
    """
    if kind_of(node) not in LAYERS:
        return None
    here = through(below(node, LAYERS[kind_of(node)][2]), {Op.T, Op.TO_COPY, Op.TRANSPOSE, Op.UNSQUEEZE, Op.VIEW})
    return names.get(id(getattr(here, "variable", None))) if kind_of(here) == Op.LEAF else None


@dataclass(frozen=True, kw_only=True)
class CutOff(Check):
    """Report layers whose outputs are used in a way that blocks the gradient.

    The next layer's input was drawn by ``sample()`` from a distribution whose parameters are trained (and whose
    ``log_prob`` is not used), or comes from a rounding operation, whose gradient is 0. The layers before have another
    term of the loss, such as a divergence from a prior, so they do get a gradient, but not this one. If they have no
    other term, all their gradients are 0, and :class:`~gradflow_export.checks.parameters.not_training.NotTraining`
    reports them.

    Why it is bad:
        One term of the loss never reaches the layers before the draw or the rounding. They are trained only by the
        other term: an encoder fits its prior and ignores the input.

    Example:
        z = Normal(mean, std).sample()
        reconstruction = decoder(z)

    Use instead:
        z = Normal(mean, std).rsample()
        reconstruction = decoder(z)

    Not reported:
        A draw whose log_prob is part of the loss, as in policy gradients; a layer that gets a gradient through another
        path; layers without any gradient, which not-training reports.

    Source: Kingma and Welling 2014, arXiv:1312.6114, sec. 2.4.
    """

    patience: int = 2
    heal: int = 100

    order: ClassVar[int] = 30
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("cut_off.receives",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record, and what gradients there are."""
        layers = layers_of(record, "cut_off.receives")
        given = tuple(site for site in layers if record.fact("cut_off.receives", site))
        made = tuple(site for site in layers if site not in given)
        if set(made) <= _without_gradient(record):
            return ()
        return (
            Finding(
                IssueType.NOT_TRAINING,
                Severity.HIGH,
                layers,
                1.0,
                0.0,
                f"the input of {some(given)} is sampled or rounded from the outputs of {some(made)} and blocks the "
                "gradient: this part of the loss does not train them.",
                "draw with rsample() instead of sample() or torch.normal(mean, std), or mean + std * "
                "torch.randn_like(std); round with a straight-through estimator, x + (x.round() - x).detach().",
                cause="cut off",
            ),
        )


def _without_gradient(record: StepRecord) -> set[str]:
    """Return the modules whose parameters all got a gradient of exactly 0, as far as they got one."""
    norms = reading_of(record, "parameter.gradient_norm")
    rest, moved = (set(map(owner, only(norms, flags).sites)) for flags in (norms.values == 0.0, norms.values != 0.0))
    return rest - moved
