"""Outputs of another size in evaluation than in training are told, whatever the cause; other weights and new data are not."""

import copy

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


class Recurrent(nn.Module):
    """An LSTM, whose output is a tuple, and a last layer."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.lstm(x.unsqueeze(1))[0][:, -1])


def convolutions():
    first = nn.Conv1d(1, 16, 3, padding=1, bias=False)
    layers = nn.Unflatten(1, (1, 8)), first, nn.BatchNorm1d(16), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 3))


def dense(dropout=0.0):
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))


def samples(count):
    x = torch.randn(count, 8)
    return x, x[:, :3].argmax(1)


def told(model, *, prepared=lambda x: x, weights=lambda _model: None, size=64, every=12, mixed=(1.0,)):
    """Train on new samples, evaluate now and then; return the model and its issues of evaluation."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for step in range(96):
            x, y = samples(32)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(mixed[step % len(mixed)] * x), y).backward()
            optimizer.step()
            if step % every == every - 1:
                held = copy.deepcopy(model.state_dict())
                weights(model)
                model.eval()
                with torch.no_grad():
                    for _ in range(2):
                        model(prepared(samples(size)[0]))
                model.train()
                if weights.__name__ != "<lambda>":
                    model.load_state_dict(held)
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.EVAL_RANDOM]


FAULTS = {
    "scale": lambda: told(dense(), prepared=lambda x: 50 * x),
    "scale of sequences": lambda: told(Recurrent(), prepared=lambda x: 0.01 * x),
    "units": lambda: told(convolutions(), prepared=lambda x: 30 + 10 * x),
    "dropout": lambda: told(dense(dropout=0.99)),
}


@pytest.mark.parametrize("which", FAULTS)
def test_inputs_that_are_prepared_otherwise_and_dropout_of_nearly_all_are_told_with_their_block(which):
    """The statistics of batch norm are the check's own pair of programs."""
    torch.manual_seed(0)
    (issue,) = FAULTS[which]()
    assert issue.cause == "evaluation differs"
    assert issue.layers[0] in {"0", "1", "3", "last"}
    assert 50 < issue.step < 100


@pytest.mark.parametrize(("seed", "size"), [(0, 1), (1, 2), (0, 64)])
@pytest.mark.parametrize("make", [dense, convolutions, Recurrent, lambda: dense(dropout=0.5)])
def test_an_evaluation_of_new_samples_is_none_at_any_size(make, size, seed):
    """Single samples among them."""
    torch.manual_seed(seed)
    assert told(make(), size=size) == []


@pytest.mark.parametrize("mixed", [(1.0, 20.0), (1.0, 1.0, 20.0), (20.0, 20.0, 1.0)])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_an_evaluation_of_samples_as_some_of_those_in_training_is_none(mixed, scale):
    """As of one of several sources."""
    torch.manual_seed(0)
    assert told(dense(), prepared=lambda x: scale * x, mixed=mixed) == []


def test_an_evaluation_of_other_weights_is_none():
    """An average that begins at the first weights is much smaller at first."""

    def tenth(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.1)

    torch.manual_seed(0)
    assert told(dense(), weights=tenth) == []
