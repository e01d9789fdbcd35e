"""Every code snippet of the gradient-gain-monitor document runs as written, with the import changed."""

import copy
import math
import types

import pytest
import torch
from torch import nn

import gradflow_export

QUICK_START = """
import torch
import torch.nn as nn
from gradflow_export import GradientGainMonitor

# Create your model with blocks
model_blocks = nn.ModuleList([
    TransformerBlock(dim=512) for _ in range(12)
])

# Monitor gradient flow
with GradientGainMonitor(model_blocks) as monitor:
    # Forward pass
    output = run_forward(model_blocks, inputs)
    loss = compute_loss(output, targets)

    # Backward pass
    loss.backward()

    # Analyze gradient flow
    print(monitor.report())
"""

CONSTRUCTOR = """
monitor = GradientGainMonitor(
    blocks,                      # List/ModuleList/Sequential of blocks
    norm_type='l2',             # 'l2', 'l1', 'linf', or 'mean'
    strict_single_backward=True, # Raise error on multiple backward?
    eps=1e-30                   # Epsilon for numerical stability
)
"""

SUMMARY_STATS = """
described = {
    'mean_gain': float,           # Average gain
    'min_gain': float,            # Minimum gain
    'max_gain': float,            # Maximum gain
    'mean_log_gain': float,       # Average log-gain
    'num_amplifying': int,        # Count of gamma > 2.0
    'num_damping': int,           # Count of gamma < 0.5
    'num_healthy': int,           # Count of 0.5 ≤ gamma ≤ 2.0
    'num_vanishing': int,         # Count of gamma = inf
    'num_missing': int            # Count of None (no gradient)
}
"""

BASIC_DIAGNOSTIC = """
with GradientGainMonitor(model.blocks) as monitor:
    loss.backward()
    print(monitor.report())
"""

TRAINING_LOOP = """
monitor = GradientGainMonitor(model.blocks, strict_single_backward=False)

for epoch in range(num_epochs):
    for batch in dataloader:
        optimizer.zero_grad()
        loss = compute_loss(batch)
        loss.backward()

        # Check gradient flow periodically
        if step % 100 == 0:
            stats = monitor.summary_stats()
            if stats['num_damping'] > len(model.blocks) // 2:
                print("⚠️  Warning: Many damping transitions!")

        optimizer.step()
        monitor.reset()

monitor.close()
"""

GRADIENT_ACCUMULATION = """
monitor = GradientGainMonitor(model.blocks, strict_single_backward=False)
optimizer.zero_grad()

for i, micro_batch in enumerate(micro_batches):
    loss = compute_loss(micro_batch) / len(micro_batches)
    loss.backward()

    # Monitor each micro-batch
    print(f"Micro-batch {i}: {monitor.summary_stats()['mean_gain']:.4f}")
    monitor.reset()

optimizer.step()
monitor.close()
"""

ARCHITECTURE_COMPARISON = """
architectures = {
    'Pre-LN': pre_ln_blocks,
    'Post-LN': post_ln_blocks,
}

for name, blocks in architectures.items():
    with GradientGainMonitor(blocks) as monitor:
        loss = run_model(blocks)
        loss.backward()
        stats = monitor.summary_stats()
        print(f"{name}: mean_gain={stats['mean_gain']:.4f}")
"""

BEST_PRACTICES = """
with GradientGainMonitor(blocks) as monitor:
    # your code
    loss = run_model(blocks)
    loss.backward()

if step % 100 == 0:
    # monitor this step
    pass

torch.manual_seed(42)
# compare different architectures

# Monitor first few epochs carefully
if epoch < 3:
    print(monitor.report())

log_gains = monitor.log_gains()
plt.plot(log_gains)
"""


class Residual(nn.Module):
    """A block with or without a skip path."""

    def __init__(self, dim=8, skip=True):
        super().__init__()
        self.norm, self.linear, self.skip = nn.LayerNorm(dim), nn.Linear(dim, dim), skip

    def forward(self, x):
        out = self.linear(self.norm(x))
        return x + out if self.skip else 0.1 * out


def forward(blocks, x):
    """Run blocks one after the other."""
    for block in blocks:
        x = block(x)
    return x


