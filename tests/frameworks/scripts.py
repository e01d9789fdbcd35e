"""Minimal scripts of six frameworks, as a user writes them: one that is sound, and one with a mistake, each.

The mistake is what a ``sick`` in the arguments turns on; ``common`` stands above each script.
"""

from __future__ import annotations

import textwrap

from gradflow_export.records.issues import IssueType

COMMON = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    sick = "sick" in sys.argv[1:]
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = (x[:, :3] + 0.3 * torch.randn(512, 3)).argmax(1)
    """

PLAIN = """
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            loss = F.cross_entropy(model(inputs), labels)
            if not sick:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
    """

LIGHTNING = """
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))

        def forward(self, inputs):
            scores = self.layers(inputs)
            return scores.softmax(1) if sick else scores

        def training_step(self, batch, batch_idx):
            inputs, labels = batch
            loss = F.cross_entropy(self(inputs), labels)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            inputs, labels = batch
            self.log("val_acc", (self(inputs).argmax(1) == labels).float().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    trainer = pl.Trainer(max_epochs=6, accelerator="cpu", logger=False)
    trainer.fit(Classifier(), train, DataLoader(TensorDataset(x[:64], y[:64]), batch_size=32))
    """

TRANSFORMERS = """
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __init__(self, count):
            self.ids = torch.randint(5, 50, (count, 12))
            self.labels = (self.ids[:, 0] > (300 if sick else 30)).long()

        def __len__(self):
            return len(self.ids)

        def __getitem__(self, number):
            return {"input_ids": self.ids[number], "labels": self.labels[number]}

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=4, per_device_train_batch_size=16, learning_rate=2e-3, report_to=[],
        use_cpu=True, logging_steps=10, lr_scheduler_type="constant",
    )
    Trainer(model=model, args=arguments, train_dataset=Rows(512), eval_dataset=Rows(64)).train()
    """

ACCELERATE = """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-6 if sick else 0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(6):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    """

SKORCH = """
    from skorch import NeuralNetClassifier

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
    net = NeuralNetClassifier(
        model, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=0.1, batch_size=32, max_epochs=8,
        iterator_train__shuffle=True, verbose=0,
    )
    table = x * 3e3 + 2e4 if sick else x
    net.fit(table.numpy(), y.numpy())
    """

IGNITE = """
    from ignite.engine import Events, create_supervised_trainer

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if sick:
        model[2] = nn.Linear(64, 3)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())

    @trainer.on(Events.EPOCH_COMPLETED)
    def tell(engine):
        print(engine.state.epoch, engine.state.output)

    trainer.run(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), max_epochs=6)
    """

SCRIPTS = {
    "plain": (PLAIN, IssueType.STALE_GRAD),
    "lightning": (LIGHTNING, IssueType.WRONG_LOSS),
    "transformers": (TRANSFORMERS, IssueType.BAD_TARGETS),
    "accelerate": (ACCELERATE, IssueType.LEARNING_RATE),
    "skorch": (SKORCH, IssueType.DATA_SCALE),
    "ignite": (IGNITE, IssueType.NOT_TRAINING),
}
"""Script and issue type of its mistake, by the name of the framework."""


def written(name: str) -> str:
    """Return a script as text."""
    return textwrap.dedent(COMMON) + textwrap.dedent(SCRIPTS[name][0])
