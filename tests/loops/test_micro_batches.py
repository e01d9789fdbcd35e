"""One step, one scope: a record covers all micro-batches of its step, whatever their number and sizes."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export.instruments import backward_passes, micro_batches
from gradflow_export.records.catalog import CATALOG

SIZES = {
    "one": (10,),
    "alike": (6, 6, 6, 6),
    "unequal": (3, 11, 1, 7),
    "many": tuple(1 + number % 5 for number in range(270)),
}


def classifier(classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes))


def truth_of(logits, targets, gradients):
    """The same statistics from one batch of all samples, in float64; ``gradients`` are those of each micro-batch."""
    rows = torch.cat([z.detach() for z in logits]).double()
    y = torch.cat(targets)
    p, top = rows.softmax(1), rows.topk(2, dim=1).values
    kept = y >= 0
    others = p.masked_fill(F.one_hot(y.clamp(min=0), rows.shape[1]).bool(), -1.0).amax(1)
    p_y = p.gather(1, y.clamp(min=0)[:, None])[:, 0]
    back = torch.cat(gradients).double()
    return {
        "logits.max": rows.max(),
        "logits.min": rows.min(),
        "logits.mean": rows.mean(),
        "logits.std": rows.std(correction=0),
        "logits.margin": (top[:, 0] - top[:, 1]).mean(),
        "logits.log_z": rows.logsumexp(1).mean(),
        "confidence.max": p.amax(1).mean(),
        "confidence.entropy": torch.special.entr(p).sum(1).mean() / torch.tensor(rows.shape[1]).double().log(),
        "confidence.target": p_y[kept].mean(),
        "alignment.accuracy": (rows.argmax(1) == y)[kept].double().mean(),
        "alignment.margin": (p_y - others)[kept].mean(),
        "upstream.norm": back.norm(),
        "upstream.mean_norm": back.norm(dim=1).mean(),
        "upstream.zero_share": (back == 0).double().mean(),
        "upstream.nonfinite_share": torch.zeros(()),
    }


@pytest.mark.parametrize("how", ["criterion", "observed before", "observed after"])
@pytest.mark.parametrize("sizes", SIZES)
def test_statistics_of_predictions_cover_every_micro_batch(sizes, how, watching, recorded):
    """Logits, confidence, alignment and the loss's gradient are those of all samples of the step together."""
    model, criterion = classifier(), nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, criterion if how == "criterion" else None)
    wanted = []
    for batches in ((4,), SIZES[sizes], SIZES[sizes][:4]):  # 200 passes before the first step would be told of
        optimizer.zero_grad()
        logits, targets = [], []
        for size in batches:
            x, y = torch.randn(size, 6), torch.randint(4, (size,))
            if size > 2:
                y[0] = -100
            z = model(x)
            z.retain_grad()
            loss = criterion(z, y) / len(batches)
            if how == "observed before":
                exporter.observe(logits=z, targets=y)
            loss.backward()
            if how == "observed after":
                exporter.observe(logits=z, targets=y)
            logits.append(z)
            targets.append(y)
        wanted.append(truth_of(logits, targets, [z.grad for z in logits]))
        optimizer.step()
    for record, truth in zip(recorded(exporter), wanted, strict=True):
        for metric, value in truth.items():
            if how == "observed after" and metric.startswith("upstream"):
                continue  # nobody knew of these predictions when their gradient came
            assert record.value(metric) == pytest.approx(float(value), rel=2e-5, abs=1e-7), metric


def test_micro_batches_whose_targets_are_all_left_out_weigh_nothing(watching, recorded):
    """Accuracy is over the samples that have a target, in whichever micro-batches they are."""
    model, criterion = classifier(), nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model, criterion)
    hits = 0
    for number in range(3):
        z = model(torch.randn(5, 6))
        y = torch.full((5,), -100) if number == 1 else z.argmax(1).roll(number)
        hits += int((z.argmax(1) == y).sum())
        criterion(z, y).backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.value("alignment.accuracy") == pytest.approx(hits / 10)


