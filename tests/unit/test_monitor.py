"""GradientGainMonitor: counting rules, errors, texts, and the ways models and loops can be odd."""

import math
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.utils.checkpoint import checkpoint

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, GradientGainMonitor, MemoryWriter
from gradflow_export.hooks.module_calls import output_tensor
from gradflow_export.monitor import label

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


class Chain(nn.Module):
    """Linear blocks whose output is wrapped in some way."""

    def __init__(self, blocks=3, wrap=lambda h: h, unwrap=lambda h: h):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Wrapped(wrap) for _ in range(blocks))
        self.unwrap = unwrap

    def forward(self, x):
        for block in self.blocks:
            x = self.unwrap(block(x))
        return x.square().sum()


class Wrapped(nn.Module):
    """A linear layer that returns its output inside something."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


def inputs():
    """Return one batch."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def plain_norms():
    """Return the norms of a chain whose blocks return tensors."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        model(inputs()).backward()
    return monitor.norms()


def monitor_of(norms, **arguments):
    """Return a closed monitor that has seen gradients of the given norms; ``None`` is no gradient."""
    blocks = [nn.Identity() for _ in norms]
    with GradientGainMonitor(blocks, **arguments) as monitor:
        for block, value in zip(blocks, norms, strict=True):
            x = torch.ones(1, dtype=torch.float64, requires_grad=True)
            if value is not None:
                (block(x * 1) * value).sum().backward()
    return monitor


def golden(name, text):
    """Compare with a stored text; GRADFLOW_GOLDEN=1 writes it, on a machine that is no CI."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GRADFLOW_GOLDEN") == "1":
        assert not os.environ.get("CI"), "CI compares golden texts; write them locally and commit them"
        path.write_text(text + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text + "\n"


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("gain_monitor_healthy", [0.9542 * 1.0234 * 0.8876, 1.0234 * 0.8876, 0.8876, 1.0]),
        ("gain_monitor_damping", [0.3421 * 0.2134 * 0.0891, 0.2134 * 0.0891, 0.0891, 1.0]),
        ("gain_monitor_amplifying", [3.4512 * 5.2341, 5.2341, 1.0]),
        ("gain_monitor_mixed", [0.5, 1.0, 0.0, 2.0, None, 4.0, math.nan, 1.0, math.inf, 1.0]),
        ("gain_monitor_missing", [None, None, 1.0]),
    ],
)
def test_the_report_reads_as_it_always_did(name, norms):
    """The text of the report is pinned, number by number."""
    golden(name, monitor_of(norms).report())


def test_the_report_holds_the_lines_of_the_document():
    """The document's printed example lines appear, with logarithms rounded correctly."""
    healthy = monitor_of([0.9542 * 1.0234 * 0.8876, 1.0234 * 0.8876, 0.8876, 1.0]).report()
    for line in (
        "Gradient Gains (ratio of consecutive norms):",
        "  Transition  0 to  1: gamma=0.9542, log_gamma=-0.0469 [Healthy]",
        "  Transition  1 to  2: gamma=1.0234, log_gamma=0.0231 [Healthy]",
        "  Transition  2 to  3: gamma=0.8876, log_gamma=-0.1192 [Healthy]",
        "Summary Statistics:",
        "  Mean gain: 0.9551",
        "  Healthy (0.5 <= gamma <= 2.0): 3",
    ):
        assert line in healthy.splitlines()
    damping = monitor_of([0.3421, 1.0]).report().splitlines()
    assert "  Transition  0 to  1: gamma=0.3421, log_gamma=-1.0727 [DAMPING]" in damping
    assert "  Damping (gamma < 0.5): 1" in damping
    amplifying = monitor_of([3.4512, 1.0]).report().splitlines()
    assert "  Transition  0 to  1: gamma=3.4512, log_gamma=1.2387 [AMPLIFYING]" in amplifying
    assert "  Max gain: 3.4512" in amplifying
    assert "  Amplifying (gamma > 2.0): 1" in amplifying
    assert "heuristic" in healthy


