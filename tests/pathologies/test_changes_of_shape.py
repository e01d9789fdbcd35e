"""Views that stand where dimensions were to be moved, and shapes that broadcast: each beside what was meant."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.autograd_graph.handwritten_loss import forms_of

MIXED = "dimensions mixed by a change of shape"
BROADCAST = "predictions and targets broadcast"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def causes(model, step, steps=6):
    """Train with ``loss = step()``; return what is wrong with the loss."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    return [issue.cause for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS]


class States(nn.Module):
    """The last states of both directions, of all samples one after the other, made a row for each sample."""

    def __init__(self, how):
        super().__init__()
        self.how, self.read, self.last = how, nn.GRU(4, 6, bidirectional=True), nn.Linear(12, 3)

    def forward(self, x):
        states = self.read(x)[1]  # [directions, samples, 6]
        if self.how == "steps":  # all steps, as [steps, samples, 12]
            return self.last(self.read(x)[0].reshape(x.shape[1], len(x), -1).mean(1))
        if self.how == "put together":
            return self.last(torch.cat([states[0], states[1]], 1))
        states = states.transpose(0, 1) if self.how == "swapped" else states
        return self.last(states.reshape(x.shape[1], -1))


@pytest.mark.parametrize("samples", [5, 12, 32])
@pytest.mark.parametrize(
    ("how", "mixed"), [("viewed", True), ("steps", True), ("swapped", False), ("put together", False)]
)
def test_a_view_that_mixes_samples_is_told(how, mixed, samples):
    """For batches of any size, but for those that are as large as the dimension that comes first."""
    model = States(how)
    found = causes(model, lambda: F.cross_entropy(model(torch.randn(7, samples, 4)), torch.randint(3, (samples,))))
    assert found == [MIXED] * mixed


