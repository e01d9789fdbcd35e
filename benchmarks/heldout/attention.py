"""Faulty and healthy transformers: ViT, nn.MultiheadAttention, nn.TransformerEncoderLayer, cross-attention, copying."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from common import (
    Case,
    Program,
    Proof,
    adamw,
    cut,
    fault,
    fill,
    healthy,
    names,
    pictures,
    scale,
    token_loss,
    twin,
    wide,
)
from proofs import dead, learns, narrow, numerical, vanishing
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_parts import (
    Bare,
    Block,
    Fused,
    Masked,
    Multi,
    Pooled,
    Tokens,
    Translator,
    Vit,
    Written,
    encoder,
    reverse,
)


def picture_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weights(program: Program, find: str) -> Tensor:
    """Return the exact attention of the module's heads, from its float64 input: batch, head, query, key."""
    model, seen = twin(program), []
    module = model.get_submodule(find)
    module.register_forward_pre_hook(lambda _m, i: seen.append(i))
    program.loss(model, wide(program.batches[0]))
    x, memory = seen[0][0], seen[0][1] if len(seen[0]) > 1 else seen[0][0]
    if isinstance(module, nn.MultiheadAttention):
        return module(x, memory, memory, need_weights=True, average_attn_weights=False)[1].detach()
    q, k = (
        part(y).unflatten(-1, (module.heads, -1)).transpose(1, 2) for part, y in ((module.q, x), (module.k, memory))
    )
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1).detach()


def one_key(find: str) -> Proof:
    """Return the proof that before any step every head's largest weight is over 0.9 in the mean (chance: 1 / keys)."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        top = weights(case.build(), find).amax(-1).mean((0, 2))
        return float(top.min()) > 0.9, {"largest weight of each head": [round(float(v), 3) for v in top]}

    return proof


def diversity(w: Tensor) -> float:
    """Return one minus the mean cosine of two heads' departures from even attention."""
    away = (w - 1 / w.shape[-1]).transpose(0, 1).flatten(1)
    cosines = nn.functional.normalize(away, dim=1) @ nn.functional.normalize(away, dim=1).T
    return float(1 - (cosines.sum() - len(w[0])) / (len(w[0]) * (len(w[0]) - 1)))


def same_heads(find: str, other: str) -> Proof:
    """Return the proof that the heads are alike from first to last step, and those of another layer differ."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        program = case.build()
        figures = {"elsewhere": diversity(weights(program, other)), "start": diversity(weights(program, find))}
        program.train()
        figures["end"] = diversity(weights(program, find))
        return figures["start"] < 0.01 and figures["end"] < 0.15 and figures["elsewhere"] > 0.5, figures

    return proof


def tokens_alike(case: Case) -> tuple[bool, dict[str, Any]]:
    """Behind the last block tokens differ by under 2 % of their size, before the first by over 30 %."""
    program, outs = case.build(), []
    model = twin(program)
    model.get_submodule(program.blocks[0]).register_forward_pre_hook(lambda _m, i: outs.append(i[0].detach()))
    for name in program.blocks or []:
        model.get_submodule(name).register_forward_hook(lambda _m, _i, o: outs.append(o.detach()))
    program.loss(model, wide(program.batches[0]))
    rest = [float((x - x.mean(1, keepdim=True)).norm() / x.norm()) for x in outs]
    return rest[-1] < 0.02 and rest[0] > 0.3, {"residual": [round(r, 5) for r in rest]}


def copy_head(lin: nn.Linear, heads: int = 4, noise: float = 0.0) -> None:
    """Give every head the first one's weights."""
    n = lin.out_features // heads
    with torch.no_grad():
        lin.weight.copy_(lin.weight[:n].repeat(heads, 1) * (1 + noise * torch.randn_like(lin.weight)))
        lin.bias.copy_(lin.bias[:n].repeat(heads))


