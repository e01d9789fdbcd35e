"""One backward pass under the gain monitor: how much each block grows or shrinks the gradient."""

import torch
from torch import nn

from gradflow_export import GradientGainMonitor

torch.manual_seed(0)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(8))

with GradientGainMonitor(blocks) as monitor:
    hidden = torch.randn(32, 64)
    for block in blocks:
        hidden = block(hidden)
    hidden.square().mean().backward()

    print(monitor.report())
    print("damping transitions:", monitor.summary_stats()["num_damping"])
