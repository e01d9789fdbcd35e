"""What is known of a loss does not depend on who wrote it: torch, or the user by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.metrics.constants import constant_loss

PICKED = {
    "gather": lambda out, y: -F.log_softmax(out, 1).gather(1, y[:, None]).mean(),
    "index": lambda out, y: -F.log_softmax(out, 1)[torch.arange(len(y)), y].mean(),
    "logsumexp": lambda out, y: (torch.logsumexp(out, 1) - out.gather(1, y[:, None])[:, 0]).mean(),
}


def net(inputs=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def run(model, loss, data, steps=60, lr=3e-3):
    """Train while watched; return the exporter and what was recorded."""
    memory, optimizer = MemoryWriter(), torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[memory], strict=True, synchronous=True).watch() as exporter:
        for _ in range(steps):
            x, y = data()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return exporter, memory.records


def levels(model, loss, data):
    """Return the loss against the best constant's, by step."""
    records = run(model, loss, data, steps=8)[1]
    return {record.step: record.fact("loss.over_constant", "2") for record in records}


def classes(n=48):
    y = torch.randint(3, (n,))
    return torch.randn(n, 6) + 2.0 * F.one_hot(y, 6), y


def shares(n=48):
    x = torch.randn(n, 6)
    return x, (x[:, :1] > 0).float()


@pytest.mark.parametrize("form", PICKED)
def test_a_cross_entropy_is_known_however_it_is_written(form):
    """Written out by hand it is read as F.cross_entropy is, to rounding."""
    read = []
    for loss in (PICKED[form], F.cross_entropy):
        torch.manual_seed(0)
        read.append(levels(net(), loss, classes))
    assert len(read[0]) == 8
    assert read[0] == pytest.approx(read[1], rel=1e-3)


def test_a_binary_cross_entropy_is_known_however_it_is_written():
    """A softplus less the product of targets and scores is read as F.binary_cross_entropy_with_logits is."""
    read = []
    for loss in (lambda out, y: (F.softplus(out) - y * out).mean(), F.binary_cross_entropy_with_logits):
        torch.manual_seed(0)
        read.append(levels(net(outputs=1), loss, shares))
    assert len(read[0]) == 8
    assert read[0] == pytest.approx(read[1], rel=1e-3)


def test_a_weighted_likelihood_is_no_cross_entropy():
    """Logarithms of probabilities that are multiplied with a number each, as a policy's are, say nothing of targets."""
    torch.manual_seed(0)
    weights = torch.randn(48)

    def loss(out, y):
        return -(F.log_softmax(out, 1).gather(1, y[:, None])[:, 0] * weights).mean()

    assert set(levels(net(), loss, classes).values()) == {None}


@pytest.mark.parametrize("classes_", [2, 3, 7])
def test_the_best_constant_answer_to_a_margin_loss_is_the_least(classes_):
    """No scores that are the same for all samples have a lower margin loss than the constant that is told."""
    torch.manual_seed(classes_)
    y = torch.multinomial(torch.rand(classes_) ** 2, 400, replacement=True)
    y[:classes_] = torch.arange(classes_)
    scores = torch.zeros(classes_, requires_grad=True)
    optimizer, least = torch.optim.Adam([scores], lr=0.02), float("inf")
    for _ in range(400):
        optimizer.zero_grad()
        loss = F.multi_margin_loss(scores.expand(len(y), -1), y) * classes_
        loss.backward()
        optimizer.step()
        least = min(least, loss.item())
    assert constant_loss("margin", y[:, None].double().numpy()) == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("loss", [F.multi_margin_loss, *PICKED.values()], ids=["margin", *PICKED])
def test_targets_are_judged_under_any_loss(loss):
    """Targets that are all the same, or belong to other samples, are told whatever the loss."""
    torch.manual_seed(0)
    same = run(net(), loss, lambda: (torch.randn(48, 6), torch.zeros(48, dtype=torch.long)))[0]
    assert [issue.issue_type for issue in same.issues] == [IssueType.BAD_TARGETS]
    torch.manual_seed(0)
    # One test in twenty finds a dependence by chance, which the next ones have to outweigh.
    other = run(net(), loss, lambda: (torch.randn(48, 6), torch.randint(3, (48,))), steps=300)[0]
    assert [issue.issue_type for issue in other.issues] == [IssueType.BAD_TARGETS]
    torch.manual_seed(0)
    assert run(net(), loss, classes, steps=150)[0].issues == ()


def test_equal_targets_of_a_difference_are_equal_but_for_rounding():
    """Targets known only as outputs less a difference are told to be all the same where they are."""
    torch.manual_seed(0)

    def data():
        return torch.randn(48, 6), torch.full((48, 2), 0.3717)

    exporter, _ = run(net(outputs=2), lambda out, y: ((out - y) ** 2).mean(), data)
    assert [issue.issue_type for issue in exporter.issues] == [IssueType.BAD_TARGETS]
    condition = run(net(outputs=2), lambda out, y: ((out - y) ** 2).mean() + out.diff(dim=1).square().mean(), data)[0]
    assert condition.issues == ()  # one term of several may ask for one number on purpose


