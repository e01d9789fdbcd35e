"""The five-minute tutorial: a network that does not learn, the reason, and the fix."""

import torch
from torch import nn

from gradflow_export import Exporter

torch.manual_seed(0)
points = torch.randn(512, 16)
labels = (points[:, 0] * points[:, 1] > 0).long()


class Residual(nn.Module):
    """x + block(norm(x)): the skip connection passes the gradient around every block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def train(name, blocks):
    torch.manual_seed(1)
    model = nn.Sequential(*blocks, nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with Exporter(model, logdir=f"runs/{name}").watch():
        for _epoch in range(40):
            for rows in torch.randperm(512).split(64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(points[rows]), labels[rows])
                loss.backward()
                optimizer.step()
    accuracy = (model(points).argmax(1) == labels).float().mean()
    print(f"{name}: accuracy {accuracy:.0%}")


train("sick", [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)])
train("mended", [Residual(16) for _ in range(12)])
