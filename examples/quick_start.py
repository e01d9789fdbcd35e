"""Watch a training run: one line before the loop, two after it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradflow_export import Exporter

torch.manual_seed(0)
data = load_digits()
pixels = torch.tensor(data.data / 8 - 1, dtype=torch.float32)
digits = torch.tensor(data.target)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()

exporter = Exporter(model).watch(criterion)

for _epoch in range(5):
    for rows in torch.randperm(len(digits)).split(64):
        optimizer.zero_grad()
        loss = criterion(model(pixels[rows]), digits[rows])
        loss.backward()
        optimizer.step()

exporter.close()
exporter.print_report()