def test_an_activation_before_a_difference_bounds_it():
    """A ReLU before a squared difference that was written out keeps negative targets out of reach."""
    torch.manual_seed(0)
    model = nn.Sequential(net(outputs=2), nn.ReLU())
    exporter, _ = run(model, lambda out, y: ((out - y) ** 2).mean(), lambda: (torch.randn(48, 6), torch.randn(48, 2)))
    assert IssueType.WRONG_LOSS in {issue.issue_type for issue in exporter.issues}


@pytest.mark.parametrize("apart", [lambda a, b: ((a - b) ** 2).sum(1), F.pairwise_distance], ids=["squares", "norm"])
def test_a_positive_that_is_the_anchor(apart):
    """The distance of a sample from itself is 0 whatever the model says; where pairs differ now and then, it is not."""
    for share in (1.0, 0.5, 0.0):
        torch.manual_seed(0)
        model = net()

        def loss(out, _, model=model, share=share):
            positive = out.clone() if torch.rand(()) < share else model(classes()[0])
            return F.relu(apart(out, positive) - apart(out, out.roll(1, 0)) + 1.0).mean()

        found = [issue.cause for issue in run(model, loss, classes, steps=40)[0].issues]
        assert ("output compared with itself" in found) is (share == 1.0)


@pytest.mark.parametrize("kept", [True, False])
def test_a_ratio_of_probabilities_with_themselves(kept):
    """The old ones of a policy are computed before, or kept without a graph; else the ratio is 1 and trains nothing."""
    torch.manual_seed(0)

    def loss(out, y):
        new = out.log_softmax(1).gather(1, y[:, None])[:, 0]
        ratio, worth = torch.exp(new - (new.detach() if kept else new)), torch.randn(len(y))
        return -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth).mean() + 1e-3 * out.square().mean()

    found = [issue.cause for issue in run(net(), loss, classes, steps=40)[0].issues]
    assert ("output compared with itself" in found) is not kept


@pytest.mark.parametrize("given", [False, True])
def test_a_teacher_that_learns_from_its_student(given):
    """Two networks that are only drawn together are told; one that is taken as given is in order."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"student": net(), "teacher": net()})
    model.forward = lambda x: (model["student"](x), model["teacher"](x).detach() if given else model["teacher"](x))

    def loss(out, _):
        return F.kl_div(out[0].log_softmax(1), out[1].softmax(1), reduction="batchmean")

    found = [issue.cause for issue in run(model, loss, classes, steps=8)[0].issues]
    assert ("predictions drawn together alone" in found) is not given


@pytest.mark.parametrize("dim", [-1, -2])
def test_attention_written_out_whose_weights_add_up_over_the_queries(dim):
    """What a query sums up is weighed by shares of its own; weights that are used the other way round are in order."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.look, self.head = nn.Linear(3, 12), nn.Linear(12, 36), nn.Linear(12, 3)

        def forward(self, x):
            query, key, value = self.look(self.enter(x)).chunk(3, dim=-1)
            seen = (query @ key.transpose(1, 2)).softmax(dim) @ value
            turned = (key @ query.transpose(1, 2)).softmax(-2).transpose(1, 2) @ value
            return self.head((seen + turned).mean(1))

    torch.manual_seed(0)
    found = run(Attends(), F.cross_entropy, lambda: (torch.randn(48, 5, 3), torch.randint(3, (48,))), steps=8)[0].issues
    assert ("attention that is shared out over the queries" in {issue.cause for issue in found}) is (dim == -2)


D = torch.distributions
UNLIKELY = {
    "Categorical": lambda s, y: D.Categorical(logits=s).log_prob(y).mean(),
    "one-hot": lambda s, y: (F.one_hot(y, 3) * s.log_softmax(1)).sum(1).mean(),
    "einsum": lambda s, y: torch.einsum("nc,nc->", F.one_hot(y, 3).float(), s.log_softmax(1)) / len(y),
    "picked before the logarithm": lambda s, y: s.softmax(1).gather(1, y[:, None]).log().mean(),
    "weighted": lambda s, y: (s.log_softmax(1).gather(1, y[:, None])[:, 0] * torch.tensor([1.0, 2.0, 0.5])[y]).mean(),
    "scaled": lambda s, y: 0.5 * s.log_softmax(1).gather(1, y[:, None]).mean(),
    "divided": lambda s, y: s.log_softmax(1).gather(1, y[:, None]).sum() / len(y),
    "by a sum of powers": lambda s, y: (s[torch.arange(len(y)), y] - s.logsumexp(1)).mean(),
    "Bernoulli": lambda s, y: D.Bernoulli(logits=s).log_prob(F.one_hot(y, 3).float()).mean(),
    "signed": lambda s, y: F.logsigmoid(s * (2.0 * F.one_hot(y, 3) - 1.0)).mean(),
}


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("form", UNLIKELY)
def test_a_likelihood_without_a_minus_is_told_in_any_form(form, missing):
    """What each answer is pulled to tells it, whatever the loss is written like; with the minus all is in order."""
    sign = 1.0 if missing else -1.0
    found = run(net(), lambda s, y: sign * UNLIKELY[form](s, y), classes, steps=25, lr=3e-2)[0].issues
    causes = {issue.cause for issue in found if issue.issue_type is IssueType.WRONG_LOSS}
    assert bool(causes & {"loss is maximised", "log-probabilities without a minus"}) == missing