def test_counting_rules():
    """Each transition is counted once: thresholds are healthy, a vanished denominator is inf whatever stands above."""
    stats = monitor_of([0.5, 1.0, 0.0, 2.0, None, 4.0]).summary_stats()
    counts = {key.removeprefix("num_"): value for key, value in stats.items() if key.startswith("num_")}
    assert counts == {"healthy": 1, "vanishing": 1, "damping": 1, "missing": 2, "amplifying": 0, "nonfinite": 0}
    assert monitor_of([2.0, 1.0]).summary_stats()["num_healthy"] == 1
    assert monitor_of([2.0001, 1.0]).summary_stats()["num_amplifying"] == 1
    assert monitor_of([0.0, 0.0]).gains() == [math.inf]


def test_a_nonfinite_norm_is_counted_apart_and_said_so():
    """Neither NaN nor Inf counts as vanishing, and the label agrees with the count."""
    monitor = monitor_of([math.inf, 1.0, math.inf, math.nan, 1.0])
    stats = monitor.summary_stats()
    assert stats["num_nonfinite"] == 4
    assert sum(value for key, value in stats.items() if key.startswith("num_")) == 4
    assert monitor.report().count("[NONFINITE]") == 4
    assert label(math.nan) == "NONFINITE"


def test_without_a_finite_gain_the_means_are_nan():
    """There is nothing to average over one block or over none that got a gradient."""
    for monitor in (monitor_of([1.0]), monitor_of([None, 1.0])):
        stats = monitor.summary_stats()
        assert all(math.isnan(stats[key]) for key in ("mean_gain", "min_gain", "max_gain", "mean_log_gain"))


def test_eps_decides_what_has_vanished():
    """A denominator below eps is inf; at or above it the ratio is taken."""
    assert monitor_of([1.0, 1e-3], eps=1e-2).gains() == [math.inf]
    assert monitor_of([1.0, 1e-3], eps=1e-3).gains() == pytest.approx([1000.0])
    assert monitor_of([1e-40, 1.0]).log_gains() == pytest.approx([math.log(1e-30)])


@pytest.mark.parametrize(("kind", "expected"), [("l2", 5.0), ("l1", 7.0), ("linf", 4.0), ("mean", 3.5)])
def test_each_norm_type(kind, expected):
    """The four documented norms of the gradient (3, -4)."""
    block = nn.Identity()
    with GradientGainMonitor([block], norm_type=kind) as monitor:
        x = torch.zeros(2, requires_grad=True)
        (block(x * 1) * torch.tensor([3.0, -4.0])).sum().backward()
    assert monitor.norms() == [expected]


def test_two_backward_passes_raise_when_strict():
    """The error names the block, both causes and both ways out, and comes out of backward()."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        model(inputs()).backward()
        loss = model(inputs())
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    assert str(caught.value) == (
        "a gradient arrived at block 2 (Wrapped) twice without reset(): either backward() ran again, or this block was "
        "called more than once in one forward pass. Call reset() between backward passes, or construct with "
        "strict_single_backward=False to keep the last one."
    )
    assert monitor.norms() == plain_norms()


def test_a_block_called_twice_raises_when_strict():
    """Weight sharing delivers two gradients to one block."""
    block = nn.Linear(4, 4)
    with GradientGainMonitor([block]), pytest.raises(RuntimeError, match="called more than once"):
        block(block(inputs())).sum().backward()


def test_the_last_backward_pass_counts_when_not_strict():
    """Norms are overwritten, not added."""
    model = Chain()
    with GradientGainMonitor(model.blocks, strict_single_backward=False) as monitor:
        (model(inputs()) * 100).backward()
        model(inputs()).backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_reset_forgets_and_allows_the_next_backward():
    """After reset() nothing is recorded and a strict monitor takes the next gradients."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        (model(inputs()) * 100).backward()
        monitor.reset()
        with pytest.raises(RuntimeError, match="since the monitor was made or reset"):
            monitor.norms()
        model(inputs()).backward()
        assert monitor.norms() == pytest.approx(plain_norms())


