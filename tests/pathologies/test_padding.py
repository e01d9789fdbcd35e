"""Padding that a loss counts, by the index that the model declares, beside all ways in which it is left out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

WORDS, LENGTH = 20, 24


class Tagger(nn.Module):
    """Tags each word, by a recurrent layer or by attention."""

    def __init__(self, pad, recurrent):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=pad)
        self.mix = (
            nn.GRU(16, 16, batch_first=True)
            if recurrent
            else nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        )
        self.out, self.pad = nn.Linear(16, WORDS), pad

    def forward(self, x):
        """Return scores of each word."""
        h = self.embed(x)
        return self.out(self.mix(h)[0] if isinstance(self.mix, nn.GRU) else self.mix(h))


def found(counted, *, pad=0, longest=6, recurrent=True, shifted=False, declared=True, seed=0):
    torch.manual_seed(seed)
    model = Tagger(pad if declared else None, recurrent)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    turned = (torch.randperm(WORDS - 1) + pad + 1) % WORDS
    with Exporter(model, backends=[MemoryWriter()], synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(20):
            x = (torch.randint(WORDS - 1, (16, LENGTH)) + pad + 1) % WORDS
            empty = torch.arange(LENGTH) >= torch.randint(2, longest, (16, 1))
            y = turned[(x - pad - 1) % WORDS].masked_fill(empty, pad)
            x = x.masked_fill(empty, pad)
            given, wanted = (x[:, :-1], x[:, 1:]) if shifted else (x, y)
            scores, wanted = model(given).flatten(0, 1), wanted.flatten()
            optimizer.zero_grad()
            counted(scores, wanted, pad).backward()
            optimizer.step()
        return {issue.cause for issue in exporter.issues if issue.issue_type is IssueType.BAD_TARGETS}


def everything(scores, y, _pad):
    return F.cross_entropy(scores, y)


LEFT_OUT = {
    "ignore_index": lambda s, y, pad: F.cross_entropy(s, y, ignore_index=pad),
    "-100": lambda s, y, pad: F.cross_entropy(s, y.masked_fill(y == pad, -100)),
    "chosen": lambda s, y, pad: F.cross_entropy(s[y != pad], y[y != pad]),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pad", [0, WORDS - 1])
@pytest.mark.parametrize(("recurrent", "shifted"), [(True, False), (True, True), (False, False), (False, True)])
def test_padding_that_counts_is_told(recurrent, shifted, pad, seed):
    """Whichever index it has, for tags and for next words, with a recurrent layer and with attention."""
    assert found(everything, pad=pad, recurrent=recurrent, shifted=shifted, seed=seed) == {"padding counts"}


@pytest.mark.parametrize("way", LEFT_OUT)
def test_padding_that_is_left_out_is_in_order(way):
    """However the loss leaves it out."""
    assert found(LEFT_OUT[way]) == set()


def test_a_little_padding_and_a_word_like_any_other_are_in_order():
    """Few targets are padding, or the model declares none."""
    assert found(everything, longest=2 * LENGTH) == set()
    assert found(everything, declared=False) == set()
