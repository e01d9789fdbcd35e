"""Attention is seen however a model computes it, and seeing it changes nothing and leaves nothing behind."""

import functools
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as bound_earlier
from torch.utils.checkpoint import checkpoint

from gradflow_export.instruments.attention import AttentionInstrument
from gradflow_export.schedule import INTERVALS

WIDTH, HEADS, LENGTH = 12, 3, 6


class Attention(nn.Module):
    """Self-attention in one of many ways; ``exact`` says what it should be."""

    def __init__(self, way):
        super().__init__()
        self.way, self.num_heads = way, HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.2)

    def parts(self, x):
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)]

    def weights(self, x):
        q, k, _ = self.parts(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.parts(x)
        if self.way == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        elif self.way == "bound earlier":
            y = bound_earlier(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            if self.way == "folded":
                scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) / math.sqrt(WIDTH // HEADS)
            elif self.way == "einsum":
                scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
            else:
                scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
            scores = scores.masked_fill(hidden, -1e9 if self.way == "method" else -math.inf)
            ways = {"F.softmax": functools.partial(F.softmax, dim=-1), "module": self.softmax}
            ways["torch.softmax"] = functools.partial(torch.softmax, dim=-1)
            p = ways[self.way](scores) if self.way in ways else scores.softmax(-1)
            p = self.drop(p)
            y = (p.unflatten(0, (-1, HEADS)) if self.way == "folded" else p) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(way)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Former(nn.Module):
    def __init__(self, way="sdpa", depth=2, *, recompute=None):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(depth))
        self.head, self.recompute = nn.Linear(WIDTH, 2), recompute

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = (
                block(x)
                if self.recompute is None
                else checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            )
        return self.head(x)


def train(model, steps=2, watch=None, batch=2, **options):
    """Train a few steps on random data from a generator of its own; return every bit of what happened."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    exporter = watch(model, **options) if watch else None
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, LENGTH, 4, generator=generator)).square().mean()
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    return [t.numpy().tobytes() for t in seen], torch.get_rng_state().numpy().tobytes(), exporter


def originals():
    """Return what a watcher may stand in for."""
    return F.scaled_dot_product_attention, torch.softmax, vars(torch.Tensor).get("softmax"), bound_earlier, F.softmax


WAYS = ("sdpa", "bound earlier", "F.softmax", "torch.softmax", "module", "method", "folded", "einsum")


@pytest.mark.parametrize("way", WAYS)
def test_attention_is_seen_however_it_is_computed_and_training_is_the_same(way, watching, recorded):
    """The entropy of each head is that of the exact weights, and not a bit of training or generators differs."""

    def build():
        torch.manual_seed(0)
        return Former(way)

    before = originals()
    plain, state, _ = train(build())
    watched, after, exporter = train(build(), watch=watching)
    assert (watched, after) == (plain, state)
    assert originals() == before
    record = recorded(exporter)[0]
    model = build()
    x = model.embed(torch.randn(2, LENGTH, 4, generator=torch.Generator().manual_seed(1))).detach()
    weights = model.blocks[0].attention.weights(model.blocks[0].norm(x)).detach()[:, :, 1:].double()
    keys = torch.arange(2, LENGTH + 1).log()
    entropy = (-(weights * weights.clamp_min(1e-300).log()).sum(-1) / keys).mean(dim=(0, 2))
    found = [record.value("attention.entropy", f"blocks.0.attention.head{head}") for head in range(HEADS)]
    assert found == pytest.approx(entropy.tolist(), rel=1e-5)
    assert record.get("attention.diversity").sites == ("blocks.0.attention", "blocks.1.attention")
    assert record.get("block.rank_residual").sites == ("blocks.0", "blocks.1")
    assert record.value("block.input_residual", "blocks.0") == pytest.approx(
        float(((x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean()), rel=1e-5
    )


class WithMultihead(nn.Module):
    """``nn.MultiheadAttention`` as a model would hold it."""

    def __init__(self, *, need_weights, batch_first):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dropout=0.1)
        self.need_weights, self.batch_first = need_weights, batch_first

    def forward(self, x):
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=self.need_weights, average_attn_weights=False)
        self.last = None if weights is None else weights.detach()
        return x + y


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_seen_with_and_without_weights(batch_first, watching, recorded):
    """Both code paths of PyTorch give the same entropies for the same weights, head by head."""
    found = []
    for need_weights in (True, False):
        torch.manual_seed(0)
        model = WithMultihead(need_weights=need_weights, batch_first=batch_first)
        _, _, exporter = train(model, watch=watching, steps=1)
        record = recorded(exporter)[0]
        found.append([record.value("attention.entropy", f"attention.head{head}") for head in range(HEADS)])
    assert None not in found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layers_are_read_along_the_tokens(batch_first, watching, recorded):
    """A TransformerEncoder in training is seen, and its tokens are the right dimension, whichever comes first."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first)
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            x = torch.ones_like(x) * x.mean(dim=1, keepdim=True)
            return self.inner(x if batch_first else x.transpose(0, 1))

    _, _, exporter = train(Seen(), watch=watching, steps=1, batch=3)
    record = recorded(exporter)[0]
    sites = tuple(f"inner.1.layers.{i}" for i in range(3))
    assert record.get("attention.sink").sites == tuple(f"{site}.self_attn" for site in sites)
    assert record.get("block.rank_residual").sites == sites
    # Equal tokens go in, so that along the tokens nothing tells them apart.
    assert record.value("block.input_residual", sites[0]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("recompute", ["reentrant", "plain"])
def test_checkpointed_blocks_are_read_once_in_order(recompute, watching, recorded):
    """Blocks that are computed again in backward give one value each, in depth order, and the same training."""

    def build():
        torch.manual_seed(0)
        return Former(depth=3, recompute=recompute)

    def needs_grad(model):
        model.embed.register_forward_hook(lambda *call: call[2].requires_grad_())
        return model

    plain, state, _ = train(needs_grad(build()))
    watched, after, exporter = train(needs_grad(build()), watch=watching)
    assert (watched, after) == (plain, state)
    record = recorded(exporter)[0]
    assert record.get("attention.sparsity").sites == tuple(f"blocks.{i}.attention" for i in range(3))
    assert record.get("attention.sparsity").present.all()
    assert originals()[2] is None


def test_validation_frozen_layers_and_other_models_are_passed_over(watching, recorded):
    """Without gradients nothing is read, and another model's attention is nobody's."""
    model, other = Former(), Former()
    exporter = watching(model)
    with torch.no_grad():
        model(torch.randn(2, LENGTH, 4))
    other(torch.randn(2, LENGTH, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.mse_loss(model.head(torch.randn(3, WIDTH)), torch.zeros(3, 2)).backward()
    optimizer.step()
    assert recorded(exporter)[0].get("attention.entropy") is None


def test_an_exception_in_forward_leaves_no_stand_in(watching):
    """A forward pass that fails inside attention has put every function back when the loop hears of it."""

    class Failing(Former):
        def forward(self, x):
            super().forward(x)
            self.during = originals()
            raise KeyError

    before = originals()
    model = Failing()
    exporter = watching(model)
    with pytest.raises(KeyError):
        model(torch.randn(2, LENGTH, 4))
    assert model.during[0] is not before[0]
    assert originals() == before
    with pytest.raises(RuntimeError):
        model.blocks[0].attention(torch.randn(2, LENGTH, WIDTH + 1))
    assert originals() == before
    exporter.close()
    assert originals() == before


def test_outside_the_forward_pass_every_function_is_its_own(watching):
    """While armed, but not inside the model, user code finds PyTorch's own functions; a model pickles as before."""
    before, model = originals(), Former()
    watching(model)
    assert originals() == before
    model(torch.randn(2, LENGTH, 4)).sum().backward()
    assert originals() == before
    assert set(pickle.loads(pickle.dumps(model.state_dict()))) == set(model.state_dict())


def test_two_watchers_inside_one_another_give_back_what_they_found():
    """Whichever tap stops first, the functions are PyTorch's own at the end."""
    before = originals()
    outer, inner = Former(), Former()
    for first_out in (0, 1):
        taps = [AttentionInstrument(outer), AttentionInstrument(inner)]
        stacks = [tap.attach() for tap in taps]
        for tap, model in zip(taps, (outer, inner), strict=True):
            tap.arm(on=True)
            tap._passes._enter(model, ())
        stacks[first_out].close()
        F.scaled_dot_product_attention(*(torch.ones(1, 2, 3, 4) for _ in range(3)))
        stacks[1 - first_out].close()
        assert originals() == before


def test_a_model_without_attention_is_no_longer_looked_at(watching, recorded):
    """After five sampled steps without any the instrument rests; a softmax over classes is never taken for attention."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 6)

        def forward(self, x):
            weights = F.softmax(torch.einsum("bld,de->ble", x, self.gate), dim=-1)
            return (weights.unsqueeze(-1) * self.experts(x).unflatten(-1, (3, 2))).sum(-2).softmax(dim=-1)

    model = Router()
    _, _, exporter = train(model, watch=watching, steps=7)
    tap = next(tap for tap in exporter._loop.instruments.armed if tap.instrument == "attention")
    assert not tap._passes.armed
    assert all(record.get("attention.entropy") is None for record in recorded(exporter))


def test_plain_layers_of_pytorch_have_no_attention_tap(watching):
    """A Sequential of PyTorch's own layers cannot hold attention, so nothing is armed for it."""
    exporter = watching(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert "attention" not in [tap.instrument for tap in exporter._loop.instruments.armed]
    assert "attention" in INTERVALS


def test_micro_batches_and_autocast_are_read(watching, recorded):
    """Several forward passes in one step give one reading; under bfloat16 autocast it is computed in float32."""
    model = Former()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2, LENGTH, 4)).float().square().mean()
        loss.backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.get("attention.entropy").present.all()
    bound, nats = (record.value(f"attention.{m}", "blocks.0.attention") for m in ("entropy_bound", "entropy_nats"))
    assert 0 < bound <= nats + 1e-6


def test_uniform_heads_are_missing_not_nan(watching, recorded):
    """Zero queries make attention uniform: entropy 1, and a diversity that is missing; NaN weights stay NaN."""
    model = Former()
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[:WIDTH] = 0
        model.blocks[0].attention.qkv.bias[:WIDTH] = 0
        model.blocks[1].attention.qkv.weight[:WIDTH] = math.nan
    _, _, exporter = train(model, watch=watching, steps=1)
    record = recorded(exporter)[0]
    assert record.value("attention.entropy", "blocks.0.attention.head0") == pytest.approx(1.0)
    assert record.value("attention.diversity", "blocks.0.attention") is None
    assert math.isnan(record.value("attention.diversity", "blocks.1.attention"))