def test_reset_between_forward_and_backward_keeps_listening():
    """Gradients still on their way when reset() is called are taken."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        loss = model(inputs())
        monitor.reset()
        loss.backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_close_leaves_no_hook_and_keeps_what_was_read():
    """Closing twice is harmless, modules are as they were, and the norms can still be read."""
    model = Chain()
    before = len(module_globals._global_forward_hooks)
    monitor = GradientGainMonitor(model.blocks)
    assert len(module_globals._global_forward_hooks) == before + 1
    model(inputs()).backward()
    monitor.close()
    monitor.close()
    assert len(module_globals._global_forward_hooks) == before
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())
    model(inputs()).backward()
    assert monitor.norms() == plain_norms()


def test_the_context_manager_closes_on_exceptions():
    """The user's error comes through, and no hook stays behind."""
    model, before = Chain(), len(module_globals._global_forward_hooks)

    def fail():
        with GradientGainMonitor(model.blocks):
            model(inputs()).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(module_globals._global_forward_hooks) == before


def test_a_failed_construction_leaves_no_hook():
    """Arguments are checked before anything is attached."""
    before = len(module_globals._global_forward_hooks)
    with pytest.raises(ArgumentError):
        GradientGainMonitor([nn.Identity()], norm_type="l3")
    assert len(module_globals._global_forward_hooks) == before


class HuggingFaceLike(OrderedDict):
    """A mapping whose entries are attributes too."""

    def __getattr__(self, name):
        return self[name]


class NotAMapping:
    """An output that holds no tensor anyone could find."""


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda h: (h, torch.zeros(1)), lambda o: o[0]),
        (lambda h: [torch.zeros(1), h], lambda o: o[1]),
        (lambda h: {"aux": h.detach(), "out": h}, lambda o: o["out"]),
        (lambda h: {"aux": h * 0 + 1, "last_hidden_state": h}, lambda o: o["last_hidden_state"]),
        (lambda h: HuggingFaceLike(past=(h * 2,), hidden_states=(h,)), lambda o: o.hidden_states[0]),
        (lambda h: {"logits": (torch.arange(3), (h,))}, lambda o: o["logits"][1][0]),
        (lambda h: torch.return_types.max((h, torch.arange(3))), lambda o: o[0]),
    ],
    ids=["tuple", "list", "dict", "preferred key", "hugging face", "nested", "named tuple"],
)
def test_wrapped_outputs_give_the_same_norms(wrap, unwrap):
    """The tensor that goes on is found in tuples, lists and mappings, nested or not."""
    model = Chain(wrap=wrap, unwrap=unwrap)
    with GradientGainMonitor(model.blocks) as monitor:
        model(inputs()).backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_outputs_without_a_tensor_are_passed_over():
    """What holds no floating tensor with a gradient has no norm."""
    for output in (NotAMapping(), None, (), {}, torch.arange(3), torch.zeros(2), "text"):
        assert output_tensor(output) is None


def test_frozen_blocks_below_the_first_trainable_one_are_missing():
    """No gradient reaches them, which is None and not zero."""
    model = Chain(4)
    model.blocks[:2].requires_grad_(False)
    with GradientGainMonitor(model.blocks) as monitor:
        model(inputs()).backward()
    norms = monitor.norms()
    assert norms[:2] == [None, None]
    assert all(n > 0 for n in norms[2:])
    assert monitor.gains()[:2] == [None, None]
    assert "no gradient [MISSING]" in monitor.report()


