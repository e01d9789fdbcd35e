"""Keep NaN out of the weights: batches that hold one leave no trace, and where they began is reported."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradflow_export import (
    GradientClippingConfig,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
    check_gradients,
)

torch.manual_seed(0)
data = load_digits()
pixels, digits = torch.tensor(data.data / 8 - 1, dtype=torch.float32), torch.tensor(data.target)
pixels[700, 3] = float("nan")

model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
print(check_gradients(model, pixels[:8], loss=lambda scores: criterion(scores, digits[:8])))

with NumericalStabilityManager(
    GradientClippingConfig(max_norm=1.0),
    NaNHandlingConfig(policy="skip"),
    PyTorchDebuggingConfig(enable_autograd_anomaly=True),
).watch(model) as manager:
    for rows in torch.randperm(len(digits)).split(64):
        loss = criterion(model(pixels[rows]), digits[rows])
        loss.backward()
        result = manager.step(model, loss, optimizer)
        for anomaly in result["anomalies"]:
            print(f"{anomaly['message']}; it begins {anomaly['origin']}")
        optimizer.step()  # changes nothing where result["update_prevented"]
        optimizer.zero_grad()

print("updates prevented:", manager.get_debug_summary()["updates_prevented"])
