"""A network with a layer that no optimizer has, and a loss that takes logits and is given probabilities.

Run in an empty folder with the release before evidence had a channel of its own, this wrote the files beside it.
"""

import torch
from torch import nn

from gradflow_export import Exporter, JsonlWriter, TensorBoardWriter

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(1))
optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], 0.1)
with Exporter(model, backends=[TensorBoardWriter("run"), JsonlWriter("run")], synchronous=True).watch() as exporter:
    for step in range(60):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        if step == 20:
            exporter.mark("a mark")
