"""Read thresholds from the ``diagnostics:`` section of a file; an unknown key raises and suggests the nearest."""

from pathlib import Path

import torch
from torch import nn

from gradflow_export import Exporter

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.MSELoss()

config = Path(__file__).with_name("diagnostics.yaml")
with Exporter(model, backends=["memory"], config=config).watch(criterion) as exporter:
    for step in range(60):
        inputs = torch.randn(32, 16) * (1000.0 if step == 40 else 1.0)  # one corrupt batch
        optimizer.zero_grad()
        criterion(model(inputs), inputs).backward()
        optimizer.step()

for issue in exporter.issues:
    print(issue)