def copy_packed(mha: nn.MultiheadAttention) -> None:
    """Give every head of a packed projection the first one's queries and keys."""
    d, n = mha.embed_dim, mha.head_dim
    with torch.no_grad():
        for start in (0, d):
            for matrix in (mha.in_proj_weight, mha.in_proj_bias):
                matrix[start : start + d] = matrix[start : start + n].repeat(mha.num_heads, *[1] * (matrix.dim() - 1))


def collapse_multi() -> Program:
    """nn.MultiheadAttention with need_weights: queries and keys of the first block forty times too large."""
    m = Tokens([Block(Multi()) for _ in range(3)])
    scale(15.0, m.blocks[0].attention.mha.in_proj_weight[:64])
    return Program(m, token_loss, reverse(), adamw(m, 1e-3), blocks=names("blocks", 3))


def collapse_encoder_layer() -> Program:
    """nn.TransformerEncoderLayer: the last of three layers."""
    m = encoder()
    scale(15.0, m.blocks[2].self_attn.in_proj_weight[:64])
    return Program(m, token_loss, reverse(), adamw(m, 1e-3), blocks=names("blocks", 3))


def collapse_vit() -> Program:
    """ViT with attention written out."""
    m = Vit([Block(Written()) for _ in range(3)])
    scale(25.0, m.blocks[1].attention.q.weight, m.blocks[1].attention.k.weight)
    return Program(m, picture_loss, pictures(), adamw(m, 1e-3), blocks=names("blocks", 3))


def collapse_cross() -> Program:
    """Cross-attention of the first layer."""
    m = Translator()
    scale(25.0, m.cross[0].q.weight, m.cross[0].k.weight)
    return Program(m, token_loss, [(x, y[:, :6]) for x, y in reverse()], adamw(m, 1e-3))


def heads_multi() -> Program:
    """nn.MultiheadAttention with need_weights, whose heads begin alike."""
    m = Tokens([Block(Multi()) for _ in range(3)])
    scale(2.0, m.blocks[1].attention.mha.in_proj_weight)
    copy_packed(m.blocks[1].attention.mha)
    return Program(m, token_loss, reverse(), adamw(m, 3e-4), blocks=names("blocks", 3))


def heads_encoder_layer() -> Program:
    """nn.TransformerEncoderLayer, Post-LN, whose heads begin alike."""
    m = encoder(2, norm_first=False)
    scale(2.0, m.blocks[1].self_attn.in_proj_weight)
    copy_packed(m.blocks[1].self_attn)
    return Program(m, token_loss, reverse(), adamw(m, 3e-4), blocks=names("blocks", 2))


def heads_vit() -> Program:
    """ViT with attention written out, whose heads differ by a thousandth."""
    m = Vit([Block(Written()) for _ in range(3)])
    for part in (m.blocks[2].attention.q, m.blocks[2].attention.k):
        scale(2.0, part.weight)
        copy_head(part, noise=1e-3)
    return Program(m, picture_loss, pictures(), adamw(m, 3e-4), blocks=names("blocks", 3))


def rank_weak_skip() -> Program:
    """Ten attention layers with LayerNorm whose skip is multiplied by 0.1."""
    m = Tokens([Bare(Fused(), 0.1, norm=True) for _ in range(10)])
    return Program(m, token_loss, reverse(), adamw(m, 1e-3), blocks=names("blocks", 10))


def rank_multi() -> Program:
    """Six layers of nn.MultiheadAttention with need_weights and no skip."""
    m = Tokens([Bare(Multi(), 0.0, norm=True) for _ in range(6)])
    return Program(m, token_loss, reverse(), adamw(m, 1e-3), blocks=names("blocks", 6))


def rank_vit() -> Program:
    """ViT without skips, attention written out, LayerNorm behind."""
    m = Vit([Bare(Written(), 0.0, norm=True) for _ in range(6)])
    return Program(m, picture_loss, pictures(), adamw(m, 1e-3), blocks=names("blocks", 6))


