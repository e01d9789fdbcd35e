"""What enters a layer is what its call was given, also where a loss contains gradients that go back through it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export.autograd_graph.layer_graph import calls_of, layers_behind
from gradflow_export.autograd_graph.loss_graph import terms_of


class Product(nn.Module):
    """Multiplies by a matrix as it stands, with the bias within the product or after it."""

    def __init__(self, inputs, outputs, *, fused):
        super().__init__()
        self.fused, self.matrix = fused, nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.matrix) if self.fused else x @ self.matrix + self.bias


MODELS = {
    "biased": lambda: (nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)),
    "unbiased": lambda: (nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False)),
    "straight": lambda: (nn.Linear(8, 1),),
    "by hand": lambda: (Product(8, 6, fused=False), nn.Tanh(), Product(6, 1, fused=False)),
    "fused": lambda: (Product(8, 6, fused=True), nn.Tanh(), Product(6, 1, fused=True)),
    "tokens": lambda: (nn.Unflatten(1, (2, 4)), nn.Linear(4, 6, bias=False), nn.SiLU(), nn.Linear(6, 1)),
    "images": lambda: (nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.Tanh(), nn.ConvTranspose1d(4, 1, 1)),
    "recurrent": lambda: (nn.GRUCell(8, 6), nn.LayerNorm(6), nn.Linear(6, 1)),
}


@pytest.mark.parametrize("of", ["inputs", "weights"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_penalty_sends_back_enters_no_layer(kind, of):
    """Every tensor said to enter a layer is one that its call was given, in both orders of the terms."""
    torch.manual_seed(0)
    model = nn.Sequential(*MODELS[kind]())
    given = []
    for part in model:
        part.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    x = torch.randn(16, 8, requires_grad=of == "inputs")
    out = model(x)
    (*slopes,) = torch.autograd.grad(out.sum(), [x] if of == "inputs" else [*model.parameters()], create_graph=True)
    penalty = (torch.stack([slope.square().sum() for slope in slopes]).sum() - 1) ** 2
    loss = F.mse_loss(out.flatten(1)[:, 0], torch.randn(16))
    names = {id(p): name for name, part in model.named_modules() for p in part.parameters(recurse=False)}
    turned = {id(part.weight) for part in model if isinstance(part, nn.Linear)}
    roots = [loss + penalty, penalty + loss]
    if kind not in {"by hand", "fused"}:  # how their matrix is multiplied with data is not seen in a penalty alone
        roots.append(penalty)
    for root in roots:
        behind = [root.grad_fn, *(term.behind for term in terms_of(root)[0])]
        for layers in (layers_behind(node, names, turned, root.grad_fn) for node in behind):
            entered = [layer.entered for layer in layers.first if layer.entered is not None and layer.entered.any()]
            entered += [each for layer in layers.first for each in calls_of(layers, layer.name) if each.any()]
            assert all(
                any(one.numel() == e.numel() and e.flatten().equal(one.flatten()) for one in given) for e in entered
            )


@pytest.mark.parametrize("kind", ["by hand", "biased"])
def test_a_matrix_that_is_used_both_ways_is_entered_by_data(kind):
    """The decoder multiplies by the encoder's matrix the other way: what enters the encoder is still found."""
    part, x = MODELS[kind]()[0], torch.randn(16, 8)
    matrix = next(p for p in part.parameters() if p.dim() > 1)
    root = F.mse_loss(torch.tanh(part(x)) @ (matrix if matrix.shape[1] == 8 else matrix.T), x)
    turned = {id(matrix)} if isinstance(part, nn.Linear) else ()
    layers = layers_behind(terms_of(root)[0][0].behind, {id(matrix): "encoder"}, turned, root.grad_fn)
    assert layers.own
    assert layers.first[0].entered.equal(x)
