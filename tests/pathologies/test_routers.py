"""Members of a list that a router never chose are no fault; those that the forward pass forgets are."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.issues import Severity


class _Routed(nn.Module):
    """Samples go to one of the members by their first feature; to the last one none does."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 3)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        """Send each sample to one of three, or all of them to each of three."""
        if self.whole:
            return self.out(torch.relu(self.members[0](x) + self.members[1](x) + self.members[2](x)))
        chosen = torch.bucketize(x[:, 0], torch.linspace(-0.5, 0.5, 2))
        h = torch.zeros_like(x)
        for index in range(3):
            rows = (chosen == index).nonzero()[:, 0]
            h = h.index_add(0, rows, self.members[index](x[rows]))
        return self.out(torch.relu(h))


@pytest.mark.parametrize("whole", [False, True])
def test_what_no_router_chose_is_no_fault(whole: bool) -> None:
    """A member that got no samples, where its like got some each, is told as LOW; one that is forgotten, as HIGH."""
    torch.manual_seed(0)
    model = _Routed(whole=whole)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], verbose=0) as exporter:
        exporter.watch()
        for _ in range(320):
            x = torch.randn(48, 6)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    accused = {site for issue in exporter.issues if issue.severity > Severity.LOW for site in issue.layers}
    assert accused == ({"members.3.weight", "members.3.bias"} if whole else set())
