"""Weights that are computed whenever somebody looks at them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gradflow_export import Exporter


def trained(computed, *, watched):
    """Losses and the final state of a network whose table and layers are all parametrized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    for layer in (*model[:2], *model[3:]):
        computed(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randint(16, (32,)), torch.randint(3, (32,))
    exporter = Exporter(model, backends=["memory"], strict=True).watch() if watched else None
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if exporter is not None:
        exporter.close()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "computed", [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_watching_does_not_compute_parametrized_weights(computed):
    """spectral_norm takes a step of its power iteration at each look: losses, weights and its vectors stay the same."""
    losses, state = trained(computed, watched=False)
    seen, after = trained(computed, watched=True)
    assert seen == losses
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


class Looks(nn.Module):
    """A parametrization that counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight * 1.0


NUMBERS, WORDS, IMAGES = torch.ones(4, 6), torch.zeros(4, 5, dtype=torch.long), torch.ones(4, 2, 6, 6)
KINDS = {
    "linear": (lambda: nn.Linear(6, 6), NUMBERS),
    "table": (lambda: nn.Embedding(6, 6), WORDS),
    "bag": (lambda: nn.EmbeddingBag(6, 6), WORDS),
    "convolution": (lambda: nn.Conv2d(2, 6, 3), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(2, 6, 3), IMAGES),
    "recurrent": (lambda: nn.LSTM(6, 6, batch_first=True), NUMBERS[:, None]),
    "cell": (lambda: nn.GRUCell(6, 6), NUMBERS),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), NUMBERS[:, None].expand(4, 3, 6)),
    "norm": (lambda: nn.LayerNorm(6), NUMBERS),
    "batch norm": (lambda: nn.BatchNorm1d(6), NUMBERS),
    "slope": (nn.PReLU, NUMBERS),
}


def looks(kind, *, watched):
    """How often each parameter of a layer is computed in thirty steps and three evaluations."""
    torch.manual_seed(0)
    layer, x = KINDS[kind][0](), KINDS[kind][1]
    counts = {name: Looks() for name, _ in layer.named_parameters(recurse=False)}
    for name, count in counts.items():
        parametrize.register_parametrization(layer, name, count)
    model = nn.ModuleList([layer, nn.LazyLinear(3)])

    def answer():
        out = layer(x, x, x) if kind == "attention" else layer(x)
        return model[1]((out[0] if isinstance(out, tuple) else out).flatten(1))

    answer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    exporter = Exporter(model, backends=["memory"], strict=True).watch() if watched else None
    for step in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(answer(), torch.arange(4) % 3).backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                answer()
            model.train()
    if exporter is not None:
        exporter.close()
    return {name: count.count for name, count in counts.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_layer_has_its_parameters_computed_once_more(kind):
    """Whatever looks at a layer looks at what is registered, never at what an attribute computes."""
    plain = looks(kind, watched=False)
    assert min(plain.values()) > 30
    assert looks(kind, watched=True) == plain
