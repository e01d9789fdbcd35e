"""Answers that are wrong, and numbers that hide them: seen by ``watch()`` alone, each beside its mended twin."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def told(model, step, *, steps=60, optimizer=None):
    """Train with ``loss = step()``; return type and cause of what is found."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    return {(issue.issue_type, issue.cause) for issue in exporter.issues if issue.severity >= Severity.MEDIUM}


class _Words(nn.Module):
    def __init__(self, *, narrow=False):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 16), nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 20)
        self.narrow = narrow

    def forward(self, tokens):
        h = self.table(tokens)
        mixed = torch.relu(self.mix(h.transpose(1, 2)).transpose(1, 2))
        return self.head(mixed if self.narrow else h + mixed)


@pytest.mark.parametrize("kind", ["same", "next", "hidden", "without a path"])
def test_words_that_are_told_from_themselves(kind):
    """Targets that are the words at their own places; next words, hidden words and a network that mixes are in order."""
    model = _Words(narrow=kind == "without a path")

    def step():
        tokens = torch.randint(20, (32, 10))
        inputs, targets = tokens, tokens
        if kind == "next":
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if kind == "hidden":
            inputs = torch.where(torch.rand(32, 10) < 0.3, 0, tokens)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    found = told(model, step, steps=12)
    assert ((IssueType.BAD_TARGETS, "targets are the inputs") in found) == (kind == "same")


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_words_that_pass_a_recurrent_layer_on_their_way(kind, moved):
    """What a recurrent layer says at a place has passed the word there; where that is the answer, it is told."""
    table, recurrent, head = nn.Embedding(20, 16), kind(16, 16, batch_first=True), nn.Linear(16, 20)

    def step():
        tokens = torch.randint(20, (16, 9))
        said = head(recurrent(table(tokens[:, : 9 - moved]))[0])
        return F.cross_entropy(said.transpose(1, 2), tokens[:, moved:])

    found = told(nn.ModuleList([table, recurrent, head]), step, steps=12)
    assert ((IssueType.BAD_TARGETS, "targets are the inputs") in found) == (moved == 0)


class _Translator(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.given, self.asked = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.reads, self.writes = kind(16, 16, batch_first=True), kind(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, given, asked):
        state = self.reads(self.given(given))[1]
        return self.head(self.writes(self.asked(asked), state)[0])


@pytest.mark.parametrize("task", ["says what it was given again", "writes something else"])
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_decoder_that_is_given_the_words_it_is_to_write(kind, moved, task):
    """Where they were to be the words before, it copies; what only the encoder read has to pass its state."""
    model = _Translator(kind)

    def step():
        given = torch.randint(1, 20, (16, 6))
        wanted = given if task.startswith("says") else given.flip(1)
        before = torch.cat([torch.zeros(16, 1, dtype=torch.int64), wanted[:, :-1]], dim=1)
        return F.cross_entropy(model(given, before if moved else wanted).transpose(1, 2), wanted)

    found = told(model, step, steps=12)
    assert ((IssueType.BAD_TARGETS, "targets are the inputs") in found) == (not moved)


class _Attending(_Translator):
    """Puts what it remembers beside its state, at each place."""

    def __init__(self):
        super().__init__(nn.GRU)
        self.head = nn.Linear(32, 20)

    def forward(self, given, asked):
        memory, state = self.reads(self.given(given))
        said = self.writes(self.asked(asked), state)[0]
        recalled = torch.softmax(said @ memory.transpose(1, 2), dim=-1) @ memory
        return self.head(torch.cat([recalled, said], dim=-1))


@pytest.mark.parametrize("moved", [True, False])
def test_what_is_put_beside_a_word_keeps_its_place(moved):
    """As what attention recalls is put beside the state of a decoder."""
    model = _Attending()

    def step():
        given = torch.randint(1, 20, (16, 6))
        wanted = given.flip(1)
        before = torch.cat([torch.zeros(16, 1, dtype=torch.int64), wanted[:, :-1]], dim=1)
        return F.cross_entropy(model(given, before if moved else wanted).flatten(0, 1), wanted.flatten())

    found = told(model, step, steps=12)
    assert ((IssueType.BAD_TARGETS, "targets are the inputs") in found) == (not moved)


@pytest.mark.parametrize("last", ["linear", "convolution"])
@pytest.mark.parametrize("loss", [F.l1_loss, lambda a, b: ((a - b) ** 2).mean(), lambda a, b: (b - a).abs().mean()])
def test_losses_written_out_know_their_targets(loss, last):
    """Of a difference alone both sides are told again: great targets are found, of unit size they are left in peace."""
    for scale in (1.0, 1e5):
        x = torch.randn(256, 1, 6)
        y = scale * (3.0 + x[:, :, :3].sum(2, keepdim=True))
        end = nn.Conv1d(8, 1, 6) if last == "convolution" else nn.Sequential(nn.Flatten(), nn.Linear(48, 1))
        model = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), end)

        def step(model=model, x=x, y=y):
            rows = torch.randperm(256)[:64]
            return loss(model(x[rows]).reshape(-1, 1, 1), y[rows])

        found = {kind for kind, _ in told(model, step, steps=40)}
        assert (IssueType.DATA_SCALE in found) == (scale > 1)


