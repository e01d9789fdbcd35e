"""What the advice of an issue says, done to a program: by type and words of the issue, never by the program's mistake.

Each patch does one alternative of the advice, with the layers and numbers of the issue. Where ``gradflow doctor`` has a
treatment that does what the words say, that treatment is the patch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from generated.programs import Parts
from generated.tasks import TEST
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.experiments import interventions as do
from gradflow_export.experiments.mending.catalog import MENDED
from gradflow_export.experiments.treatments import find
from gradflow_export.records.issues import Issue

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)
_N = r"([\d.]+(?:e[+-]?\d+)?)"


@dataclass
class Program:
    """A program that is changed before it trains.

    Attributes:
        parts: Its parts; the mistake is in them already.
        changes: What the doctor does at its steps, and at the functions that it calls.
    """

    parts: Parts
    changes: list[do.Intervention] = field(default_factory=list)


Patch = Callable[[Program, Issue, "re.Match[str]"], bool]
"""Makes a change; returns whether it could. The match is that of the words in the advice."""


def _number(text: str) -> float:
    return float(text.rstrip("."))


def _modules(program: Program, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """Yield the modules of an issue's layers, which may be named by a parameter."""
    known = dict(program.parts.model.named_modules())
    for name in dict.fromkeys(n if n in known else n.rpartition(".")[0] for n in names):
        if name in known:
            yield known[name]


def _weights(program: Program, names: tuple[str, ...]) -> list[nn.Parameter]:
    """Return the weights of an issue's layers: of a parameter itself, of a module all."""
    known = dict(program.parts.model.named_parameters())
    named = [known[name] for name in names if name in known]
    inside = [q for module in _modules(program, tuple(n for n in names if n not in known)) for q in module.parameters()]
    return [q for q in dict.fromkeys([*named, *inside]) if q.dim() > 1]


def _before(program: Program, names: tuple[str, ...]) -> list[nn.Module]:
    """Return, of each layer of an issue, the last linear or convolutional layer registered up to it."""
    found: list[nn.Module] = []
    for module in _modules(program, names):
        inside = [m for m in module.modules() if isinstance(m, LINEAR)]
        order = list(program.parts.model.modules())
        earlier = [m for m in order[: order.index(module)] if isinstance(m, LINEAR)]
        found += (inside or earlier)[-1:]
    return found


def _rate(factor: float) -> Patch:
    def patch(program: Program, _issue: Issue, words: re.Match[str]) -> bool:
        given = [_number(g) for g in words.groups() if g]
        program.parts.rate *= given[1] / given[0] if len(given) > 1 else factor
        return True

    return patch


