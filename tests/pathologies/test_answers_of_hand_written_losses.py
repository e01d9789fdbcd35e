"""Of a loss written by hand it is known what the model answered, whatever stands last in it."""

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity

ENDS = {
    "residual": lambda m, h, x: m.last(h) + m.skip(x),
    "scaled": lambda m, h, _: m.last(h) * 3.0 + 1.0,
    "squeezed": lambda m, h, x: (m.last(h) + m.skip(x)).squeeze(-1),
    "product": lambda m, h, x: (h * m.wide(x)).sum(-1),
    "clamped": lambda m, h, _: m.last(h).clamp(-100, 100),
    "plain": lambda m, h, _: m.last(h),
}
LOSSES = {
    "squares": lambda out, y: (out - y).pow(2).mean() / 2.0,
    "power": lambda out, y: ((y - out) ** 2).mean(),
    "absolute": lambda out, y: (out - y).abs().mean(),
    "half": lambda out, y: 0.5 * ((out - y) ** 2).sum() / len(out),
}


class Net(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.end, self.first = end, nn.Linear(6, 16)
        if end == "product":
            self.wide = nn.Linear(6, 16)
        else:
            self.last = nn.Linear(16, 1)
        if end in {"residual", "squeezed"}:
            self.skip = nn.Linear(6, 1)

    def forward(self, x):
        return ENDS[self.end](self, torch.tanh(self.first(x)), x)


def run(end, loss, *, learns):
    """Return the types of what is said, and the loss against the best constant's as it was read."""
    torch.manual_seed(0)
    model, truth, memory = Net(end), torch.randn(6, 1), MemoryWriter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[memory], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(140):
            x = torch.randn(32, 6)
            out = model(x)
            y = (x if learns else torch.randn(32, 6)) @ truth
            optimizer.zero_grad()
            LOSSES[loss](out, y.reshape(out.shape)).backward()
            optimizer.step()
    shares = [v for r in memory.records for v in r.facts.get("loss.over_constant", {}).values() if v is not None]
    return {i.issue_type for i in exporter.issues if i.severity >= Severity.MEDIUM}, shares


@pytest.mark.parametrize(
    ("end", "loss"),
    [*((end, "squares") for end in ENDS), *(("residual", loss) for loss in LOSSES if loss != "squares")],
)
def test_its_level_is_known(end, loss):
    """Nothing is said where it learns; with the targets of other samples its loss is that of a constant."""
    told, shares = run(end, loss, learns=True)
    assert told == set()
    assert np.median(shares[-10:]) < 0.5
    told, shares = run(end, loss, learns=False)
    assert told <= {IssueType.NOT_LEARNING, IssueType.BAD_TARGETS}
    assert np.median(shares[-10:]) > 0.6
