"""Over how many steps moments are averages is read only where an optimizer says which decay is whose."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


class Own(torch.optim.Optimizer):
    """An optimizer with any settings and any state, which takes plain steps."""

    def __init__(self, parameters, state, **settings):
        super().__init__(parameters, {"lr": 0.01, **settings})
        self.names = state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept["step"] = kept.get("step", 0) + 1
                for name in self.names:
                    kept.setdefault(name, torch.zeros_like(p)).lerp_(p.grad.square() if "sq" in name else p.grad, 0.1)
                p.add_(p.grad, alpha=-group["lr"])


MOMENTS = ("exp_avg", "exp_avg_sq")
CASES = {
    "Adam": (lambda ps: torch.optim.Adam(ps, betas=(0.9, 0.999)), 10.0, 1000.0, False),
    "swapped": (lambda ps: torch.optim.Adam(ps, betas=(0.999, 0.9)), 1000.0, 10.0, True),
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), 10.0, None, False),
    "long": (lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.999), 1000.0, None, True),
    "no momentum": (lambda ps: torch.optim.SGD(ps, lr=0.01), None, None, False),
    "three decays": (lambda ps: Own(ps, MOMENTS, betas=(0.98, 0.92, 0.99)), None, None, False),
    "no square": (lambda ps: Own(ps, ("exp_avg",), betas=(0.99, 0.9)), None, None, False),
    "one decay": (lambda ps: Own(ps, MOMENTS, betas=0.9), None, None, False),
    "no number": (lambda ps: Own(ps, ("momentum_buffer",), momentum=None), None, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_settings_are_read_where_their_meaning_is_known(case):
    """Three decays, as Adan has, or none beside a square, as Lion, are accused of nothing; nor does any setting raise."""
    make, first, second, accused = CASES[case]
    torch.manual_seed(0)
    model, written = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), MemoryWriter()
    optimizer = make(model.parameters())
    with Exporter(model, backends=[written], verbose=0, synchronous=True, strict=True) as exporter:
        exporter.watch()
        for _ in range(120):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for name, expected in (("momentum_steps", first), ("square_steps", second)):
        read = [v for r in written.records if (found := r.get(f"parameter.{name}")) for v in found.as_dict().values()]
        assert read == ([] if expected is None else pytest.approx([expected] * len(read), rel=1e-4))
        assert bool(read) == (expected is not None)
    assert accused == any("averages over" in issue.message for issue in exporter.issues)