def _clip(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.clip = 1.0
    return True


def _lower_and_clip(program: Program, issue: Issue, words: re.Match[str]) -> bool:
    return _rate(0.1)(program, issue, words) and _clip(program, issue, words)


def _each_epoch(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    p = program.parts
    factor, epoch = p.factor, max(p.data.count // p.recipe.batch, 1)
    p.factor = lambda t: factor(t // epoch)
    return p.recipe.schedule == ""


def _usual_decay(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.decay = 1e-2 if program.parts.recipe.optimizer == "AdamW" else 1e-4
    return True


def _extra(**options: float) -> Patch:
    def patch(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
        program.parts.extra.update(options)
        return True

    return patch


def _clear(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.clears, program.parts.clears_late = (lambda _t: True), False
    return True


def _all_held(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.held = lambda: list(program.parts.model.parameters())
    return True


def _trainable(program: Program, issue: Issue, words: re.Match[str]) -> bool:
    for q in program.parts.model.parameters():
        q.requires_grad_(True)
    return _all_held(program, issue, words)


def _initial(fill: Callable[[Tensor], object]) -> Patch:
    def patch(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
        weights = _weights(program, issue.layers)
        for q in weights:
            fill(q)
        return bool(weights)

    return patch


def _by_inputs(weight: Tensor) -> None:
    nn.init.normal_(weight, std=weight[0].numel() ** -0.5)


def _scaled(program: Program, issue: Issue, words: re.Match[str]) -> bool:
    weights = _weights(program, issue.layers) if words[1] else []
    with torch.no_grad():
        for q in weights:
            q.mul_(_number(words[1]))
    return bool(weights)


def _norm_before(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = [m for m in _modules(program, issue.layers) if not list(m.parameters()) or isinstance(m, LINEAR)]
    modules = modules or list(_modules(program, issue.layers))
    for module in modules:
        module.register_forward_pre_hook(lambda m, a: (_normed(a[0], channels=isinstance(m, LINEAR[1:])), *a[1:]))
    return bool(modules)


def _normed(x: Tensor, channels: bool) -> Tensor:
    shape = x.shape[1:] if channels or x.dim() > 3 else x.shape[-1:]
    return functional.layer_norm(x, shape) if x.is_floating_point() else x


def _around(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = _from_on(program, issue)
    for module, end in modules:
        given: list[Tensor] = []
        module.register_forward_pre_hook(lambda _m, a, given=given: given.__setitem__(slice(None), a[:1]))
        end.register_forward_hook(lambda _m, _a, out, given=given: out + given[0] if _alike(out, given[0]) else None)
    return bool(modules)


def _around_it(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = list(_modules(program, issue.layers))
    for module in modules:
        module.register_forward_hook(lambda _m, a, out: out + a[0] if _alike(out, a[0]) else None)
    return bool(modules)


def _norm_from_on(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = [module for module, _ in _from_on(program, issue)]
    for module in modules:
        module.register_forward_pre_hook(lambda m, a: (_normed(a[0], channels=isinstance(m, LINEAR[1:])), *a[1:]))
    return bool(modules)


def _from_on(program: Program, issue: Issue) -> list[tuple[nn.Module, nn.Module]]:
    """Return layers from the first one of an issue on, but the last, each with the activation that follows it."""
    order = [m for m in program.parts.model.modules() if not list(m.children())]
    named = [m for module in _modules(program, issue.layers) for m in module.modules() if m in order]
    first = min((order.index(m) for m in named if isinstance(m, LINEAR)), default=len(order))
    found = []
    for at, module in enumerate(order):
        if at >= first and isinstance(module, LINEAR):
            after = order[at + 1] if at + 1 < len(order) else module
            found.append((module, module if list(after.parameters()) else after))
    return found[:-1]


def _alike(out: object, given: object) -> bool:
    return isinstance(out, Tensor) and isinstance(given, Tensor) and out.shape == given.shape


def _bias_zero(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    layers = [m for m in _before(program, issue.layers) if m.bias is not None]
    for layer in layers:
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return bool(layers)


def _kaiming_before(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    layers = _before(program, issue.layers)
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    return bool(layers)


def _leaky(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = [m for m in _modules(program, issue.layers) if not list(m.parameters())]
    for module in modules:
        module.register_forward_hook(lambda _m, a, _out: functional.leaky_relu(a[0], 0.01))
    return bool(modules)


def _standard(x: Tensor) -> Tensor:
    """Return samples with mean 0 and standard deviation 1 of each feature over the training set."""
    mean, std = x[:-TEST].mean(0), x[:-TEST].std(0)
    return (x - mean) / torch.where(std > 0, std, torch.ones_like(std))


def _inputs(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    if not program.parts.data.tokens:
        program.parts.data.inputs = _standard(program.parts.data.inputs)
    return not program.parts.data.tokens


def _targets(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    if program.parts.data.kind == "numbers":
        program.parts.data.targets = _standard(program.parts.data.targets)
    return program.parts.data.kind == "numbers"


def _without_column(program: Program, _issue: Issue, words: re.Match[str]) -> bool:
    program.parts.data.inputs[:, int(words[1])] = 0.0
    return True


def _finite(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    batch = program.parts.batch

    def kept(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = batch(x, y)
        good = torch.isfinite(x.reshape(len(x), -1)).all(1)
        return x[good], y[good]

    program.parts.batch = kept
    return True


def _shuffled(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    p, order = program.parts, torch.Generator().manual_seed(0)
    p.rows = lambda _t: torch.randperm(p.data.count, generator=order)[: p.recipe.batch]
    return True


def _batch_first(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    modules = [m for m in _modules(program, issue.layers) if hasattr(m, "batch_first")]
    for module in modules:
        module.batch_first = True
    return bool(modules)


def _apart(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    model = program.parts.model
    for name, module in [(n, m) for n, m in model.named_children() if isinstance(m, nn.ModuleList)]:
        setattr(model, name, nn.ModuleList([copy.deepcopy(each) for each in module]))
        for layer in getattr(model, name).modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return True


def _wider(program: Program, issue: Issue, words: re.Match[str]) -> bool:
    linear = [m for m in program.parts.model.modules() if isinstance(m, nn.Linear)]
    size = int(_number(words[1]))
    for module in _modules(program, issue.layers[:1]):
        layer = next((m for m in reversed(list(module.modules())) if isinstance(m, nn.Linear)), None)
        after = None if layer is None or layer is linear[-1] else linear[linear.index(layer) + 1]
        if layer is None or after is None or after.in_features != layer.out_features:
            return False
        layer.__init__(layer.in_features, size, layer.bias is not None)  # type: ignore[misc]
        after.__init__(size, after.out_features, after.bias is not None)  # type: ignore[misc]
        return True
    return False


def _modes(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.evaluates = program.parts.resumes = True
    return True


def _float32(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    program.parts.model.float()
    program.parts.model.before = lambda x: x.float() if x.is_floating_point() else x
    return True


def _no_norm(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    for name in issue.layers:
        parent, _, last = name.rpartition(".")
        setattr(program.parts.model.get_submodule(parent), last, nn.Identity())
    return True


def _early(program: Program, _issue: Issue, words: re.Match[str]) -> bool:
    program.parts.recipe = replace(program.parts.recipe, steps=int(_number(words[1])))
    return True


def _treated(name: str) -> Patch:
    """Return the change that a treatment of the doctor makes."""

    def patch(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
        return _change(program, find(name).make())

    return patch


class _LongMemory(do.Intervention):
    """Draws the recurrent weights anew, orthogonal for each gate, and opens the gate that keeps the state.

    The gate is the second one of LSTM and GRU, whose bias becomes 1.
    """

    stays = True

    def root(self, module: nn.Module) -> None:
        """Draw them, without moving the script's own random numbers."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in module.modules():
                for size, recurrent, bias in _recurrent(layer):
                    for gate in recurrent.view(-1, size, recurrent.shape[1]):
                        drawn = nn.init.orthogonal_(torch.empty(gate.shape), generator=generator)
                        gate.copy_(drawn)
                    if bias is not None and len(recurrent) > size:
                        bias[size : 2 * size] = 1.0
                    self.acted = True


def _recurrent(layer: nn.Module) -> list[tuple[int, Tensor, Tensor | None]]:
    """Return the size, the recurrent weights and the inputs' bias of each layer and direction."""
    if isinstance(layer, nn.RNNCellBase):
        return [(layer.hidden_size, layer.weight_hh, layer.bias_ih if layer.bias else None)]
    if not isinstance(layer, nn.RNNBase):
        return []
    return [(layer.hidden_size, weights[1], weights[2] if layer.bias else None) for weights in layer.all_weights]


def _long_memory(program: Program, _issue: Issue, _words: re.Match[str]) -> bool:
    return _change(program, _LongMemory())


def _change(program: Program, change: do.Intervention) -> bool:
    program.changes.append(change)
    return True


def _mended(program: Program, issue: Issue, _words: re.Match[str]) -> bool:
    """Do what the doctor has for the cause of this issue."""
    found = [t for t in MENDED if t.causes and t.meant([(issue.issue_type, issue.cause)])]
    return bool(found) and _change(program, found[0].make())


KAIMING, XAVIER = _initial(nn.init.kaiming_normal_), _initial(nn.init.xavier_uniform_)
PATCHES: tuple[tuple[str, str, Patch], ...] = (
    ("LEARNING_RATE", rf"lower the learning rate(?: from {_N} to about {_N})?", _rate(0.1)),
    ("LEARNING_RATE", r"raise the learning rate.* tenfold until the loss falls", _rate(10.0)),
    ("LEARNING_RATE", r"keep the learning rate", _rate(0.1)),
    ("LEARNING_RATE", r"once per epoch", _each_epoch),
    ("LEARNING_RATE", r"raise the limit of clipping", _clip),
    ("LEARNING_RATE", r"lower weight_decay", _usual_decay),
    ("LEARNING_RATE OPTIMIZER_STATE", r"momentum=0\.9", _extra(momentum=0.9)),
    ("OPTIMIZER_STATE", r"eps=1e-15", _extra(eps=1e-15)),
    ("DIVERGING", rf"lower the learning rate(?: from {_N} to (?:about )?{_N})?", _rate(0.1)),
    ("DIVERGING", r"check the sign of", _treated("the other sign of the loss")),
    ("UNSTABLE", r"halve the learning rate", _rate(0.5)),
    ("UNSTABLE LOSS_SPIKE", r"clip_grad_norm_", _clip),
    ("NUMERICAL", r"leave such batches out", _finite),
    ("NUMERICAL", r"learning rate", _lower_and_clip),
    ("EXPLODING", r"lower the learning rate", _lower_and_clip),
    ("EXPLODING", rf"scale the initial weights of .* by about {_N}", _scaled),
    ("EXPLODING", r"kaiming_normal_", KAIMING),
    ("EXPLODING", r"add normalization|add a LayerNorm", _norm_before),
    ("EXPLODING", r"clip_grad_norm_", _clip),
    ("VANISHING", r"skip connection", _around),
    ("VANISHING", r"LayerNorm", _norm_from_on),
    ("VANISHING", rf"scale their initial weights by about {_N}", _scaled),
    ("VANISHING", r"use ReLU or GELU", _treated("ReLU instead of sigmoid and tanh")),
    ("VANISHING", r"initialize the weights larger", KAIMING),
    ("DEAD", r"set it to 0", _bias_zero),
    ("DEAD", r"kaiming_normal_", _kaiming_before),
    ("DEAD", r"lower the learning rate", _rate(0.1)),
    ("DEAD", r"LeakyReLU", _leaky),
    ("SATURATION", r"standardize the inputs", _inputs),
    ("SATURATION", r"scale down the weights|kaiming_normal_|xavier", _kaiming_before),
    ("SATURATION", r"LayerNorm before the activation", _norm_before),
    ("BAD_INIT", r"nn\.init\.normal_\(\S+, std=features", _initial(_by_inputs)),
    ("BAD_INIT", r"kaiming_normal_", KAIMING),
    ("BAD_INIT", r"xavier_uniform_", XAVIER),
    ("DATA_SCALE", r"normalize the features", _inputs),
    ("DATA_SCALE", r"standardize the targets", _targets),
    ("STALE_GRAD", r"zero_grad", _clear),
    ("NOT_TRAINING", r"not after it: optimizer\.zero_grad", _clear),
    ("NOT_TRAINING STAGNATION", r"detach\(\), ", _treated("let gradients pass")),
    ("NOT_TRAINING STAGNATION", r"model\.parameters\(\)|add_param_group", _all_held),
    ("NOT_TRAINING", r"requires_grad_\(True\)", _trainable),
    ("NOT_TRAINING STAGNATION", r"writes to the parameters", _treated("pin the weights between steps")),
    ("NOT_TRAINING STAGNATION", r"keep the weights in float32", _float32),
    ("NOT_TRAINING STAGNATION", r"or raise the learning rate", _rate(10.0)),
    ("STAGNATION", r"weights initialized to 0", KAIMING),
    ("WRONG_LOSS", r"", _mended),
    ("BAD_TARGETS", r"shuffle: |iterate over the loader", _shuffled),
    ("LEAKAGE", r"x\[:, :(\d+)\]", _without_column),
    ("OVERFITTING", rf"keep the weights of about step {_N}", _early),
    ("CAPACITY", r"add an activation|F\.relu", _treated("ReLU between linear layers")),
    ("CAPACITY", r"create each layer separately", _apart),
    ("CAPACITY", r"normalize over more values", _no_norm),
    ("BOTTLENECK", rf"rescale its weights(?: by about {_N})?", _scaled),
    ("BOTTLENECK", rf"widen \S+ to at least {_N}", _wider),
    ("BOTTLENECK", r"skip connection", _around_it),
    ("BOTTLENECK", r"LayerNorm", _norm_before),
    ("EVAL_RANDOM", r"model\.(eval|train)\(\)", _modes),
    ("EVAL_RANDOM", r"training=self\.training", _treated("evaluate in evaluation mode")),
    ("NOT_LEARNING", r"batch_first", _batch_first),
    ("NOT_LEARNING", r"ten times and a tenth", _rate(10.0)),
    ("NOT_LEARNING", r"ten times and a tenth", _rate(0.1)),
    ("RECURRENT_SUBCRITICAL", r"orthogonal_", _long_memory),
    ("RECURRENT_SUPERCRITICAL", r"orthogonal_|divide it by", _treated("clip gradients to norm 1")),
)
"""Issue types, what their advice says, and the change that this is; of one issue in the order of the table."""


def patches(issue: Issue) -> list[tuple[Patch, re.Match[str]]]:
    """Return what the advice of an issue says, one alternative after the other."""
    found = [
        (do_it, re.search(words, issue.advice)) for kinds, words, do_it in PATCHES if issue.issue_type in kinds.split()
    ]
    return [(do_it, match) for do_it, match in found if match]


def follow(program: Program, issue: Issue, alternative: int) -> bool:
    """Do one alternative of the advice; returns whether it could be done."""
    do_it, match = patches(issue)[alternative]
    return do_it(program, issue, match)
