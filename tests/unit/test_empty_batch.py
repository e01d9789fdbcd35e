"""A batch without samples is legal, and evidence of nothing: nothing fails, and what is read goes on."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS

EMPTY = (4, 7)


class Experts(nn.Module):
    """Sends every sample to one of two experts, and at times none to the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        """Return scores."""
        chosen = x[:, 0] > 9
        hidden = torch.cat([self.first(x[~chosen]), self.second(x[chosen])])
        return self.head(torch.relu(hidden))


class Words(nn.Module):
    """Reads words with a recurrent layer and attention."""

    def __init__(self):
        super().__init__()
        self.table, self.steps, self.head = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        """Return scores at each place."""
        return self.head(self.mix(self.steps(self.table(x))[0]))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def picture():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def numbers(count):
    return torch.randn(count, 6), torch.randint(0, 3, (count,))


def written_out(scores, y):
    return -scores.log_softmax(-1).gather(1, y[:, None]).sum()


CASES = {
    "classes": (mlp, numbers, nn.CrossEntropyLoss(reduction="sum"), True),
    "function": (mlp, numbers, lambda z, y: functional.cross_entropy(z, y, reduction="sum"), False),
    "written out": (mlp, numbers, written_out, False),
    "margin": (mlp, numbers, nn.MultiMarginLoss(reduction="sum"), True),
    "numbers": (mlp, numbers, lambda z, y: (z[:, 0] - y).square().sum(), False),
    "absolute": (mlp, numbers, lambda z, y: (z[:, 0] - y).abs().sum(), False),
    "binary": (
        mlp,
        numbers,
        lambda z, y: functional.binary_cross_entropy_with_logits(z[:, 0], y / 2, reduction="sum"),
        False,
    ),
    "pictures": (
        picture,
        lambda count: (torch.randn(count, 1, 8, 8), torch.randint(0, 3, (count,))),
        nn.CrossEntropyLoss(reduction="sum"),
        True,
    ),
    "words": (
        Words,
        lambda count: (torch.randint(0, 9, (count, 5)), torch.randint(0, 3, (count, 5))),
        lambda z, y: functional.cross_entropy(z.transpose(1, 2), y, reduction="sum"),
        False,
    ),
    "experts": (Experts, numbers, nn.CrossEntropyLoss(reduction="sum"), True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_samples_is_evidence_of_nothing(name):
    """Every instrument looks at every step, and errors are let through."""
    make, draw, loss, handed = CASES[name]
    torch.manual_seed(0)
    model, memory = make(), MemoryWriter()
    exporter = Exporter(
        model, backends=[memory], synchronous=True, intervals=dict.fromkeys(INTERVALS, 1), strict=True, verbose=0
    ).watch(loss if handed else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, 11):
        optimizer.zero_grad()
        x, y = draw(0 if step in EMPTY else 8)
        loss(model(x), y).backward()
        optimizer.step()
    exporter.close()
    assert exporter.summary()["set_aside"] == []
    for record in memory.records:
        facts = {(each.kind, fact) for each in record.evidence for fact in each.values if each.layer}
        read = {kind for kind, _ in facts} & {"column", "input", "loss", "mistake", "target"} | facts & {
            ("layer", "row")
        }
        assert (read == set()) == (record.step in EMPTY), (record.step, read)
        sizes = record.get("block.output_rms")
        assert (sizes is None or not sizes.values[sizes.present].size) == (record.step in EMPTY)
        assert sizes is None or sizes.values[sizes.present].all()
