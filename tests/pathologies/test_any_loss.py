"""Targets that do not belong to their inputs are told behind any loss, and nothing is said of the same with the right ones."""

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity

LOSSES = {
    "quantile": (1, lambda o, y: torch.maximum(0.9 * (y - o), -0.1 * (y - o)).mean()),
    "variance": (2, lambda o, y: functional.gaussian_nll_loss(o[:, :1], y, functional.softplus(o[:, 1:]) + 1e-3)),
    "heavy tails": (2, lambda o, y: -distributions.StudentT(4.0, o[:, :1], o[:, 1:].exp()).log_prob(y).mean()),
    "counts": (1, lambda o, y: functional.poisson_nll_loss(o, y.exp().round())),
    "waiting times": (1, lambda o, y: -distributions.Exponential(o.exp()).log_prob(y.exp()).mean()),
    "cosine": (3, lambda o, y: (1 - functional.cosine_similarity(o, torch.cat([y, y**2 - 1, -y], 1))).mean()),
    "smoothed labels": (
        2,
        lambda o, y: functional.cross_entropy(o, (y > 0).long().squeeze(1), label_smoothing=0.1),
    ),
    "hinge": (1, lambda o, y: functional.relu(1 - y.sign() * o).mean()),
}


def run(name, fault="", steps=120):
    torch.manual_seed(0)
    columns, loss = LOSSES[name]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, columns))
    optimizer, way = torch.optim.Adam(model.parameters(), 1e-2), torch.randn(8, 1)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(steps):
            x = torch.randn(64, 8)
            y = x @ way / 2 + 0.1 * torch.randn(64, 1)
            if fault == "apart":
                y = y[torch.randperm(64)]
            value = loss(model(x + 100.0 if fault == "far from zero" else x), y)
            optimizer.zero_grad()
            (-value if fault == "turned" else value).backward()
            optimizer.step()
    return {issue.issue_type for issue in exporter.issues if issue.severity >= Severity.MEDIUM}


@pytest.mark.parametrize("name", LOSSES)
def test_targets_of_other_inputs_are_told(name):
    """No form of loss hides that targets were shuffled, and none makes a sound program look as if they were."""
    assert run(name, "apart") == {IssueType.BAD_TARGETS}
    assert run(name) == set()


def test_other_mistakes_are_told_beside_a_loss_that_is_not_known():
    """Inputs far from zero, and a loss that is maximized."""
    assert IssueType.DATA_SCALE in run("variance", "far from zero", 100)
    assert IssueType.WRONG_LOSS in run("quantile", "turned", 60)


@pytest.mark.parametrize("kind", ["numbers", "choices"])
def test_what_a_policy_did_is_no_target(kind):
    """Actions are drawn from the answers themselves, and what they bring in draws the answers there or away."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4 if kind == "choices" else 1))
    optimizer, way = torch.optim.Adam(model.parameters(), 3e-3), torch.randn(5)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(150):
            x = torch.randn(64, 5)
            answer = model(x)
            policy = (
                distributions.Categorical(logits=answer)
                if kind == "choices"
                else distributions.Laplace(answer.squeeze(1), 0.5)
            )
            action = policy.sample()
            wanted = 2.0 * (x @ way > 0) if kind == "choices" else x @ way
            brought = torch.exp(-((action - wanted) ** 2)) + torch.rand(64)
            optimizer.zero_grad()
            (-policy.log_prob(action) * brought).mean().backward()
            optimizer.step()
    assert [issue.issue_type for issue in exporter.issues if issue.severity >= Severity.MEDIUM] == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("right", [True, False])
def test_pairs_that_have_nothing_in_common_are_a_blind_choice(right, seed):
    """Of positives that are views of other samples a contrastive loss learns of which kind each view is, and no more."""
    torch.manual_seed(seed)
    content, noise = torch.randn(8, 32) * 0.4, torch.randn(16, 32) * 0.6
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    positives = (torch.arange(128) + 64) % 128 if right else torch.arange(128) ^ 1
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(310):
            sample = torch.randn(64, 8) @ content
            views = [functional.normalize(model(torch.tanh(sample + torch.randn(64, 16) @ noise)), dim=1) for _ in "12"]
            near = (torch.cat(views) @ torch.cat(views).T / 0.5).masked_fill(torch.eye(128, dtype=torch.bool), -1e9)
            optimizer.zero_grad()
            functional.cross_entropy(near, positives).backward()
            optimizer.step()
    found = [issue for issue in exporter.issues if issue.severity > Severity.LOW]
    assert [issue.issue_type for issue in found] == ([] if right else [IssueType.NOT_LEARNING])