def vanish_post_norm_offsets() -> Program:
    """Ten Post-LN layers whose MLP adds large constants: LayerNorm divides signal and gradient by them."""
    m = encoder(10, norm_first=False)
    for block in m.blocks:
        with torch.no_grad():
            block.linear2.bias.normal_(0, 6)
    return Program(m, token_loss, reverse(), adamw(m, 1e-4), blocks=names("blocks", 10), steps=25)


def dead_vit_mlp() -> Program:
    """ViT whose second MLP has ReLU and a bias of -20."""
    m = Vit([Block(Written(), act=nn.ReLU) for _ in range(3)])
    fill(-20.0, m.blocks[1].mlp[0].bias)
    return Program(m, picture_loss, pictures(), adamw(m, 1e-3), blocks=names("blocks", 3))


def nan_masked_row() -> Program:
    """A sequence of nothing but padding in batch 6: every key of its rows is masked with minus infinity."""

    class Padded(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.attention.padding = x == 11
            return super().forward(x)

    m = Padded([Block(Masked()) for _ in range(2)])
    x = torch.randint(11, (160, 12))
    x[6 * 16 + 2] = 11
    data = cut(16, x, x.flip(1))
    return Program(m, token_loss, data, adamw(m, 1e-3), blocks=names("blocks", 2), steps=14, facts={"step": 6})


def bottleneck_pooled_tokens() -> Program:
    """The third of five blocks pools all tokens, though each has an answer of its own."""
    blocks = [Block(Fused()) for _ in range(5)]
    blocks[2] = Pooled()
    m = Tokens(list(blocks))
    return Program(m, token_loss, reverse(), adamw(m, 2e-3), blocks=names("blocks", 5))


def ok_encoder() -> Program:
    """nn.TransformerEncoderLayer, Pre-LN, dropout 0.1."""
    m = encoder(dropout=0.1)
    return Program(m, token_loss, reverse(), adamw(m, 3e-3), steps=80, blocks=names("blocks", 3))


def ok_post_norm() -> Program:
    """Post-LN with a warm-up of forty steps and clipping."""
    m = encoder(3, norm_first=False)
    return Program(
        m,
        token_loss,
        reverse(),
        adamw(m, 1e-3),
        rate=lambda t: 3e-3 * min((t + 1) / 40, 1),
        clip=1.0,
        steps=100,
        blocks=names("blocks", 3),
    )


def ok_multi() -> Program:
    """nn.MultiheadAttention with need_weights."""
    m = Tokens([Block(Multi()) for _ in range(2)])
    return Program(m, token_loss, reverse(), adamw(m, 3e-3), steps=80, blocks=names("blocks", 2))


def ok_vit() -> Program:
    """ViT with attention written out, cosine schedule."""
    m = Vit([Block(Written()) for _ in range(3)])
    return Program(
        m,
        picture_loss,
        pictures(),
        adamw(m, 2e-3),
        rate=lambda t: 1e-3 * (1 + math.cos(math.pi * t / 60)),
        steps=60,
        blocks=names("blocks", 3),
    )


def ok_sharp_by_learning() -> Program:
    """One layer that learns to reverse a sequence: each head's attention becomes one key, because that is the task."""
    m = Tokens([Block(Fused(heads=2))])
    with torch.no_grad():
        m.place.copy_(torch.randn(12, 32) * 2)
    return Program(m, token_loss, reverse(256), adamw(m, 1e-2, weight_decay=0.0), steps=220, blocks=names("blocks", 1))


def sharpens(find: str) -> Callable[[Case], tuple[bool, dict[str, Any]]]:
    """Return the proof that the largest weight is below 0.45 before and over 0.8 after training."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        program = case.build()
        before = float(weights(program, find).amax(-1).mean())
        program.train()
        after = float(weights(program, find).amax(-1).mean())
        return before < 0.6 and after > 0.75, {"sharp": (before, after)}

    return proof


def ok_local_window() -> Program:
    """A mask lets each token see its two neighbours: few admissible keys, and it must move tokens by one."""
    m = Tokens([Block(Fused(window=1)) for _ in range(2)])
    x = torch.randint(12, (64, 12))
    return Program(m, token_loss, cut(16, x, x.roll(1, 1)), adamw(m, 5e-3), steps=80, blocks=names("blocks", 2))


def ok_cross() -> Program:
    """Cross-attention of six queries to twelve tokens."""
    m = Translator()
    return Program(m, token_loss, [(x, y[:, :6]) for x, y in reverse(128)], adamw(m, 1e-2), steps=100)


def ok_causal_tied() -> Program:
    """A causal language model with tied embeddings on a periodic language."""
    m = Tokens([Block(Fused(causal=True)) for _ in range(3)])
    scale(0.3, m.embed.weight)
    m.head.weight = m.embed.weight
    start, stride = torch.randint(12, (64, 1)), torch.randint(1, 4, (64, 1))
    x = (start + stride * torch.arange(13)) % 12
    return Program(m, token_loss, cut(16, x[:, :-1], x[:, 1:]), adamw(m, 3e-3), steps=80, blocks=names("blocks", 3))


WILD = "UNSTABLE EXPLODING SATURATION"

CASES = (
    fault("ATTENTION_COLLAPSE", collapse_multi, one_key("blocks.0.attention.mha"), "blocks.0", WILD),
    fault("ATTENTION_COLLAPSE", collapse_encoder_layer, one_key("blocks.2.self_attn"), "blocks.2", WILD),
    fault("ATTENTION_COLLAPSE", collapse_vit, one_key("blocks.1.attention"), "blocks.1", WILD),
    fault("ATTENTION_COLLAPSE", collapse_cross, one_key("cross.0"), "cross.0", WILD),
    fault("HEAD_REDUNDANCY", heads_multi, same_heads("blocks.1.attention.mha", "blocks.0.attention.mha"), "blocks.1"),
    fault("HEAD_REDUNDANCY", heads_encoder_layer, same_heads("blocks.1.self_attn", "blocks.0.self_attn"), "blocks.1"),
    fault("HEAD_REDUNDANCY", heads_vit, same_heads("blocks.2.attention", "blocks.0.attention"), "blocks.2"),
    fault("RANK_COLLAPSE", rank_weak_skip, tokens_alike, " ".join(names("blocks", 1, 10)), "VANISHING BOTTLENECK"),
    fault("RANK_COLLAPSE", rank_multi, tokens_alike, " ".join(names("blocks", 1, 6)), "VANISHING BOTTLENECK"),
    fault("RANK_COLLAPSE", rank_vit, tokens_alike, " ".join(names("blocks", 1, 6)), "VANISHING BOTTLENECK"),
    fault("VANISHING", vanish_post_norm_offsets, vanishing, " ".join(names("blocks", 6)), "RANK_COLLAPSE STAGNATION"),
    fault("DEAD", dead_vit_mlp, dead(), "blocks.1", "STAGNATION"),
    fault("NUMERICAL", nan_masked_row, numerical, "blocks.0"),
    fault("BOTTLENECK", bottleneck_pooled_tokens, narrow, "blocks.2 blocks.3", "RANK_COLLAPSE"),
    healthy(ok_encoder, learns(0.5)),
    healthy(ok_post_norm, learns(0.7)),
    healthy(ok_multi, learns(0.5)),
    healthy(ok_vit, learns(0.5)),
    healthy(ok_sharp_by_learning, learns(0.1, more=sharpens("blocks.0.attention"))),
    healthy(ok_local_window, learns(0.5)),
    healthy(ok_cross, learns(0.5)),
    healthy(ok_causal_tied, learns(0.5)),
)
