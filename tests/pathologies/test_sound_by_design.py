"""Programs that do on purpose what elsewhere is a mistake: a branch without use, a projection, a layer that begins at 0."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from gradflow_export import Exporter, MemoryWriter, Severity


class Forecast(nn.Module):
    """Blocks of which each explains a part of the series to the next one; nothing follows the last."""

    def __init__(self, blocks):
        super().__init__()
        rests = (nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(blocks))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"body": nn.Linear(12, 24), "rest": rest, "ahead": nn.Linear(24, 3)}) for rest in rests
        )

    def forward(self, x):
        said = 0
        for block in self.blocks:
            h = F.relu(block["body"](x))
            x, said = x - block["rest"](h), said + block["ahead"](h)
        return said


def forecast(blocks):
    model = Forecast(blocks)

    def loss():
        x = torch.randn(32, 12).cumsum(1)
        return (model(x) - x[:, -1:] * torch.tensor([1.0, 0.5, 0.2]) + 0.1 * torch.randn(32, 1)).square().mean()

    return model, loss, None


class Turned(nn.Module):
    """Points are turned by an angle that the last layer, which begins at 0, says of them."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.classes = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        nn.init.zeros_(self.angle[-1].weight)
        nn.init.zeros_(self.angle[-1].bias)

    def forward(self, x):
        c, s = self.angle(x).cos(), self.angle(x).sin()
        a, b = x.chunk(2, dim=1)
        return self.classes(torch.cat([c * a - s * b, s * a + c * b], dim=1))


def turned():
    model = Turned()

    def loss():
        x = torch.randn(64, 8)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    return model, loss, None


def factors():
    """Two matrices without a negative number, whose product is what is known of a table: projected after each step."""
    table = torch.rand(60, 4).square() @ torch.rand(4, 40).square() + 0.01 * torch.rand(60, 40)
    known = torch.rand(60, 40) < 0.8
    model = nn.ParameterDict({"rows": torch.rand(60, 5) * 0.5, "columns": torch.rand(5, 40) * 0.5})

    def project():
        with torch.no_grad():
            for p in model.values():
                p.clamp_(min=0)

    return model, lambda: (model["rows"] @ model["columns"] - table)[known].square().sum() / 2, project


def components():
    """The directions in which data vary most: their variance is the loss, and the matrix stays orthogonal."""
    spread = torch.linspace(3.0, 0.3, 12)
    model = nn.ParameterList([torch.linalg.qr(torch.randn(12, 3))[0]])

    def project():
        with torch.no_grad():
            model[0].copy_(torch.linalg.qr(model[0])[0])

    return model, lambda: -((torch.randn(128, 12) * spread) @ model[0]).square().sum(1).mean(), project


def measured():
    """Statistics are measured anew over all data at times, in training mode and without gradients."""
    data = [torch.randn(32, 8) for _ in range(8)]
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    steps = iter(range(10**6))

    def at_times():
        if next(steps) % 16 == 15:
            update_bn(data, model)

    def loss():
        x = torch.cat([data[i] for i in torch.randint(8, (2,))])
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    return model, loss, at_times


def solved():
    """A few samples that are known by heart long before anybody watches."""
    x = torch.randn(100, 8)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(1500):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, lambda: F.cross_entropy(model(x), y), None, optimizer