def test_an_unused_block_is_missing():
    """A block that does not take part in the loss has no gradient."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        x = model.blocks[0](inputs())
        model.blocks[1](x)
        model.blocks[2](x).sum().backward()
    assert monitor.norms()[1] is None
    assert monitor.norms()[0] > 0


def test_an_in_place_activation_after_a_block_is_seen_through():
    """The gradient is the one at the block's own output, before the in-place operation."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def run(activation):
        with GradientGainMonitor(layers) as monitor:
            x = inputs()
            for layer in layers:
                x = activation(layer(x))
            x.sum().backward()
        return monitor.norms()

    assert run(nn.ReLU(inplace=True)) == pytest.approx(run(nn.ReLU()))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpointing_changes_no_norm(reentrant, whole):
    """Both kinds of checkpointing, around each block or inside it, deliver each gradient once, strict or not."""
    torch.manual_seed(0)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=reentrant)

    blocks = nn.ModuleList(Inside() for _ in range(3))

    def run(around):
        with GradientGainMonitor(blocks if not whole else [b.linear for b in blocks]) as monitor:
            x = inputs().requires_grad_()
            for block in blocks:
                x = around(block, x)
            x.square().sum().backward()
        return monitor.norms()

    if whole:
        assert None not in run(lambda block, x: block.linear(x))
    else:
        with pytest.raises(RuntimeError, match="none was called"):
            run(lambda block, x: block.linear(x))
    expected = run(lambda block, x: block(x))
    plain = [b.linear for b in blocks]
    with GradientGainMonitor(plain) as monitor:
        x = inputs()
        for layer in plain:
            x = layer(x)
        x.square().sum().backward()
    assert expected == pytest.approx(monitor.norms())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_chain_is_measured(reentrant):
    """Blocks that are run again during backward are counted once."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        x = inputs().requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.square().sum().backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_validation_in_between_is_not_seen():
    """Calls without gradients record nothing and do not disturb."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        with torch.no_grad():
            model(inputs())
        loss = model(inputs())
        with torch.no_grad():
            model(inputs())
        loss.backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_a_backward_pass_after_close_is_still_taken():
    """Outputs made while the monitor was open deliver their gradients later."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        loss = model(inputs())
    loss.backward()
    assert monitor.norms() == pytest.approx(plain_norms())


def test_two_monitors_at_once_do_not_know_each_other():
    """Each has its own norm type, its own strictness and its own end."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as outer:
        with GradientGainMonitor(model.blocks, norm_type="linf", strict_single_backward=False) as inner:
            model(inputs()).backward()
        outer.reset()
        model(inputs()).backward()
    assert outer.norms() == pytest.approx(plain_norms())
    assert all(a < b for a, b in zip(inner.norms(), outer.norms(), strict=True))


