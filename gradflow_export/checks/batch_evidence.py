"""What enters the model and the loss: a few rows of inputs, predictions and targets, and the structure around them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.autograd_graph.answers import Answer, Answers
from gradflow_export.autograd_graph.handwritten_loss import forms_of
from gradflow_export.autograd_graph.layer_graph import FirstLayer, Layers, calls_of, entering, layers_behind, widest
from gradflow_export.autograd_graph.loss_graph import Term, terms_of
from gradflow_export.autograd_graph.loss_shape import shape_of
from gradflow_export.autograd_graph.met_numbers import Met, met_numbers
from gradflow_export.autograd_graph.nodes import is_alone
from gradflow_export.checks.answer_reader import Aim, Found
from gradflow_export.checks.batch_pool import Remembered, mixed_channels
from gradflow_export.checks.layers.redundant import Pair, pairs_of
from gradflow_export.checks.leaked_columns import LastSteps
from gradflow_export.checks.same_batch import Draws
from gradflow_export.checks.target_reader import (
    FEATURES,
    NOTHING,
    ROWS,
    Said,
    among_samples,
    by_hand,
    choices,
    images,
    in_order,
    is_answer,
    others,
    rows_of,
    same_words,
    signs,
    some_rows,
    thinned,
    weighted,
)
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.members import members
from gradflow_export.hooks.readings import ClueSample, Drained
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.constants import PICKED
from gradflow_export.records.loss_mistakes import RELU_BEFORE_CE, SOFTMAX_OVER_BATCH, WITH_ITSELF

OUTPUTS = 64
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Tanh, nn.Hardswish, nn.Hardtanh,
)  # fmt: skip
PASSES = 4
"""Backward passes of one step that are looked at; the micro-batches of an accumulated step are much alike."""


class InputInstrument(Reader):
    """On sampled steps reads the graph of each loss before its backward pass, and takes rows of what it holds.

    Rows of inputs, predictions and targets are those of the same samples where that is known from their number. They
    are copied to the worker, which remembers some of them: see :class:`Remembered`.
    """

    instrument: ClassVar[str] = "inputs"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._read, self._itself = self._guard(self._look), 0
        self._passes, self._every, self._turn = 0, 1, 0
        self._beside = False  # whether a loss came that another network took part in: it may make the data of others
        self._remembered, self._inputs = dict[str, Remembered](), Remembered()
        self._ends: dict[tuple[str, str], LastSteps] = {}
        self._draws = Draws()
        self._answers = Answers(guard=self._guard, code=self._code)

    @property
    def modules(self) -> int:
        """Half the number of parameters: the graph of the loss is followed through all of them."""
        model = self._model()
        return 1 if model is None else max(sum(1 for _ in model.parameters()) // 2, 1)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack gives up everything it holds."""
        stack, model = super().attach(), self._model()
        if model is not None:
            stack.enter_context(self._answers.attach(model))
        for kept in (self._remembered, self._ends, self._draws):
            stack.callback(kept.clear)
        return stack

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see what the model answers."""
        self._answers.arm(on=True)
        until.callback(self._answers.arm, on=False)

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        if self._passes:
            self._every, self._turn = -(-self._passes // PASSES), self._turn + 1
        self._out, self._passes = [], 0
        self._answers.forget()

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        out = self._out + self._answers.used
        self.forget()
        return out

    def see(self, root: Tensor) -> None:
        """Look at a loss that is about to be propagated back.

        Args:
            root: A scalar with a graph, of which nothing has been freed.
        """
        if self.armed:
            self._passes += 1
            # Of more passes others are looked at each time: they may be of two kinds, in turns or one after the other.
            if self._passes <= PASSES * self._every and not (self._passes + self._turn) % self._every:
                self._read(root)
            self._answers.over()

    def _look(self, root: Tensor) -> None:
        model = self._model()
        if model is None:
            return
        modules = dict(members(model))
        names = {id(p): name for name, module in modules.items() for _, p in torch_private.parameters(module)}
        turned = {id(p) for m in modules.values() if isinstance(m, nn.Linear) for _, p in torch_private.parameters(m)}
        states = {id(p) for m in modules.values() for p in _state_weights(m)}
        with torch.no_grad():
            terms, whole = terms_of(root)
            forms, self._itself = _forms(root, self._itself)
            terms = [term for term in (*terms, *forms) if 0 not in shape_of(term.behind)]  # of no samples
            alone, entered = [is_alone(root.grad_fn, term.node) for term in terms], list[FirstLayer]()
            every = Layers() if all(alone) else layers_behind(root.grad_fn, names, turned, root.grad_fn)
            said = self._answers.said(root.grad_fn) if any(term.predictions is None for term in terms) else NOTHING
            for term, single in zip(terms, alone, strict=True):
                layers = layers_behind(term.behind, names, turned, root.grad_fn)
                self._beside |= layers.beside
                layers.foreign |= self._beside
                pairs = pairs_of(layers.made, root.grad_fn, modules) if layers.whole else ()
                layers.first = entering(layers.first, states)
                self._take(term, layers, pairs, every, said, whole=whole, single=single)
                entered += layers.first
            known = any(term.targets is not None for term in terms)
            answers = [] if known else [(each, each.node_behind(root.grad_fn)) for each in self._answers.given]
            for answer, node in (pair for pair in answers if pair[1] is not None):
                layers = layers_behind(node, names, turned, root.grad_fn)
                layers.first = entering(layers.first, states)
                pairs = pairs_of(layers.made, root.grad_fn, modules) if layers.whole else ()
                met = met_numbers(root.grad_fn, node, answer.rows) if answer.in_order else []
                self._await(answer, met, layers, pairs)
                entered += layers.first
            for site, (rows, normalised) in others(entered).items():
                given = Found(inputs=rows.shape[1], input_site=site, normalised=normalised)
                self._out.append(ClueSample("input.rms", site, rows, partial(self._inputs.beside, given)))
            for site, (rows, channels) in images(entered).items():
                self._out.append(ClueSample("mistake", site, rows, partial(mixed_channels, site, channels)))

    def _await(self, answer: Answer, met: list[Met], layers: Layers, pairs: tuple[Pair, ...]) -> None:
        """Have the gradient of an answer taken to what it met in its loss, where the loss itself is not known."""
        first, rows = widest(layers.first), answer.rows
        entered = None if first is None or first.entered is None else rows_of(first.entered, len(rows))
        asked = self._answers.asked(len(rows)) if entered is None or len(entered) != len(rows) else None
        entered = entered if asked is None else rows_of(asked)
        given = None if entered is None or len(entered) != len(rows) else thinned(entered).to(torch.float32)
        found = Found(
            graded=True,
            site=layers.last,
            inputs=0 if given is None else given.shape[1],
            outputs=rows.shape[1],
            input_site="" if first is None else first.name,
            normalised=first is not None and first.normalised,
            run=layers.run if layers.whole else (),
            pairs=pairs,
            bends=layers.bends or not layers.whole,
            idle=0 if layers.bends else _activations(self._model(), layers),
            tokens=first is not None and first.tokens if asked is None else not asked.is_floating_point(),
            own=layers.own and not layers.foreign and not self._answers.missed,
            whole=not layers.foreign,
            count=len(rows),
            answers=not layers.foreign,
            asked=asked is not None,
            aims=tuple(Aim([*each.columns], each.said is not None) for each in met),
        )
        memory, said = self._remembered.setdefault(layers.last, Remembered()), some_rows(rows).float()
        beside = [some_rows(part).to(said.device) for each in met for part in each[1:] if part is not None]

        def take(gradient: Tensor) -> None:
            columns = (given, said, some_rows(gradient).float(), *beside)
            values = torch.cat([part for part in columns if part is not None], dim=1).contiguous()
            self._out.append(ClueSample("loss.over_constant", found.site, values, partial(memory.take, found)))

        answer.take = take
        self._out += self._draws.see(first, None)

    def _take(
        self, term: Term, layers: Layers, pairs: tuple[Pair, ...], every: Layers, said: Said, *,
        whole: bool, single: bool,
    ) -> None:  # fmt: skip
        """Copy rows of one term and of the widest input behind it; of ``every`` term, what enters the same layer."""
        if not layers.last and layers.foreign:  # a loss of another network
            return
        written = by_hand(term, said) if term.predictions is None and term.kind in {"absolute", "squared"} else None
        if written is not None:
            term.predictions, term.targets = written
        count, parts = _pair(term)
        first = widest(layers.first)
        entered = None if first is None or first.entered is None else rows_of(first.entered, count)
        paired = entered is not None and (not parts or len(entered) == count)
        calls = [] if first is None else calls_of(every, first.name)
        found = Found(
            kind=term.kind if parts else None,
            logits=term.logits,
            part=first is not None and (len(calls) > len(calls_of(layers, first.name)) or (_some(term) and not single)),
            site=layers.last,
            outputs=parts[0].shape[1] if parts else 0,
            width=term.targets.numel() // count if term.targets is not None and count else 0,
            input_site="" if first is None else first.name,
            normalised=first is not None and first.normalised,
            reach=term.reach,
            run=layers.run if layers.whole else (),
            pairs=pairs,
            bends=layers.bends or not layers.whole,
            idle=0 if layers.bends else _activations(self._model(), layers),
            tokens=first is not None and first.tokens,
            own=layers.own and not layers.foreign and (written is None or single),
            whole=whole,
            shares=term.shares,
            even=term.even,
            turned=layers.written and not single,
            count=count,
            choices=choices(term) if parts else 0,
            answers=whole and not layers.foreign and is_answer(term),
            mistakes=dict(term.mistakes),
        )
        memory = self._remembered.setdefault(layers.last, Remembered())
        rows = None if entered is None else thinned(entered)
        if rows is not None and paired:
            parts.insert(0, rows)
            found = replace(found, inputs=rows.shape[1], **_columns_of(first, rows))
        else:
            found = self._ask(found, parts, first)
        if not found.own:
            found.mistakes.pop(SOFTMAX_OVER_BATCH, None)
        # Weights first: they are those of the rows that follow.
        for metric, apart, analyse in (
            ("target.copied", same_words(term, layers.first), memory.copied),
            ("mistake", signs(term, ROWS), memory.signed),
            ("target.distinct", None if found.own else among_samples(term, ROWS), memory.alike),
            ("mistake", weighted(term, ROWS), memory.weighted),
        ):
            if apart is not None:
                self._out.append(ClueSample(metric, found.site, apart.contiguous(), partial(analyse, found.site)))
        if parts or found.mistakes or len(found.run) > 1 or pairs:
            values = torch.cat([part.to(torch.float32) for part in parts], dim=1) if parts else torch.zeros(1, 1)
            self._out.append(
                ClueSample("loss.over_constant", found.site, values.contiguous(), partial(memory.take, found))
            )
        if rows is not None and (found.part or not paired) and not (first is not None and first.tokens):
            alone = Found(inputs=rows.shape[1], input_site=found.input_site, normalised=found.normalised)
            given = [part for part in map(thinned, map(rows_of, calls)) if part.shape[1] == rows.shape[1]]
            values = (torch.cat(given) if found.part and given else rows).to(torch.float32).contiguous()
            self._out.append(ClueSample("input.rms", found.input_site, values, partial(self._inputs.take, alone)))
        self._out += self._draws.see(first, term.targets)
        self._take_last_steps(found, first, parts, paired=paired)
        self._take_beside(found, layers.first, first, parts)

    def _ask(self, found: Found, parts: list[Tensor], first: FirstLayer | None) -> Found:
        """Take what the model was called with for inputs, where what entered its first layer has other rows."""
        if (asked := self._answers.asked(found.count) if parts else None) is None:
            return found
        parts.insert(0, thinned(rows_of(asked)))
        told: dict[str, Any] = {"tokens": not asked.is_floating_point(), "steps": _steps_of(asked, parts[0], first)}
        return replace(found, inputs=parts[0].shape[1], asked=True, **told)

    def _take_last_steps(self, found: Found, first: FirstLayer | None, parts: list[Tensor], *, paired: bool) -> None:
        """Copy the last steps of sequences whose steps are rows, as a recurrent layer is given them, and targets."""
        entered = None if paired or first is None or first.tokens or all(found.steps) else first.entered
        if first is None or entered is None or not parts or not found.own or entered.dim() != 2 or not found.count:
            return
        steps, rest = divmod(len(entered), found.count)
        if rest or steps < 2 or entered.shape[1] > FEATURES:
            return
        x, columns = local(entered), entered.shape[1]
        ends = x.reshape(steps, -1, columns)[-1], x.reshape(-1, steps, columns)[:, -1]
        self._take_columns(found, first.name, [*map(some_rows, ends)], parts[-1], steps)

    def _take_beside(
        self, found: Found, layers: list[FirstLayer], first: FirstLayer | None, parts: list[Tensor]
    ) -> None:
        """Copy narrower inputs that enter layers of their own, as a number of each sample, and targets."""
        for layer in layers if found.own and parts else ():
            x = None if layer is first or layer.entered is None else rows_of(layer.entered, found.count)
            if x is not None and len(x) == found.count and x.shape[1] <= FEATURES and not layer.tokens:
                self._take_columns(found, layer.name, [some_rows(x)] * 2, parts[-1], 1)

    def _take_columns(self, found: Found, site: str, ends: list[Tensor], y: Tensor, steps: int) -> None:
        take = self._ends.setdefault((found.site, site), LastSteps()).take
        read = partial(take, site, ends[0].shape[1], steps, numbers=found.kind not in PICKED)
        values = torch.cat([*(end.to(y.device, torch.float32) for end in ends), y.to(torch.float32)], dim=1)
        self._out.append(ClueSample("target.column", site, values.contiguous(), read))


def _activations(model: nn.Module | None, layers: Layers) -> int:
    """Return how many activation modules a model has; 0 where something may have come before the first layer."""
    named = [] if model is None or not layers.run else members(model)
    first = next((name for name, module in named if torch_private.parameters(module)), None)
    if first is None or layers.run[0].name != first:
        return 0
    return sum(isinstance(module, _ACTIVATIONS) for _, module in named)


def _forms(root: Tensor, itself: int) -> tuple[list[Term], int]:
    """Return mistakes of form as terms, and how many losses in a row, of ``itself``, compare an output with itself."""
    found = list(forms_of(root))
    itself = itself + 1 if any(site == WITH_ITSELF for site, _, _ in found) else 0
    counted = {WITH_ITSELF: float(itself)}
    return [Term("soft", node, node, mistakes={s: counted.get(s, value)}) for s, value, node in found], itself


def _state_weights(module: nn.Module) -> list[Tensor]:
    held = torch_private.parameters(module) if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) else []
    return [p for key, p in held if "weight_hh" in key]


def _pair(term: Term) -> tuple[int, list[Tensor]]:
    """Return how many samples there are, and predictions and targets of some of them, a row each; none if not known."""
    if term.predictions is None or term.targets is None or not term.predictions.numel():
        return 0, []
    predictions, targets = local(term.predictions), local(term.targets)
    if term.kind in PICKED:
        return _classes(term, predictions, targets)
    if predictions.shape != targets.shape:
        return 0, []
    columns = predictions.shape[-1] if term.kind == "soft" else -1
    pair = [t.reshape(-1, columns) if columns > 0 else rows_of(t) for t in (predictions, targets)]
    stride = max(-(-pair[0].shape[1] // OUTPUTS), 1)
    if term.kind == "soft" and stride > 1:  # of probabilities all are needed
        return 0, []
    return len(pair[0]), [some_rows(t)[:, ::stride] for t in pair]


def _some(term: Term) -> bool:
    """Whether a loss is of some entries alone of what a layer gave out."""
    return term.predictions is not None and term.predictions.numel() < math.prod(shape_of(term.behind))


def _classes(term: Term, predictions: Tensor, targets: Tensor) -> tuple[int, list[Tensor]]:
    if predictions.dim() < 2 or targets.numel() * predictions.shape[1] != predictions.numel():
        return 0, []
    scores, y = some_rows(predictions.movedim(1, -1).reshape(-1, predictions.shape[1])), some_rows(targets.reshape(-1))
    index = y.clamp(0, scores.shape[1] - 1)
    counts = y == index
    if term.ignored is not None and 0 <= term.ignored < scores.shape[1]:
        counts &= y != term.ignored
    if RELU_BEFORE_CE in term.mistakes:
        result = saved(term.behind, "result")
        if result is None or result.device.type != "cpu" or not in_order(result, predictions):
            del term.mistakes[RELU_BEFORE_CE]
        else:
            rows = some_rows(result.reshape(predictions.shape).movedim(1, -1).reshape(-1, predictions.shape[1]))
            term.mistakes[RELU_BEFORE_CE] = float((rows.gather(1, index[:, None]) == 0).double().mean())
    # The function that training calls too: one that it does not brings in a quarter of a megabyte of torch's code.
    if term.kind == "margin":
        margins = functional.multi_margin_loss(scores.float(), index, reduction="none")
        picked = -scores.shape[1] * margins
    else:
        picked = -functional.nll_loss(scores, index, reduction="none")
    chosen = torch.where(counts, picked.to(torch.float32), math.nan)
    return targets.numel(), [chosen[:, None], y[:, None]]


def _steps_of(asked: Tensor, rows: Tensor, first: FirstLayer | None) -> tuple[int, int]:
    """Return the steps of sequences that a layer reads as rows, and the numbers of each; zeros where it does not."""
    entered = None if first is None or first.tokens else first.entered
    width = entered.shape[1] if entered is not None and entered.dim() == 2 and entered.numel() == asked.numel() else 0
    whole = rows.shape[1] * len(asked) == asked.numel() and (asked.dim() < 3 or asked.shape[2:] == (width,))
    return (rows.shape[1] // width, width) if whole and 0 < width < rows.shape[1] else (0, 0)


def _columns_of(first: FirstLayer | None, rows: Tensor) -> dict[str, Any]:
    """Return what the columns of inputs are: see :class:`Found`."""
    shape = () if first is None or first.entered is None else tuple(first.entered.shape[1:])
    features = math.prod(shape)
    every = max(-(-features // FEATURES), 1)
    # A complex number is two columns, and one dimension may be several numbers of each sample: no steps either way.
    if features != rows.shape[1] and every == 1:
        return {"steps": (1, rows.shape[1])}
    steps = (shape[0], shape[1]) if len(shape) == 2 else ((1, features) if len(shape) < 2 else (0, 0))
    return {"every": every, "steps": steps}
