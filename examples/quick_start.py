"""Twelve layers with a sigmoid each: the loss does not fall, and two lines of code find out why."""

import torch
from torch import nn

from gradflow_export import Exporter

torch.manual_seed(0)
points = torch.randn(512, 16)
labels = (points[:, 0] * points[:, 1] > 0).long()

hidden = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)]
model = nn.Sequential(*hidden, nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

exporter = Exporter(model).watch()

for _epoch in range(20):
    for rows in torch.randperm(512).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points[rows]), labels[rows])
        loss.backward()
        optimizer.step()

exporter.close()