def test_a_monitor_inside_a_watched_model_agrees_with_the_exporter():
    """Both read the same norms, and the monitor's end does not end the exporter."""
    model, memory = Chain(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Exporter(model, backends=memory, strict=True).watch():
        for _ in range(2):
            with GradientGainMonitor(model.blocks) as monitor:
                model(inputs()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(memory.records) == 2
    for record in memory.records:
        assert record.get("block.gradient_norm").values.tolist() == pytest.approx(monitor.norms(), rel=1e-6)
        assert record.get("block.gain").values.tolist() == pytest.approx(monitor.gains(), rel=1e-6)


def test_measuring_changes_no_gradient():
    """Parameters get the same gradients bit for bit."""
    plain, watched = Chain(), Chain()
    plain(inputs()).backward()
    with GradientGainMonitor(watched.blocks):
        watched(inputs()).backward()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_norms_hold_no_graph():
    """What is recorded are plain numbers."""
    assert all(type(n) is float for n in plain_norms())


@pytest.mark.parametrize("kind", [list, nn.ModuleList, lambda m: nn.Sequential(*m), tuple, iter])
def test_blocks_may_be_any_series_of_modules(kind):
    """Lists, ModuleLists, Sequentials and iterators are taken in their order."""
    monitor = GradientGainMonitor(kind([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert monitor.num_blocks == 2
    monitor.close()


@pytest.mark.parametrize(
    ("blocks", "arguments", "kind", "text"),
    [
        ([], {}, ArgumentError, "blocks is empty"),
        ([nn.Identity(), 3], {}, ArgumentTypeError, r"blocks\[1\] must be a torch.nn.Module, got int"),
        (nn.Linear(2, 2), {}, ArgumentTypeError, "got a single Linear; pass its blocks"),
        (3, {}, ArgumentTypeError, "got int"),
        ([nn.Identity()], {"norm_type": "L2"}, ArgumentError, "unknown norm_type 'L2'; known are: l1, l2, linf, mean"),
        ([nn.Identity()], {"norm_type": 2}, ArgumentError, "unknown norm_type 2"),
        ([nn.Identity()], {"eps": 0.0}, ArgumentError, "eps must be a positive number, got 0.0"),
        ([nn.Identity()], {"eps": math.nan}, ArgumentError, "eps must be a positive number"),
        ([nn.Identity()], {"eps": "x"}, ArgumentError, "eps must be a positive number"),
    ],
)
def test_bad_arguments_are_named(blocks, arguments, kind, text):
    """The message says what was expected, what came and what to do."""
    with pytest.raises(kind, match=text):
        GradientGainMonitor(blocks, **arguments)


def test_a_block_named_twice_is_refused():
    """Gains are measured between different modules."""
    block = nn.Identity()
    with pytest.raises(ArgumentError, match="the same module twice, as '0' and '2'"):
        GradientGainMonitor([block, nn.Identity(), block])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_length_is_the_number_of_blocks(count):
    """Whatever was seen; a monitor of any length is true."""
    monitor = GradientGainMonitor(nn.ModuleList(nn.Linear(2, 2) for _ in range(count)))
    assert len(monitor) == monitor.num_blocks == count
    assert monitor
    monitor.close()


@pytest.mark.parametrize("method", ["norms", "gains", "log_gains", "summary_stats", "report"])
def test_reading_before_any_backward_pass_is_an_error(method):
    """It says what is missing: the forward pass, or the backward pass; after one, all is told."""
    model = Chain()
    with GradientGainMonitor(model.blocks) as monitor:
        with pytest.raises(RuntimeError, match=r"expected a backward pass through the 3 blocks.*forward pass inside"):
            getattr(monitor, method)()
        loss = model(inputs())
        with pytest.raises(RuntimeError, match=r"since the monitor was made or reset\. Call loss\.backward\(\) first"):
            getattr(monitor, method)()
        loss.backward()
        assert getattr(monitor, method)()
        monitor.reset()
        with pytest.raises(RuntimeError, match="made or reset"):
            getattr(monitor, method)()


def test_blocks_that_need_no_gradient_are_named_as_the_reason():
    """A backward pass that reaches no block is told from one that was forgotten as far as that is possible."""
    model = Chain()
    model.requires_grad_(False)
    with GradientGainMonitor(model.blocks) as monitor:
        model(inputs())
        with pytest.raises(RuntimeError, match="nothing in or before them requires a gradient"):
            monitor.report()


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (0.3, "4 of 4 transitions damp the gradient (gamma < 0.5). From the last block to the first it becomes 0.0081"),
        (3.0, "4 of 4 transitions amplify the gradient (gamma > 2.0). From the last block to the first it becomes 81"),
    ],
)
def test_the_report_ends_with_advice_where_most_transitions_go_wrong(factor, told):
    """It counts them, says what comes of all together, and names what to change; a healthy chain gets no advice."""
    text = monitor_of([factor**depth for depth in (4, 3, 2, 1, 0)]).report()
    assert told in text
    assert text.count("\n  - ") >= 3
    assert ("skip connections" in text) is (factor < 1)
    assert ("clip_grad_norm_" in text) is (factor > 1)
    assert "  - " not in monitor_of([1.0, 1.1, 0.9, 1.0, 1.0]).report()
