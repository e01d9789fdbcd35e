"""Members of a list that a router never chose are no fault; those that the forward pass forgets are."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.issues import Severity


class _Routed(nn.Module):
    """Samples go to one of some members by their first feature, or all of them to each; to the others none does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.stem, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.way, self.calls = way, 0

    def forward(self, x: Tensor) -> Tensor:
        """Send samples to three members, or all of them to one that was chosen."""
        if self.way == "forgotten":
            x = torch.relu(self.stem(x))
            return self.out(torch.relu(self.members[0](x) + self.members[1](x) + self.members[2](x)))
        x = torch.relu(self.stem(x))
        chosen = (x[:, 0] > 0.1).long() + (x[:, 0] > 0.5).long() if self.way == "some each" else torch.zeros(len(x))
        self.calls += 1
        if self.way == "ever fewer":  # as where a router collapses: all go to one in the end
            chosen = torch.arange(len(x)) % max(1, 4 - self.calls // 8)
        h = torch.zeros_like(x)
        for index in range(4 if self.way == "ever fewer" else 3):
            rows = (chosen == index).nonzero()[:, 0]
            h = h.index_add(0, rows, self.members[index](x[rows])) if len(rows) else h
        return self.out(torch.relu(h))


@pytest.mark.parametrize("way", ["some each", "all to one", "ever fewer", "forgotten"])
def test_what_no_router_chose_is_no_fault(way: str) -> None:
    """A member that gets no samples, or no more, where its like got chosen ones, is told as LOW; one forgotten, as HIGH."""
    torch.manual_seed(0)
    model = _Routed(way)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], verbose=0) as exporter:
        exporter.watch()
        for _ in range(260):
            x = torch.randn(48, 6)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    accused = {site for issue in exporter.issues if issue.severity > Severity.LOW for site in issue.layers}
    assert accused == ({"members.3.weight", "members.3.bias"} if way == "forgotten" else set())