@pytest.fixture
def names(capsys):
    """Return what the document takes for granted, and nothing it defines itself."""
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(Residual() for _ in range(5))
    x = torch.randn(4, 8)

    def compute_loss(output, targets=None):
        return (forward(model.blocks, output) if targets is None else output - targets).square().mean()

    drawn = []
    return {
        "GradientGainMonitor": gradflow_export.GradientGainMonitor,
        "torch": torch,
        "TransformerBlock": Residual,
        "run_forward": forward,
        "inputs": torch.randn(2, 512),
        "targets": torch.randn(2, 512),
        "compute_loss": compute_loss,
        "model": model,
        "blocks": model.blocks,
        "loss": compute_loss(x),
        "num_epochs": 2,
        "dataloader": [torch.randn(4, 8) for _ in range(3)],
        "micro_batches": [torch.randn(4, 8) for _ in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "step": 0,
        "epoch": 0,
        "pre_ln_blocks": copy.deepcopy(model.blocks),
        "post_ln_blocks": nn.ModuleList(Residual(skip=False) for _ in range(5)),
        "run_model": lambda blocks: forward(blocks, x).square().mean(),
        "plt": types.SimpleNamespace(plot=drawn.append),
        "drawn": drawn,
    }


def test_quick_start(names, capsys):
    """Twelve blocks give twelve norms and eleven labelled transitions."""
    exec(QUICK_START, names)
    text = capsys.readouterr().out
    assert len(names["monitor"].norms()) == 12
    assert text.count("[Healthy]") + text.count("[DAMPING]") + text.count("[AMPLIFYING]") == 11


def test_constructor(names):
    """The documented arguments are the defaults."""
    exec(CONSTRUCTOR, names)
    written, plain = names["monitor"], gradflow_export.GradientGainMonitor(names["blocks"])
    for attribute in ("norm_type", "strict_single_backward", "eps"):
        assert getattr(written, attribute) == getattr(plain, attribute)
    written.close()
    plain.close()


def test_summary_stats(names):
    """Every documented statistic is there with the documented type."""
    exec(SUMMARY_STATS, names)
    with gradflow_export.GradientGainMonitor(names["blocks"]) as monitor:
        names["run_model"](names["blocks"]).backward()
    stats = monitor.summary_stats()
    for key, kind in names["described"].items():
        assert type(stats[key]) is kind
    assert set(stats) == {*names["described"], "num_nonfinite"}
    assert sum(stats[key] for key in stats if key.startswith("num_")) == 4


def test_basic_diagnostic(names, capsys):
    """Where the loss was made before the monitor was opened it says so; with the forward pass inside it reports."""
    with pytest.raises(RuntimeError, match="Run the forward pass inside the with statement too"):
        exec(BASIC_DIAGNOSTIC, names)
    forward_inside = BASIC_DIAGNOSTIC.replace(
        "    loss.backward()", "    loss = run_model(blocks)\n    loss.backward()"
    )
    exec(forward_inside, names)
    assert capsys.readouterr().out.count("Transition") == 4
    assert len(names["monitor"].norms()) == len(names["monitor"]) == 5


def test_training_loop(names, capsys):
    """The loop trains, and the warning of the document appears where most transitions damp."""
    exec(TRAINING_LOOP, names)
    assert "Warning" not in capsys.readouterr().out
    names["model"].blocks = names["post_ln_blocks"]
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.0)
    for block in names["post_ln_blocks"]:
        block.norm = nn.Identity()
    exec(TRAINING_LOOP, names)
    assert capsys.readouterr().out.count("Warning: Many damping transitions!") == 6


def test_gradient_accumulation(names, capsys):
    """Each micro-batch has its own finite mean gain."""
    exec(GRADIENT_ACCUMULATION, names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Micro-batch 0", "Micro-batch 1", "Micro-batch 2"]
    assert all(math.isfinite(float(line.partition(":")[2])) for line in lines)


def test_architecture_comparison(names, capsys):
    """Both architectures are measured."""
    exec(ARCHITECTURE_COMPARISON, names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Pre-LN: mean_gain=")
    assert lines[1].startswith("Post-LN: mean_gain=")


def test_best_practices(names, capsys):
    """What was recorded can be read and drawn after the monitor was closed."""
    exec(BEST_PRACTICES, names)
    assert "Gradient Gains (ratio of consecutive norms):" in capsys.readouterr().out
    assert len(names["drawn"][0]) == 4