class Smoothed(nn.Module):
    """A criterion of the user's own, with a second term."""

    def forward(self, z, y):
        """Return a loss."""
        return F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1) + 1e-3 * z.square().mean()


IGNORING = {
    "module": nn.CrossEntropyLoss(ignore_index=0),
    "own": Smoothed(),
    "likelihood": lambda z, y: F.nll_loss(z.log_softmax(1), y, ignore_index=0),
}


@pytest.mark.parametrize("shape", [(9,), (3, 5)], ids=["flat", "sequences"])
@pytest.mark.parametrize("name", IGNORING)
def test_a_class_that_the_loss_ignores_has_no_accuracy(name, shape, watching, recorded):
    """Positions whose target is ``ignore_index`` count neither as hits nor as misses, whatever its number."""
    model, criterion = classifier(), IGNORING[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, criterion if isinstance(criterion, nn.Module) else None)
    z, y = model(torch.randn(*shape, 6)).movedim(-1, 1), torch.randint(1, 4, shape)
    y.flatten()[::2] = 0
    loss = criterion(z, y)
    if name == "likelihood":
        exporter.observe(loss=loss, logits=z, targets=y)
    loss.backward()
    optimizer.step()
    rows, kept = z.detach().movedim(1, -1).reshape(-1, 4), y.flatten() > 0
    truth = truth_of([rows], [y.flatten().where(kept, -1)], [rows])
    (record,) = recorded(exporter)
    for metric in ("alignment.accuracy", "alignment.margin", "confidence.target", "confidence.max"):
        assert record.value(metric) == pytest.approx(float(truth[metric]), rel=2e-5, abs=1e-7), metric


def test_predictions_that_are_handed_over_twice_count_once(watching, recorded):
    """The gradient of predictions that criterion and observe both know of is not counted twice."""
    model, criterion = classifier(), nn.CrossEntropyLoss()
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model, criterion)
    z, y = model(torch.randn(5, 6)), torch.randint(4, (5,))
    z.retain_grad()
    exporter.observe(logits=z, targets=y)
    criterion(z, y).backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.value("upstream.norm") == pytest.approx(float(z.grad.norm()), rel=1e-6)


def test_what_was_seen_between_records_is_in_none(watching, recorded):
    """With ``every`` the statistics of a record are of the micro-batches of its own step."""
    model, criterion = classifier(), nn.CrossEntropyLoss()
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.0), watching(model, criterion, every=3)
    greatest = []
    for _ in range(6):
        optimizer.zero_grad()
        greatest.append([])
        for _ in range(2):
            z = model(torch.randn(5, 6))
            greatest[-1].append(z.max().item())
            criterion(z, torch.randint(4, (5,))).backward()
        optimizer.step()
    for record in recorded(exporter):
        assert record.value("logits.max") == pytest.approx(max(greatest[record.step - 1]))
        assert record.value("runtime.backward_passes") == 2.0


WEIGHTED = {
    "list": lambda a, b: torch.autograd.backward([a, b], [torch.tensor(0.5), torch.tensor(0.25)]),
    "named": lambda a, b: torch.autograd.backward((a, b), grad_tensors=(torch.tensor(0.5), torch.tensor(0.25))),
    "iterator": lambda a, b: torch.autograd.backward(iter([a, b]), [torch.tensor(0.5), torch.tensor(0.25)]),
    "one after the other": lambda a, b: (a.backward(torch.tensor(0.5)), b.backward(gradient=torch.tensor(0.25))),
    "of one entry": lambda a, b: torch.autograd.backward(
        [a[None], b[None]], [torch.tensor([0.5]), torch.tensor([0.25])]
    ),
}


@pytest.mark.parametrize("way", WEIGHTED)
def test_a_gradient_given_to_backward_weighs_the_loss(way, watching, recorded):
    """Of losses that backward is given gradients for, the loss is the weighted sum, as that of their gradients is."""
    model = classifier()
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model)
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        a, b = model(torch.randn(5, 6)).square().mean(), model(torch.randn(5, 6)).exp().mean()
        WEIGHTED[way](a, b)
        wanted.append(0.5 * a.item() + 0.25 * b.item())
        optimizer.step()
    assert [record.value("loss") for record in recorded(exporter)] == pytest.approx(wanted, rel=1e-6)


