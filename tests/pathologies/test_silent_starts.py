"""First weights that are copies of others or of one sign, each beside some that are in order."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


def told(model, loss, *, parameters=None, steps=12, lr=1e-2, kind=torch.optim.AdamW):
    """Train on fresh batches; return cause and layers of what is found of the first weights."""
    optimizer = kind(model.parameters() if parameters is None else parameters, lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(torch.randn(32, 8)).backward()
            optimizer.step()
    return [(i.cause, i.layer) for i in exporter.issues if i.issue_type is IssueType.BAD_INIT]


def critic():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Critics(nn.ModuleList):
    def forward(self, x):
        return torch.cat([member(x) for member in self], 1)


@pytest.mark.parametrize("kind", ["copies", "made anew", "own batches", "a target"])
def test_members_of_an_ensemble_that_begin_as_copies(kind):
    """Copies that get the same gradients are told; own batches, and a target that rests, are in order."""
    torch.manual_seed(0)
    first = critic()
    model = Critics([first, critic() if kind == "made anew" else copy.deepcopy(first)])

    def loss(x):
        if kind == "own batches":
            x = torch.cat([part.repeat(2, 1)[None] for part in x.chunk(2)])
            return sum((member(part)[:, 0] - part[:, 0]).square().mean() for member, part in zip(model, x, strict=True))
        return (model(x) - x[:, :1]).square().mean()

    found = told(model, loss, parameters=first.parameters() if kind == "a target" else None)
    assert found == ([("layers are copies", "0.0.weight")] if kind == "copies" else [])


def test_layers_that_torch_copies_one_from_another_are_in_order():
    """``nn.TransformerEncoder`` begins with copies, at different depths."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert told(model, lambda x: (model(x[:, None]) - x[:, None]).square().mean()) == []


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("kind", ["parts", "parts at random", "classes of which two are seen"])
def test_parts_of_one_layer_that_begin_alike(kind, seed):
    """Three parts with two numbers each stay alike if they begin as zeros; classes that none has seen yet may."""
    torch.manual_seed(seed)
    body, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 6)
    if kind != "parts at random":
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    model = nn.Sequential(body, head)

    def loss(x):
        if kind.startswith("classes"):
            return F.cross_entropy(model(x), (x[:, 0] > 0).long())
        weight, mean = model(x).chunk(2, 1)
        return -(weight.log_softmax(1) - (mean - x[:, :1] - 1).square()).logsumexp(1).mean()

    # Which part is taken has a gradient of 0, and what a processor rounds it to is what Adam would divide by itself.
    found = told(model, loss, kind=torch.optim.SGD)
    assert found == ([("units have doubles", "1.weight")] if kind == "parts" else [])


@pytest.mark.parametrize(("scale", "found"), [(1.0, [("one-sided", "2.weight")]), (0.02, [])])
def test_weights_of_one_sign(scale, found):
    """Between 0 and 1 they shut all units, and the loss shows it; small ones of one sign learn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.0, scale)
    assert told(model, lambda x: F.cross_entropy(model(x.abs()), (x[:, 0] > 0).long()), steps=40) == found


def test_doubles_are_counted_whatever_the_entries():
    """Rows that have the same root-weighted sum are no doubles; those with the same entries are, in any place."""
    model, memory = nn.Sequential(nn.Linear(4, 6)), MemoryWriter()
    rows = [[2, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1], [0, 2, 0, 0], [1, 0, 0, 0]]
    model[0].weight.data = torch.tensor(rows, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = Exporter(model, backends=memory).watch()
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    exporter.close()
    read = [
        record.facts["parameter.row_doubles"] for record in memory.records if "parameter.row_doubles" in record.facts
    ]
    assert [list(values.values()) for values in read] == [[pytest.approx(2 / 6)]]


class _Own(nn.Module):
    """A layer of somebody's own, which counts its units by columns."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(("make", "cause"), [(torch.zeros, "zeros"), (torch.ones, "units are copies"), (None, None)])