class Memory(nn.Module):
    """Two looks at a memory, of which the first says what the second looks for: one layer turns the query both times."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(6, 16), nn.Linear(6, 16)
        self.turn, self.out = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        query, keys, values = self.keys(x[:, 0]), self.keys(x), self.values(x)
        for _ in range(2):
            found = (keys @ query[:, :, None]).softmax(1)
            query = self.turn(query) + (values * found).sum(1)
        return self.out(query)


def memory():
    model = Memory()

    def loss():
        x = torch.randn(64, 5, 6)
        return F.cross_entropy(model(x), x[:, 0, :3].argmax(1))

    return model, loss, None


def robust():
    """Of labels two fifths are wrong, and the loss gives up what is unlikely: as a cross-entropy it looks worse."""
    sizes = ((12, 96), (96, 96), (96, 32))
    layers = [(nn.Linear(*each), nn.BatchNorm1d(each[1]), nn.ReLU(), nn.Dropout(0.4)) for each in sizes]
    model, rule = nn.Sequential(*(part for layer in layers for part in layer)), torch.randn(12, 10)
    model.append(nn.Linear(32, 10))

    def loss():
        x = torch.randn(64, 12)
        y = torch.where(torch.rand(64) < 0.4, torch.randint(10, (64,)), (x @ rule).argmax(1))
        said = model(x).softmax(1).gather(1, y[:, None])[:, 0]
        return ((1.0 - said.clamp(min=1e-7) ** 0.7) / 0.7).mean()

    return model, loss, None


def topics():
    """Counts of words, told again through a code of few numbers: no column can be told by itself."""
    made = torch.distributions.Dirichlet(torch.full((90,), 0.05)).sample((6,))
    model = nn.Sequential(
        nn.Linear(90, 32), nn.Softplus(), nn.Linear(32, 6), nn.Softmax(1), nn.Linear(6, 90, bias=False)
    )
    model.append(nn.BatchNorm1d(90))

    def loss():
        shares = torch.distributions.Dirichlet(torch.full((6,), 0.2)).sample((64,)) @ made
        counts = torch.distributions.Multinomial(40, probs=shares).sample()
        return -(counts * model(counts).log_softmax(1)).sum(1).mean()

    return model, loss, None


def policy():
    """Actions are drawn every few steps with dropout, as the policy is trained."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    held, steps = {}, iter(range(10**6))

    def loss():
        if next(steps) % 8 == 0:
            held["x"] = torch.randn(256, 6)
            with torch.no_grad():
                chosen = model(held["x"]).softmax(1).multinomial(1)
            reward = (chosen[:, 0] == held["x"][:, :4].argmax(1)).float()
            held["chosen"], held["worth"] = chosen, (reward - reward.mean()) / (reward.std() + 1e-3)
        said = model(held["x"]).log_softmax(1).gather(1, held["chosen"])[:, 0]
        return -(said * held["worth"]).mean()

    return model, loss, None


MADE = {
    "forecast of two": (lambda: forecast(2), torch.optim.Adam, 3e-3, 120),
    "forecast of four": (lambda: forecast(4), torch.optim.Adam, 3e-3, 120),
    "turned": (turned, torch.optim.SGD, 0.2, 120),
    "factors": (factors, torch.optim.SGD, 0.01, 300),
    "components": (components, torch.optim.SGD, 2e-3, 120),
    "measured": (measured, torch.optim.Adam, 3e-3, 160),
    "solved": (solved, torch.optim.Adam, 5e-3, 250),
    "memory": (memory, torch.optim.Adam, 3e-3, 120),
    "robust": (robust, torch.optim.Adam, 1e-3, 260),
    "topics": (topics, torch.optim.Adam, 1e-2, 260),
    "policy": (policy, torch.optim.Adam, 3e-3, 160),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_meant_raises_no_alarm(name):
    """Each of them learns, and of none more than a remark is said."""
    torch.manual_seed(0)
    make, kind, rate, steps = MADE[name]
    model, loss, after, *used = make()
    optimizer = used[0] if used else kind(model.parameters(), rate)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            if after is not None:
                after()
    assert [issue for issue in exporter.issues if issue.severity > Severity.LOW] == []


@pytest.mark.parametrize("weight", [1e-3, 0.1])
def test_a_penalty_on_activations_is_no_target_that_never_varies(weight):
    """Written as a mean squared error against zeros, beside a loss whose targets differ."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(8, 64), nn.ReLU()), nn.Linear(64, 2)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(60):
            x = torch.randn(64, 8)
            hidden = body(x)
            penalty = F.mse_loss(hidden, torch.zeros_like(hidden))
            optimizer.zero_grad()
            (F.cross_entropy(head(hidden), (x[:, 0] > x[:, 1]).long()) + weight * penalty).backward()
            optimizer.step()
    assert [issue for issue in exporter.issues if issue.severity >= Severity.MEDIUM] == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_that_is_cut_off_is_told_wherever_it_stands(place):
    """A branch is without use only beside others of its block that learn."""
    torch.manual_seed(0)
    model, _, _ = forecast(3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(30):
            x = torch.randn(32, 12)
            said = sum(
                block["ahead"](F.relu(block["body"](x))).detach()
                if index == place
                else block["ahead"](F.relu(block["body"](x + block["rest"](F.relu(block["body"](x))))))
                for index, block in enumerate(model.blocks)
            )
            optimizer.zero_grad()
            (said - x[:, :3]).square().mean().backward()
            optimizer.step()
    found = [issue.layers for issue in exporter.issues if issue.cause == "no gradient"]
    assert any(f"blocks.{place}.body.weight" in layers for layers in found)