def test_gradients_that_are_asked_for_before_backward_are_none_of_the_step(watching, recorded):
    """As where losses are balanced by their gradients: what ``autograd.grad`` sends back adds to no ``.grad``."""
    model, criterion = classifier(), nn.CrossEntropyLoss()
    optimizer, exporter, wanted = torch.optim.SGD(model.parameters(), lr=0.1), watching(model, criterion), []
    for _ in range(4):
        optimizer.zero_grad()
        back = 0.0
        for size in (5, 2):
            z = model(torch.randn(size, 6))
            z.retain_grad()
            loss = criterion(z, torch.randint(4, (size,))) / 2
            torch.autograd.grad(loss, model[2].weight, retain_graph=True)
            z.grad = None
            loss.backward()
            back += float(z.grad.square().sum())
        wanted.append(back**0.5)
        optimizer.step()
    assert [record.value("upstream.norm") for record in recorded(exporter)] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("before", [(0,), (1,), (0, 2), (3,)], ids=["first", "second", "two of them", "the step"])
def test_gradients_that_are_asked_for_between_passes_are_none_of_the_blocks(before, watching, recorded):
    """As for a penalty: before whichever micro-batch, or after the last, ``autograd.grad`` adds to no gradient."""
    model, wanted = classifier(), []
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model, blocks=list(model))
    for _ in range(4):
        optimizer.zero_grad()
        outputs, losses = [], 0.0
        for number in range(4):
            if number in before:
                x = torch.randn(5, 6, requires_grad=True)
                torch.autograd.grad(model(x).square().sum(), x)
            if number < 3:
                outputs.append(model(torch.randn(5, 6)))
                outputs[-1].retain_grad()
                loss = outputs[-1].square().mean()
                loss.backward()
                losses += loss.item()
        wanted.append((float(torch.cat([z.grad for z in outputs]).norm()), losses))
        optimizer.step()
    found = [(record.value("block.gradient_norm", "2"), record.value("loss")) for record in recorded(exporter)]
    assert found == [pytest.approx(each, rel=1e-6) for each in wanted]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("factor", [512.0, 1000.0, 1.0])
def test_the_factor_of_a_scaler_is_no_part_of_the_loss(told, factor, watching, recorded):
    """Whatever a gradient scaler multiplies by, also by what is no power of two, the loss is what was before it."""
    model, criterion, wanted = classifier(), nn.CrossEntropyLoss(), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=factor)
    exporter = watching(model, criterion if told else None)
    for _ in range(3):
        optimizer.zero_grad()
        wanted.append(0.0)
        for size in (3, 7):
            loss = criterion(model(torch.randn(size, 6)), torch.randint(4, (size,))) / 2
            wanted[-1] += loss.item()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [record.value("loss") for record in recorded(exporter)] == pytest.approx(wanted, rel=1e-5)