def test_layers_of_somebodys_own(make, cause):
    """Two of them in a row that begin at zero, or at one number, are told; drawn at random they are in order."""
    torch.manual_seed(0)
    draw = make or (lambda a, b: torch.randn(a, b) * a**-0.5)
    model = nn.Sequential(_Own(draw(8, 16) / 4), nn.Tanh(), _Own(draw(16, 2) / 4))
    x = torch.randn(256, 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(15):
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    found = [issue.cause for issue in exporter.issues if issue.issue_type == IssueType.BAD_INIT]
    assert found == ([] if cause is None else [cause])


class Splats(nn.Module):
    """Blobs of which each has a place and two widths; all widths begin alike, as none of them is the weight of a unit."""

    def __init__(self, axes):
        super().__init__()
        self.place, self.width = nn.Parameter(torch.rand(40, axes)), nn.Parameter(torch.full((40, axes), -2.0))

    def forward(self, grid):
        return torch.exp(-((grid[:, None] - self.place) * torch.exp(-self.width)).square().sum(2)).sum(1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("axes", [2, 3])
def test_scales_that_begin_at_one_number(axes, kind):
    """All of them are to shrink at first, and yet none is a copy of another."""
    torch.manual_seed(0)
    grid = torch.rand(200, axes)
    picture = Splats(axes)(grid).detach() / 4
    model = Splats(axes)
    assert told(model, lambda _: (model(grid) - picture).square().mean(), kind=kind) == []


@pytest.mark.parametrize("steep", [True, False])
def test_sines_that_are_too_steep(steep):
    """Sines of thirty times a layer's output, whose weights are not drawn thirty times smaller, turn all over."""
    torch.manual_seed(0)

    class Sine(nn.Module):
        def __init__(self, inputs):
            super().__init__()
            self.linear = nn.Linear(inputs, 48)
            bound = 0.5 if inputs == 2 else (6 / inputs) ** 0.5 / (1 if steep else 30)
            nn.init.uniform_(self.linear.weight, -bound, bound)
            self.scale = 6 if inputs == 2 else 30

        def forward(self, x):
            return torch.sin(self.scale * self.linear(x))

    model = nn.Sequential(Sine(2), Sine(48), Sine(48), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(40):
            x = 2 * torch.rand(128, 2) - 1
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.sin(3 * x[:, :1]) + x[:, 1:]).backward()
            optimizer.step()
    found = [issue.cause for issue in exporter.issues if issue.issue_type == IssueType.BAD_INIT]
    assert found == (["too large"] if steep else [])


@pytest.mark.parametrize("both", [True, False])
def test_two_tables_of_zeros_that_are_multiplied(both):
    """Neither ever gets a gradient; one of them may begin so."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(20, 4), nn.Embedding(20, 4)])
    nn.init.zeros_(model[0].weight)
    if both:
        nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(12):
            left, right = torch.randint(20, (2, 64))
            optimizer.zero_grad()
            F.mse_loss((model[0](left) * model[1](right)).sum(1), torch.randn(64)).backward()
            optimizer.step()
    found = [issue.cause for issue in exporter.issues if issue.issue_type == IssueType.BAD_INIT]
    assert found == (["zeros"] if both else [])


class ByHand(nn.Module):
    def __init__(self, scale):
        super().__init__()
        sizes = ((8, 64), (64, 64), (64, 64), (64, 4))
        self.weights = nn.ParameterList([nn.Parameter(scale * torch.randn(size)) for size in sizes])

    def forward(self, x):
        for weight in self.weights[:-1]:
            x = torch.tanh(x @ weight)
        return x @ self.weights[-1]


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_weights_that_a_parameter_list_holds(scale):
    """Weights that a ``forward`` of somebody's own takes from a list are judged as those of layers are."""
    torch.manual_seed(0)
    model, mix = ByHand(scale), torch.randn(8, 4)
    found = told(model, lambda x: F.cross_entropy(model(x), (x @ mix).argmax(1)), steps=30, lr=1e-3)
    assert [cause for cause, _ in found] == ["too large"] * (scale == 1.0)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_table_that_is_the_head_as_well(scale):
    """Words drawn with variance 1 are no scale for the weights of the last layer, which they are where the two are tied."""
    torch.manual_seed(0)
    table, norm, head = nn.Embedding(60, 64), nn.LayerNorm(64), nn.Linear(64, 60, bias=False)
    nn.init.normal_(table.weight, std=scale)
    head.weight = table.weight
    model = nn.Sequential(table, norm, head)

    def loss(_):
        words = torch.randint(60, (64,))
        return F.cross_entropy(model(words), (words + 1) % 60)

    assert told(model, loss) == [("too large", "2.weight")] * (scale == 1.0)
