"""What a person has to do so that a metric is read: the answer where a run holds none of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradflow_export.records.catalog import CUSTOM_PREFIX, MetricSpec

_WATCH = "exporter = Exporter(model).watch(criterion)"
_OBSERVE = "exporter.observe(logits=logits, targets=targets)"
_BLOCKS = 'exporter = Exporter(model, intervals={"blocks": 5}).watch(criterion, blocks=model.layers)'

_PAIRS = 'exporter = Exporter(model).watch(criterion, pairs="rows")'


def _every(instrument: str, sentence: str) -> tuple[str, str]:
    code = f'exporter = Exporter(model, intervals={{"{instrument}": 10}}).watch(criterion)'
    return f"{sentence} A shorter interval shows it sooner.", code


_HOW: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "loss": ("Pass the criterion to watch(), or pass the loss to observe() before optimizer.step().", _WATCH),
        "logits.": ("Pass a criterion that is called with logits and targets, or pass both to observe().", _OBSERVE),
        "confidence.": (
            "Pass a criterion that is called with logits and targets, or pass both to observe().",
            _OBSERVE,
        ),
        "alignment.": ("Pass a criterion that is called with logits and targets, or pass both to observe().", _OBSERVE),
        "loss.component": (
            "Pass the terms of the loss by name to observe() before optimizer.step().",
            'exporter.observe(components={"data": data_loss, "weights": weight_loss})',
        ),
        "upstream.": ("Pass a criterion module to watch(): its backward pass is seen.", _WATCH),
        "gradient.": ("It is read in every step in which a parameter has a gradient.", _WATCH),
        "parameter.": ("It is read for every parameter that has a gradient.", _WATCH),
        "parameter.gradient_l1": (
            "Statistics of single entries are read at intervals; use a shorter interval.",
            'exporter = Exporter(model, intervals={"statistics": 20}).watch(criterion)',
        ),
        "parameter.update": (
            "It needs a torch.optim optimizer that owns the parameters; use a shorter interval to see it sooner.",
            'exporter = Exporter(model, intervals={"updates": 10}).watch(criterion)',
        ),
        "update.": (
            "It needs a torch.optim optimizer that owns the parameters; use a shorter interval to see it sooner.",
            'exporter = Exporter(model, intervals={"updates": 10}).watch(criterion)',
        ),
        "learning_rate": ("It needs a torch.optim optimizer that owns the parameters.", _WATCH),
        "block.": ("It needs blocks; name them from input to output if they are not found automatically.", _BLOCKS),
        "gain.": ("It needs blocks; name them from input to output if they are not found automatically.", _BLOCKS),
        "block.effective_rank": (
            "It is read rarely, from four consecutive steps; use a shorter interval for ranks.",
            'exporter = Exporter(model, intervals={"ranks": 100}).watch(criterion)',
        ),
        "activation.": (
            "It is read from modules such as nn.ReLU, nn.Tanh and nn.Sigmoid; a call such as F.relu is not seen.",
            'exporter = Exporter(model, intervals={"activations": 10}).watch(criterion)',
        ),
        "gradient.norm_before_clip": (
            "It is read at every step that torch.nn.utils.clip_grad_norm_ clips, and at intervals for other clipping.",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        "gradient.clip": _every("clipping", "It is read if gradients are clipped."),
        "parameter.adam_rms": _every("moments", "It needs an optimizer with second moments, such as Adam."),
        "parameter.epsilon_share": _every("moments", "It needs an optimizer with second moments, such as Adam."),
        "optimizer.loss": ("It is read if several optimizers train the model.", _WATCH),
        "optimizer.gradient_norm": ("It is read if several optimizers train the model.", _WATCH),
        "optimizer.steps": ("It is read if several optimizers train the model.", _WATCH),
        "optimizer.": _every("moments", "It needs an optimizer with second moments, such as Adam."),
        "node.": (
            "Name the parameters that are phase and magnitude of the same nodes, or use rows of weights.",
            _PAIRS,
        ),
        "phase.": (
            "Name the parameters that are phase and magnitude of the same nodes, or use rows of weights.",
            _PAIRS,
        ),
        "magnitude.": (
            "Name the parameters that are phase and magnitude of the same nodes, or use rows of weights.",
            _PAIRS,
        ),
        "attention.": _every("attention", "It is read from attention modules and scaled_dot_product_attention."),
        "recurrent.": _every("recurrent", "It is read from modules such as nn.RNN, nn.GRU and nn.LSTM."),
        "policy.": (
            "Hand the distribution of actions over before optimizer.step().",
            "exporter.observe(policy=torch.distributions.Categorical(logits=logits))",
        ),
        "flow.": ("It is read once the path of the weights is long enough for a window.", _WATCH),
        "origin.": ("It is read only in a step in which NaN or Inf appeared; its absence is good news.", _WATCH),
        "runtime.": ("It is read in every step.", _WATCH),
        "runtime.cuda_": ("It is read where the model's parameters are on a CUDA device.", 'model.to("cuda")'),
        CUSTOM_PREFIX: (
            "It is what an analyzer of your own returns.",
            'exporter.register_analyzer("name", analyzer)',
        ),
    }
)

_BY_KIND: Mapping[str, str] = MappingProxyType(
    {
        "run": "It is read where the model and the loop have what it measures.",
        "head": "It is read from the model's attention modules.",
        "node": "It is read from the model's graph of operations.",
    }
)


def how_to_read(spec: MetricSpec) -> dict[str, str]:
    """Return one sentence and one line of code that make a run hold a metric.

    Args:
        spec: The metric. The longest known beginning of its name counts; a family that is not known here gets a
            sentence by the kind of its sites.
    """
    known = max((start for start in _HOW if spec.name.startswith(start)), key=len, default=None)
    if known is not None:
        return dict(zip(("how", "code"), _HOW[known], strict=True))
    return {
        "how": _BY_KIND.get(spec.kind, f"It is read where the model has a {spec.kind} that it applies to."),
        "code": _WATCH,
    }