class Pushes(torch.autograd.Function):
    """Pass through; forward takes 100 and backward 3 seconds of the clock."""

    @staticmethod
    def forward(ctx, x, clock):
        """Push the clock."""
        ctx.clock = clock
        clock[0] += 100.0
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Push the clock."""
        ctx.clock[0] += 3.0
        return gradient, None


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is pushed."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_backward_time_holds_no_forward_pass(passes, clock, watching, recorded):
    """It is the sum over the calls of backward, not the time between the first and the step."""
    model = classifier()
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(passes):
            Pushes.apply(model(torch.randn(5, 6)), clock).square().mean().backward()
        optimizer.step()
    records = recorded(exporter)
    assert [record.value("runtime.backward_time") for record in records] == [3.0 * passes] * 4
    assert [record.value("runtime.backward_passes") for record in records] == [passes] * 4


def test_backward_time_of_a_closure_is_that_of_all_its_calls(clock, watching, recorded):
    """LBFGS calls its closure many times in a step; each pass counts."""
    model, x = classifier(), torch.randn(5, 6)
    optimizer, calls = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), []
    exporter = watching(model)

    def closure():
        optimizer.zero_grad()
        loss = Pushes.apply(model(x), clock).square().mean()
        loss.backward()
        calls.append(1)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    times = [record.value("runtime.backward_time") for record in recorded(exporter)]
    assert sum(times) == 3.0 * len(calls)
    assert len(calls) > 4


def test_backward_time_is_missing_where_no_backward_is_called(watching, recorded):
    """Gradients from torch.autograd.grad have none, and a pass that raised takes none."""
    model, criterion = classifier(), nn.MSELoss()
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.1), watching(model, criterion)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="grad can be implicitly"):
            model(torch.randn(5, 6)).backward()
        loss = criterion(model(torch.randn(5, 6)), torch.zeros(5, 4))
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g
        optimizer.step()
    records = recorded(exporter)
    assert [record.value("runtime.backward_time") for record in records] == [None] * 3
    assert all(record.value("loss") is not None for record in records)


class Reader(nn.Module):
    """A model with one of everything that reads forward passes."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.bend, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        """Return logits."""
        return self.head(self.bend(self.attention(self.act(self.first(x))).mean(1)))


def test_what_is_of_one_micro_batch_says_so(watching, recorded):
    """Metrics that the catalogue calls those of the last or the first micro-batch are, and no others are told of."""
    torch.manual_seed(3)
    data = [(torch.randn(size, 5, 6) * (1 + k), torch.randint(4, (size,))) for k, size in enumerate((7, 4, 9))]

    def read(batches):
        torch.manual_seed(0)
        model, criterion = Reader(), nn.CrossEntropyLoss()
        optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.0), watching(model, criterion)
        for x, y in batches:
            z = model(x)
            exporter.observe(policy={"logits": z})
            criterion(z, y).backward()
        optimizer.step()
        (record,) = recorded(exporter)
        return {reading.metric: reading for reading in record.readings}

    every, first, last = read(data), read(data[:1]), read(data[-1:])
    of_one = {name for name, spec in CATALOG.items() if spec.batches != "all" and name in every}
    assert {"block.output_rms", "policy.entropy", "attention.entropy", "activation.zero_share"} <= of_one
    for name in of_one:
        same = first if CATALOG[name].batches == "first" else last
        assert list(every[name].values) == pytest.approx(list(same[name].values), rel=1e-5, abs=1e-7), name
    for name in ("logits.mean", "logits.std", "confidence.max", "alignment.margin", "upstream.norm", "loss"):
        assert CATALOG[name].batches == "all"
        assert float(every[name].values[0]) not in (float(first[name].values[0]), float(last[name].values[0])), name


SHARES = {
    "as they are": lambda size, sizes: 1.0,
    "by their number": lambda size, sizes: 1 / len(sizes),
    "by samples": lambda size, sizes: size / sum(sizes),
    "by all samples": lambda size, sizes: 1 / sum(sizes),
}


@pytest.mark.parametrize("sizes", [*list(SIZES.values())[:3], SIZES["many"][:40]], ids=SIZES)
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("share", SHARES)
def test_the_loss_is_what_the_backward_passes_add_up_to(monkeypatch, watching, recorded, sizes, told, reduction, share):
    """Of micro-batches of any sizes, with the criterion named and without: the loss that the step trains on."""
    monkeypatch.setattr(micro_batches, "FOLD_AT", 32)
    monkeypatch.setattr(backward_passes, "FOLD_AT", 32)
    model, criterion = classifier(), nn.CrossEntropyLoss(reduction=reduction)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    exporter = watching(model, criterion) if told else watching(model)
    for _ in range(3):
        optimizer.zero_grad()
        whole = 0.0
        for size in sizes:
            loss = criterion(model(torch.randn(size, 6)), torch.randint(4, (size,))) * SHARES[share](size, sizes)
            whole += loss.item()
            loss.backward()
        optimizer.step()
        expected.append(whole)
    # Many backward passes before the first step have a record of their own.
    found = [record.value("loss") for record in recorded(exporter) if record.value("loss") is not None]
    assert found == pytest.approx(expected, rel=1e-5)
