"""Pre-LN against Post-LN: how the gradient travels through twelve transformer blocks before any training."""

import torch
from torch import nn

from gradflow_export import GradientGainMonitor

for name, norm_first in {"Pre-LN": True, "Post-LN": False}.items():
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(
            64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        for _ in range(12)
    )
    hidden, target = torch.randn(8, 32, 64), torch.randn(8, 32, 64)

    with GradientGainMonitor(blocks) as monitor:
        for block in blocks:
            hidden = block(hidden)
        nn.functional.mse_loss(hidden, target).backward()
        stats = monitor.summary_stats()

    print(f"{name}: mean gain {stats['mean_gain']:.3f}, depth gain {sum(monitor.log_gains()):+.2f} (natural log)")
