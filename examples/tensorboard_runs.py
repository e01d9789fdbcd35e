"""Two runs side by side in TensorBoard: one network with ReLU, and one whose sigmoids make the gradient vanish."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradflow_export import Exporter

data = load_digits()
pixels = torch.tensor(data.data / 8 - 1, dtype=torch.float32)
digits = torch.tensor(data.target)

for name, activation in {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}.items():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), activation()) for _ in range(10)))
    model = nn.Sequential(blocks, nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    with Exporter(model, backends=["tensorboard"], logdir=f"runs/{name}").watch(criterion, blocks=blocks) as exporter:
        for _epoch in range(4):
            for rows in torch.randperm(len(digits)).split(64):
                optimizer.zero_grad()
                criterion(model(pixels[rows]), digits[rows]).backward()
                optimizer.step()

    print(name, [str(issue) for issue in exporter.issues] or "no issues")

print("Now run: tensorboard --logdir runs, and open http://localhost:6006/#gradflow")
