"""Training by Lightning and by the HF Trainer, which log to W&B on their own."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import wandb
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVERY = 5
"""Steps between two rows of the framework; what it does by default would be no row in a short run."""


class Net(nn.Module):
    """A model that both frameworks take; in the midst of training it ends the process, where that is asked for."""

    def __init__(self, last: int, end: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.last, self.end, self.calls = last, end, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.calls == self.last and self.end == "exception":
            raise RuntimeError("on purpose")
        if self.calls == self.last and self.end == "kill":
            wandb.run.step  # noqa: B018 - what was logged is with wandb-core now
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Ones(Dataset):
    """Inputs and labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(4), "labels": torch.ones(2)}


def lightning(net: Net, steps: int, folder: str) -> None:
    """Train with ``WandbLogger``."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import WandbLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.Trainer(
        max_epochs=1, logger=WandbLogger(save_dir=folder), log_every_n_steps=EVERY, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(Module(), DataLoader(Ones(steps * 2), batch_size=2))  # fmt: skip


def transformers(net: Net, steps: int, folder: str) -> None:
    """Train with ``report_to="wandb"``."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(Path(folder) / "hf"), per_device_train_batch_size=2, max_steps=steps, logging_steps=EVERY,
        report_to="wandb", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(net, arguments, train_dataset=Ones(steps * 2)).train()


TRAINERS: dict[str, Any] = {"Lightning": lightning, "HF": transformers}


def load() -> None:
    """Import the frameworks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch.loggers
        import transformers
        from transformers import Trainer, TrainingArguments  # noqa: F401 - imported on first use
        from transformers.integrations import WandbCallback  # noqa: F401 - imported on first use

        _ = lightning, transformers
