"""What is said of the error of samples holds: over many draws the values scatter as their records state."""

from functools import partial

import numpy as np
import pytest
import torch

from gradflow_export.instruments.loss import LossInstrument
from gradflow_export.metrics.arrays.samples import rows_of, scattered, size_of_rows
from gradflow_export.metrics.logits import (
    LOGIT_ERRORS,
    LOGIT_METRICS,
    TARGET_ERRORS,
    TARGET_METRICS,
    logit_statistics,
    target_means,
    target_sums,
)
from gradflow_export.metrics.moments import epsilon_share, ratio_error, second_moment_ratio, share_error
from gradflow_export.metrics.outputs import output_spreads, rank_errors, ranks

DRAWS = 200


def of_spreads(kind, shape):
    """Draw outputs; return how far each sampled spread is from that of all rows and features, and what it states."""
    offs, errors = [], []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        output = torch.randn(shape)
        columns = 1 if output.dim() > 3 else -1
        if kind == "features of different sizes":
            output = output * torch.rand(shape[columns]).reshape(
                [-1 if d == columns % len(shape) else 1 for d in range(len(shape))]
            )
        elif kind == "samples of different sizes":
            output = output * torch.rand(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        flat = (output.movedim(1, -1) if output.dim() > 3 else output).reshape(-1, shape[columns])
        true = float(flat.std(dim=0, correction=0).square().mean().sqrt())
        (value,), (error,) = output_spreads([rows_of(output, 32, 64)], [size_of_rows(output)]).tolist()
        offs.append(value / true - 1)
        errors.append(error)
    return np.array(offs), np.array(errors)


@pytest.mark.parametrize("shape", [(256, 48), (16, 600), (300, 500), (64, 20, 90), (64, 80, 6, 6)], ids=str)
@pytest.mark.parametrize("kind", ["alike", "features of different sizes", "samples of different sizes"])
def test_spreads_scatter_as_they_say(kind, shape):
    """Without bias, by about the standard error that is stated, and hardly ever by more than six of them."""
    offs, errors = of_spreads(kind, shape)
    assert abs(offs.mean()) < 0.35 * errors.mean() + 3 * offs.std() / DRAWS**0.5
    assert 0.5 < np.sqrt((offs**2).mean()) / np.sqrt((errors**2).mean()) < 1.6
    assert (np.abs(offs) < 6 * errors).all()


def test_a_spread_of_everything_is_exact():
    """Where no row and no feature is left out the error is 0, and the spread is that of the definition."""
    output = torch.randn(32, 64)
    value, error = output_spreads([rows_of(output, 32, 64)], [size_of_rows(output)])[:, 0].tolist()
    assert error == 0.0
    assert value == pytest.approx(float(output.double().std(dim=0, correction=0).square().mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize("touched", [1.0, 0.1, 0.001])
@pytest.mark.parametrize("late", [False, True])
def test_ratios_to_second_moments_lie_within_what_they_say(touched, late):
    """However few rows of a table a batch looks up, the sample is off by no more than three standard errors."""
    decay, worst = 0.999, []
    correction = 1.0 if late else 1 - decay
    for seed in range(DRAWS // 4):
        torch.manual_seed(seed)
        rows = (torch.rand(4000) < touched).float()
        gradient = (torch.randn(4000, 32) * rows[:, None]).reshape(-1)
        second = (
            (1 - decay) * gradient.square() + (decay * 0.5 * torch.rand(len(gradient)) if late else 0.0)
        ) / correction
        second = second * (gradient != 0)
        places = scattered(len(gradient), 4096)
        taken = gradient[places], second[places]
        true = [float(second_moment_ratio(gradient.double(), second.double(), 1e-8)), float(epsilon_share(second, 0.3))]
        found = [float(second_moment_ratio(*taken, 1e-8)), float(epsilon_share(taken[1], 0.3))]
        stated = [float(ratio_error(*taken, 1e-8, len(gradient), correction / (1 - decay)))]
        stated.append(float(share_error(taken[1], 0.3, len(gradient))))
        worst.append([abs(a - b) / error for a, b, error in zip(true, found, stated, strict=True)])
    assert np.max(worst) < 3.0


@pytest.mark.parametrize(("rank", "rows"), [(8, 128), (16, 128), (32, 256), (16, 64)])
def test_the_rank_of_some_rows_is_low_by_a_share_of_rank_over_eight_times_the_rows(rank, rows):
    """The law that the catalogue states for outputs of which some rows are looked at."""
    lows = []
    for seed in range(6):
        torch.manual_seed(seed)
        output = (torch.randn(8192, rank) @ torch.linalg.qr(torch.randn(512, rank))[0].T).numpy()
        lows.append(1 - ranks(output[:rows])[0] / ranks(output)[0])
    assert np.mean(lows) == pytest.approx(rank / (8 * rows), rel=0.4)


def test_places_are_drawn_from_all_columns_of_a_matrix():
    """One place from each of so many pieces of equal length, in rising order, and never the columns of a grid."""
    places = scattered(1024 * 1024, 4096)
    assert torch.equal(places // 256, torch.arange(4096))
    assert len(torch.unique(places % 1024)) > 900


@pytest.mark.parametrize("batches", [1, 3])
def test_predictions_of_many_samples_state_their_error(batches):
    """Where some rows speak for all, every mean over samples is off by a few of the errors that its record states."""
    torch.manual_seed(0)
    size, classes = 4096, 300
    far = {}
    for _ in range(10):
        logits = [3 * torch.randn(size, 1) * torch.randn(size, classes) for _ in range(batches)]
        targets = [
            torch.where(torch.rand(size) < 0.3, x.argmax(1), torch.randint(-1, classes, (size,))) for x in logits
        ]
        loss = LossInstrument(guard=partial)
        loss.want_logits = True
        for x, y in zip(logits, targets, strict=True):
            loss.observe_logits(x, y)
        found = {pending.metric: float(pending.values) for pending in loss.drain()}
        rows, numbers = torch.cat(logits).double(), torch.cat(targets)
        whole = dict(zip(LOGIT_METRICS, logit_statistics(rows).tolist(), strict=True))
        whole |= dict(zip(TARGET_METRICS, target_means(target_sums(rows, numbers)).tolist(), strict=True))
        for name in (*LOGIT_ERRORS, *TARGET_ERRORS):
            assert found[name] > 0
            metric = name.removesuffix("_error")
            far.setdefault(metric, []).append(abs(found[metric] - whole[metric]) / found[name])
    for metric, errors in far.items():
        assert max(errors) < 4, metric
        assert sum(errors) / 10 > 0.1, metric


def test_predictions_that_are_all_looked_at_state_no_error():
    """Of few samples nothing is estimated; of many classes no fewer than 32 samples are looked at."""
    for samples, classes, estimated in ((1000, 1000, False), (32, 2**17, False), (64, 2**17, True)):
        loss = LossInstrument(guard=partial)
        loss.want_logits = True
        loss.observe_logits(torch.randn(samples, classes), torch.randint(classes, (samples,)))
        assert ("alignment.accuracy_error" in {pending.metric for pending in loss.drain()}) is estimated


@pytest.mark.parametrize(
    ("rows", "features", "all_rows", "all_features"),
    [(128, 64, 2000, 64), (64, 64, 64, 400), (32, 128, 200, 128), (64, 64, 2000, 400)],
)
def test_the_stated_errors_of_ranks_are_those_of_rows_and_features(rows, features, all_rows, all_features):
    """Ranks of rows and features that are drawn again and again scatter by as much as each draw says; of all by 0."""
    random = np.random.default_rng(0)
    basis = random.standard_normal((24, all_features)) * np.exp(-np.arange(24) / 6)[:, None]
    output = random.standard_normal((all_rows, 24)) @ basis + 0.02 * random.standard_normal((all_rows, all_features))
    left_out, told, stated = (1 - rows / all_rows, 1 - features / all_features), [], []
    for _ in range(40):
        chosen = random.choice(all_rows, rows, replace=False), random.choice(all_features, features, replace=False)
        sample = output[np.ix_(*chosen)]
        told.append(ranks(sample))
        stated.append(rank_errors(sample, left_out))
    scatter = np.log(told).std(axis=0) / np.sqrt(np.square(stated).mean(axis=0))
    assert ((scatter > 0.5) & (scatter < 1.6)).all(), scatter
    assert rank_errors(sample, (0.0, 0.0)) == (0.0, 0.0)
    assert rank_errors(np.ones((3, 2)), left_out) == (0.0, 0.0)