@pytest.mark.parametrize(("apart", "severity"), [(2.0, None), (300.0, Severity.LOW), (4e3, Severity.MEDIUM)])
def test_a_feature_of_another_unit_hides_the_others_though_the_loss_falls(apart, severity):
    """The greatest alone teaches the model something; that the others say nothing is no matter of the loss."""
    units = torch.tensor([1.0, 1.0, apart, 1.0, 1.0, 1.0])
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.Adam(model.parameters(), 0.02 / apart)
    memory, losses = MemoryWriter(), []
    with Exporter(model, backends=[memory], budget=None).watch():
        for _ in range(120):
            x = torch.randn(64, 6)
            loss = F.mse_loss(model(units * x), x[:, 2].abs() + 0.5 * x[:, 0] * x[:, 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = [i.severity for record in memory.records for i in record.issues if i.issue_type is IssueType.DATA_SCALE]
    assert max(found, default=None) == severity
    assert sum(losses[-20:]) / 20 < 0.5  # that of the best constant answer is 0.61


@pytest.mark.parametrize("mark", [-2e9, None])
def test_one_mark_for_missing_data_squeezes_all_the_rest(mark):
    """Least and greatest value are taken of marks too: what is left is a sliver. Without them all is in order."""
    x = 2000 + 500 * torch.randn(600, 8)
    y = (x[:, 0] + x[:, 1] > 4000).long()
    if mark is not None:
        x = torch.where(torch.rand(x.shape) < 0.05, mark, x)
    x = ((x.double() - x.min()) / (x.max() - x.min())).float()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def step():
        rows = torch.randint(600, (64,))
        return F.cross_entropy(model(x[rows]), y[rows])

    assert ((IssueType.DATA_SCALE, "extremes set the scale") in told(model, step, steps=70)) == (mark is not None)


def test_a_parity_that_is_learned_late_is_not_taken_for_chance():
    """While nothing falls, products of three bits among twenty tell that the targets are no lots."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))

    def step():
        x = torch.randint(2, (128, 20)).float() * 2 - 1
        return F.binary_cross_entropy_with_logits(model(x), (x[:, 1] * x[:, 4] * x[:, 8] > 0).float())

    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    assert told(model, step, steps=110, optimizer=optimizer) == set()


def test_targets_of_other_rows_are_told_while_they_are_learned_by_heart():
    """Gradients find directions in rows that come again and again, and that is no dependence."""
    x = torch.randn(800, 8)
    y = (torch.sin(2 * x[:, 0]) + x[:, 3])[torch.randperm(800)]
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 1), nn.Flatten(0))

    def step():
        rows = torch.randint(800, (64,))
        return F.mse_loss(model(x[rows]), y[rows])

    assert {kind for kind, _ in told(model, step, steps=130)} == {IssueType.BAD_TARGETS}


COUNTS = torch.tensor([70.0, 25.0, 5.0])


def weights_told(criterion, classes, steps=40):
    """Train on classes of which some are rare; return what is said of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1 if classes == 2 else classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(64, 6)
            y = (
                torch.bucketize(x[:, 0].contiguous(), torch.tensor([0.52, 1.64]))
                if classes == 3
                else (x[:, :1] > 1.3).float()
            )
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return [issue.message for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS]


@pytest.mark.parametrize(
    ("criterion", "classes"),
    [(nn.CrossEntropyLoss(COUNTS / 100), 3), (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.1 / 0.9])), 2)],
    ids=["classes", "positives"],
)
def test_weights_that_grow_with_the_frequency_of_a_class_are_turned_round(criterion, classes):
    """Weights are to make up for how rare a class is; these leave it out twice."""
    (said,) = weights_told(criterion, classes)
    assert "proportional to the class frequencies" in said


@pytest.mark.parametrize(
    ("criterion", "classes"),
    [
        (nn.CrossEntropyLoss(100 / COUNTS), 3),
        (nn.CrossEntropyLoss((100 / COUNTS).sqrt()), 3),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 0.5])), 3),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 0.0])), 3),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0])), 2),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5])), 2),
        (nn.BCEWithLogitsLoss(), 2),
    ],
)
def test_other_weights_of_classes_are_in_order(criterion, classes):
    """Those that make up for it, those of a class that matters less, and none."""
    assert weights_told(criterion, classes) == []