class Heads(nn.Module):
    """Attention of several heads, which are joined again."""

    def __init__(self, heads, how):
        super().__init__()
        self.heads, self.how = heads, how
        self.enter, self.qkv, self.leave = nn.Linear(3, 24), nn.Linear(24, 72), nn.Linear(24, 2)

    def forward(self, x):
        samples, steps, _ = x.shape
        parts = self.qkv(self.enter(x)).view(samples, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.how == "by hand":
            q, k, v = parts
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(*parts)
        mixed = mixed.transpose(1, 2) if self.how == "transposed" else mixed
        return self.leave(mixed.reshape(samples, steps, 24))


@pytest.mark.parametrize("how", ["fused", "by hand", "transposed"])
@pytest.mark.parametrize(("samples", "steps", "heads"), [(6, 10, 4), (32, 16, 4), (3, 12, 6), (8, 50, 3), (16, 6, 4)])
def test_heads_are_joined_by_a_transpose(samples, steps, heads, how):
    """Without it, what is put into a row comes from other steps, whatever the sizes; fewer steps than heads apart."""
    model = Heads(heads, how)
    found = causes(model, lambda: F.mse_loss(model(torch.randn(samples, steps, 3)), torch.randn(samples, steps, 2)))
    assert found == [MIXED] * (how != "transposed")


@pytest.mark.parametrize(("channels", "side"), [(12, 5), (16, 6), (10, 8), (64, 7)])
@pytest.mark.parametrize("how", ["viewed", "permuted", "flattened"])
def test_pixels_are_made_rows_by_a_permute(channels, side, how):
    """A map of features, ``[N, C, H, W]``, becomes ``[N, H * W, C]``."""
    model = nn.ModuleDict({"maps": nn.Conv2d(3, channels, 3, padding=1), "last": nn.Linear(channels, 2)})

    def step():
        maps = model["maps"](torch.randn(4, 3, side, side))
        rows = {
            "viewed": lambda: maps.view(4, -1, channels),
            "permuted": lambda: maps.permute(0, 2, 3, 1).reshape(4, -1, channels),
            "flattened": lambda: maps.flatten(2).transpose(1, 2),
        }[how]()
        return F.mse_loss(model["last"](torch.relu(rows)).mean(1), torch.randn(4, 2))

    assert causes(model, step) == [MIXED] * (how == "viewed")


@pytest.mark.parametrize("turned", [False, True])
def test_answers_of_steps_are_turned_by_a_transpose(turned):
    """Answers ``[N, steps, K]`` to targets ``[N, K, steps]``."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))

    def step():
        answers = model(torch.randn(8, 12, 4))
        return F.mse_loss(answers.transpose(1, 2) if turned else answers.view(8, 5, 12), torch.randn(8, 5, 12))

    assert causes(model, step) == [MIXED] * (not turned)


def _skewed(h):
    """Relative positions: rows of a matrix, each shifted by one more than the last."""
    samples, rows, columns = h.shape
    return F.pad(h, (1, 0)).view(samples, columns + 1, rows)[:, 1:].reshape(samples, rows, columns)


SOUND = {
    "anchors of a detector": lambda h: h.view(6, 4, 4, 4, 15).flatten(1, 2).reshape(6, 64, 15),  # [6, 16, 60]
    "anchors at once": lambda h: h.view(6, 64, 15),
    "each head's numbers": lambda h: h.reshape(-1, 15),
    "groups": lambda h: h.view(6, 4, 4, 60).transpose(1, 2).reshape(6, 16, 60),
    "samples times steps": lambda h: h.view(96, 60),
    "windows": lambda h: h.unfold(1, 4, 4).transpose(2, 3).reshape(24, 4, 60),
    "skewed": _skewed,
    "shuffled pixels": lambda h: F.pixel_shuffle(h.view(6, 16, 10, 6).contiguous(), 2),
    "heads of a batch": lambda h: h.transpose(0, 1).reshape(16, 24, 15).transpose(0, 1),
}


@pytest.mark.parametrize("how", SOUND)
def test_splits_joins_and_skews_mix_nothing(how):
    """None of these is meant to move a dimension."""
    model = nn.Linear(3, 60)
    assert causes(model, lambda: SOUND[how](model(torch.randn(6, 16, 3))).square().mean()) == []


@pytest.mark.parametrize("samples", [4, 8, 16])
@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_attention_of_torch_mixes_nothing_whatever_is_as_long_as_what(samples, steps, batch_first):
    """As many steps as heads, as many samples as numbers in a head."""
    model = nn.MultiheadAttention(32, 4, batch_first=batch_first)

    def step():
        x = torch.randn(samples, steps, 32)
        return F.mse_loss(model(x, x, x)[0].flatten(0, 1), torch.randn(samples * steps, 32))

    assert causes(model, step) == []


def _huber(d):
    return torch.where(d.abs() < 1.0, 0.5 * d.square(), d.abs() - 0.5)


MEASURES = {
    "square": lambda d: d.square().mean(),
    "power": lambda d: (d**4).mean(),
    "product": lambda d: (d * d).sum() / 24,
    "absolute": lambda d: d.abs().mean(),
    "norm": lambda d: d.norm(),
    "norm of rows": torch.linalg.vector_norm,
    "log-cosh": lambda d: torch.log(torch.cosh(d)).mean(),
    "Charbonnier": lambda d: torch.sqrt(d * d + 1e-6).mean(),
    "Cauchy": lambda d: torch.log1p(d.square()).mean(),
    "Welsch": lambda d: (1.0 - torch.exp(-d.square())).mean(),
    "Huber": lambda d: _huber(d).mean(),
    "pinball": lambda d: torch.maximum(0.9 * d, -0.1 * d).mean(),
    "softplus": lambda d: F.softplus(d).mean(),
    "Gaussian": lambda d: -torch.distributions.Normal(0.0, 0.5).log_prob(d).mean(),
}
IN_STEPS = MEASURES | {
    "rows first": lambda d: d.square().sum(-1).mean(),
    "columns first": lambda d: d.abs().mean(0).sum(),
    "norms of rows": lambda d: d.reshape(len(d), -1).norm(dim=1).mean(),
}
COLUMN = {
    "as it is": lambda out: out,
    "squeezed": lambda out: out.squeeze(),
    "squeezed last": lambda out: out.squeeze(-1),
    "first": lambda out: out[:, 0],
    "viewed": lambda out: out.view(-1),
    "flattened": lambda out: out.flatten(),
    "scaled": lambda out: 3.0 * out.squeeze(1) + 1.0,
    "kept positive": F.softplus,
    "bounded": lambda out: torch.tanh(out.squeeze(1)),
}


PLANES = {
    "maps without a channel": ((6, 1, 5, 5), (6, 5, 5)),
    "maps with a channel": ((6, 5, 5), (6, 1, 5, 5)),
    "steps": ((6, 1, 9), (6, 9)),
}


def _said(loss):
    return [mistake for mistake, *_ in forms_of(loss)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("measure", IN_STEPS)
def test_a_difference_of_each_with_all_is_seen_however_it_is_measured(measure, turned):
    """Answers ``[N]`` less targets ``[N, 1]``, or the other way round; equal shapes are in order."""
    for column in COLUMN.values():
        answers, y = column(nn.Linear(3, 1)(torch.randn(24, 3))), torch.randn(24)
        for right in (True, False):
            targets = y if (answers.dim() == 1) is right else y[:, None]
            loss = IN_STEPS[measure](targets - answers if turned else answers - targets)
            assert _said(loss) == [BROADCAST] * (not right)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_sum_of_each_with_all_is_seen_as_well(measure, graph):
    """A residual of answers ``[N, 1]`` and a source ``[N]``, which may have a graph of its own; a bias is in order."""
    answers, source = nn.Linear(3, 1)(torch.randn(24, 3)), torch.randn(24, requires_grad=graph)
    source = source.sin()
    assert _said(MEASURES[measure](answers + source)) == [BROADCAST]
    assert _said(MEASURES[measure](answers + source[:, None])) == []
    assert _said(MEASURES[measure](answers[:, 0][:, None] + source)) == []
    assert _said(MEASURES[measure](torch.randn(24, 24) + nn.Parameter(torch.zeros(24)))) == []


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shapes", PLANES)
@pytest.mark.parametrize("measure", MEASURES)
def test_maps_and_sequences_that_miss_a_dimension_are_seen(measure, shapes, bias):
    """``[N, 1, H, W]`` less ``[N, H, W]`` is ``[N, N, H, W]``."""
    said, wanted = PLANES[shapes]
    answers = nn.Linear(3, said[-1], bias=bias)(torch.randn(*said[:-1], 3))
    assert _said(MEASURES[measure](answers - torch.randn(wanted))) == [BROADCAST]
    assert _said(MEASURES[measure](answers - torch.randn(said))) == []


@pytest.mark.parametrize("measure", IN_STEPS)
def test_what_was_made_a_column_is_compared_with_all_on_purpose(measure):
    """As samples with centres that happen to be as many, or pairs of samples of one batch."""
    answers = nn.Linear(3, 1)(torch.randn(24, 3)).squeeze(1)
    centres = torch.randn(24)
    for apart in (
        answers[:, None] - centres,
        (2.0 * answers.unsqueeze(1)).tanh() - centres,
        answers[:, None] - answers,
    ):
        assert _said(IN_STEPS[measure](apart)) == []


@pytest.mark.parametrize("measure", MEASURES)
def test_parameters_are_the_same_for_all_samples(measure):
    """A mean that is learned, of as many numbers as there are samples; so are a scale and an offset."""
    mean, scale = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))
    for apart in (
        torch.randn(24, 24) - mean,
        (torch.randn(24, 24) - mean) / scale.exp(),
        scale.exp() - torch.ones(24, 1),
    ):
        assert _said(MEASURES[measure](apart)) == []


def test_distances_to_as_many_features_as_samples_are_in_order():
    """Each sample with each entry of a memory, of which the squared differences are summed up to distances."""
    features, memory = nn.Linear(3, 5)(torch.randn(24, 3)), torch.randn(24, 1, 5)
    for apart in (features - memory, features[:, None] - memory[:, 0], features[None] - memory):
        assert _said(apart.square().sum(-1).mean()) == _said(torch.exp(-apart.norm(dim=-1)).mean()) == []


def test_a_distance_of_distributions_compares_all_pairs():
    """The energy distance and the mean discrepancy of samples of one number."""
    made, real = nn.Linear(3, 1)(torch.randn(24, 3)), torch.randn(24, 1)
    energy = (made - real.T).abs().mean() - 0.5 * (made - made.T).abs().mean()
    kernel = torch.exp(-((made - made.T) ** 2)).mean() - 2.0 * torch.exp(-((made - real.T) ** 2)).mean()
    assert _said(energy) == _said(kernel) == []


@pytest.mark.parametrize(("measure", "column"), list(zip(MEASURES, itertools.cycle(COLUMN), strict=False)))
def test_a_difference_of_each_with_all_is_told(measure, column):
    """One of each way to measure it, by ``watch()`` alone."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(*, right):
        x = torch.randn(24, 3)
        answers, y = COLUMN[column](model(x)), 0.1 * (x[:, 0] - x[:, 1])
        return MEASURES[measure](answers - (y if (answers.dim() == 1) is right else y[:, None]))

    assert (causes(model, lambda: step(right=False)), causes(model, lambda: step(right=True))) == ([BROADCAST], [])
