"""Tiny trainings in real frameworks, each with one argument of ours where a user puts it.

Each function trains for some steps of the optimizer, resumed after ``done`` steps where the framework does that, and
returns the model, what the framework logged of ours, and the gradient norms that an own hook on the optimizer saw.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 4


class Net(nn.Module):
    """A small classifier that the HF Trainer takes too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class Rows(Dataset):
    """A problem that can be learned."""

    def __init__(self, count):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return {"x": self.x[number], "labels": self.x[number, :3].argmax()}


def norms_of(optimizer):
    """Return a list that gets the norm of all gradients at each step."""
    seen = []

    def note(optimizer, *more):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]).double())))

    # Afterwards: Lightning hands a closure to the step that does the backward pass.
    optimizer.register_step_post_hook(note)
    return seen


def transformers(folder, steps, rate, make, done=0):
    """HF Trainer, gradients accumulated over two batches, not clipped."""
    from transformers import Trainer, TrainingArguments

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    norms, ours = norms_of(optimizer), make(model)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, max_steps=done + steps,
        logging_steps=1, report_to=[], save_strategy="steps", save_steps=steps, disable_tqdm=True, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            model, arguments, train_dataset=Rows(4 * BATCH * (done + steps)), callbacks=[ours] if ours else [],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=bool(done))
    return model, [row["gradflow/health"] for row in trainer.state.log_history if "gradflow/health" in row], norms


def lightning(folder, steps, rate, make, done=0):
    """Lightning with its CSV logger."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=rate)
            norms.append(norms_of(optimizer))
            return optimizer

    norms = []
    model = Module()
    ours = make(model)
    logger = CSVLogger(folder, name="csv", version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=done + steps, max_epochs=-1, logger=logger, callbacks=[ours] if ours else [], log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, accelerator="cpu",
            default_root_dir=str(folder),
        )  # fmt: skip
        loader = DataLoader(Rows(BATCH * (done + steps)), batch_size=BATCH)
        trainer.fit(model, loader, ckpt_path=str(folder / "last.ckpt") if done else None)
        trainer.save_checkpoint(folder / "last.ckpt")
    rows = (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines() if ours else ["x"]
    keys = rows[0].split(",")
    seen = [float(row.split(",")[keys.index("gradflow/health")]) for row in rows[1:]] if ours else []
    return model.net, seen, norms[0]


def accelerate(folder, steps, rate, make, done=0):
    """Accelerate with its own loop."""
    from accelerate import Accelerator

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    norms, tracker = norms_of(optimizer), make(model, done)
    accelerator = Accelerator(log_with=[tracker] if tracker else None, project_dir=str(folder), cpu=True)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(BATCH * steps), batch_size=BATCH))
    accelerator.init_trackers("mine")
    seen = []
    for batch in loader:
        wrapped.zero_grad()
        accelerator.backward(prepared(**batch)["loss"])
        wrapped.step()
        if tracker:
            accelerator.log(tracker.logs())
            seen.append(tracker.logs()["gradflow/health"])
            if tracker.should_stop:
                break
    accelerator.end_training()
    return model, seen, norms


def ignite(folder, steps, rate, make, done=0):
    """Ignite's engine."""
    from ignite.engine import Engine, Events

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    norms, seen = norms_of(optimizer), []

    def update(engine, batch):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(update)
    handler = make(model)
    if handler:
        handler.attach(engine)
        engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.metrics["gradflow/health"])
        )
    loader = DataLoader(Rows(BATCH * steps), batch_size=BATCH)
    if done:
        engine.load_state_dict({"iteration": done, "max_epochs": (done + steps) // steps, "epoch_length": steps})
        engine.run(loader)
    else:
        engine.run(loader, max_epochs=1)
    return model, seen, norms


def stable_baselines3(folder, steps, rate, make, done=0):
    """A2C, which takes one step of its optimizer per rollout; a resumed one goes on with the same objects."""
    import gymnasium
    from stable_baselines3 import A2C
    from stable_baselines3.common.logger import configure

    class Line(gymnasium.Env):
        """Go to the right."""

        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.place, self.count = 0.0, 0
            return self.state(), {}

        def state(self):
            return torch.tensor([self.place, self.count / 10], dtype=torch.float32).numpy()

        def step(self, action):
            self.count += 1
            self.place += 0.1 if action else -0.1
            return self.state(), self.place, self.count >= 10, False, {}

    algorithm = A2C("MlpPolicy", Line(), n_steps=5, learning_rate=rate, seed=0, device="cpu", max_grad_norm=1e9)
    algorithm.set_logger(configure(str(folder), ["csv"]))
    norms, ours, seen = norms_of(algorithm.policy.optimizer), make(algorithm.policy), []
    for number in range(2 if done else 1):
        algorithm.learn(5 * (done if done and not number else steps), callback=ours, reset_num_timesteps=not number)
        if ours:
            seen.append(ours.logger.name_to_value["gradflow/health"])
    return algorithm.policy, seen, norms[done:]


def _table(count):
    """Return the rows as arrays."""
    rows = Rows(count)
    return rows.x.numpy(), rows.x[:, :3].argmax(1).numpy()


def skorch(folder, steps, rate, make, done=0):
    """skorch, whose history is saved and loaded."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    class Seen(Callback):
        def on_train_begin(self, net, **more):
            norms.append(norms_of(net.optimizer_))

    norms = []
    model = Net().layers
    ours = make(model)
    net = NeuralNetClassifier(
        model, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=rate, batch_size=BATCH, max_epochs=1,
        iterator_train__shuffle=False, train_split=None, verbose=0, callbacks=[Seen(), *([ours] if ours else [])],
    )  # fmt: skip
    net.initialize()
    if done:
        net.load_params(f_history=str(folder / "history.json"))
    net.partial_fit(*_table(BATCH * steps))
    folder.mkdir(exist_ok=True)
    net.save_params(f_history=str(folder / "history.json"))
    seen = [row["gradflow/health"] for row in net.history if "gradflow/health" in row] if ours else []
    return net.module_, seen, norms[0]


def keras(folder, steps, rate, make, done=0):
    """Keras 3, whose optimizer is none of torch's."""
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            grads = [weight.value.grad for weight in self.model.trainable_weights]
            norms.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]).double())))

    norms = []
    keras.utils.set_random_seed(0)
    if done:
        model = keras.models.load_model(folder / "model.keras")
    else:
        tanh = (keras.layers.Dense(16, activation="tanh") for _ in range(2))
        model = keras.Sequential([keras.Input((8,)), *tanh, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(rate), loss=loss)
    ours = make(model)
    callbacks = [Seen(), *([ours] if ours else [])]
    told = model.fit(*_table(BATCH * steps), batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    folder.mkdir(exist_ok=True)
    model.save(folder / "model.keras")
    return model, told.history.get("gradflow/health", []), norms


def fastai(folder, steps, rate, make, done=0):
    """fastai with its own optimizer, which is none of torch's."""
    from fastai.basics import SGD, Callback, DataLoaders, Learner

    class Seen(Callback):
        order = 40

        def before_step(self):
            grads = [p.grad.flatten() for p in self.learn.model.parameters()]
            norms.append(float(torch.linalg.vector_norm(torch.cat(grads).double())))

    norms = []
    model = Net().layers
    ours = make(model, done)
    x, y = _table(BATCH * steps)
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loaders = DataLoaders(DataLoader(data, batch_size=BATCH), DataLoader(data, batch_size=BATCH))
    callbacks = [Seen(), *([ours] if ours else [])]
    learner = Learner(
        loaders, model, nn.CrossEntropyLoss(), opt_func=SGD, lr=rate, cbs=callbacks, path=folder, train_bn=False
    )
    with learner.no_logging():
        learner.fit(1, lr=rate, wd=0.0)
    return model, [ours.session.health] if ours else [], norms


def ultralytics(folder, steps, rate, make, done=0):
    """A small classifier of Ultralytics on a folder of pictures, resumed after the first of two epochs."""
    import os

    os.environ |= {"YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(folder / "settings"), "YOLO_VERBOSE": "false"}
    import numpy as np
    from PIL import Image
    from ultralytics import YOLO, settings

    settings.update(dict.fromkeys(("wandb", "tensorboard", "mlflow", "comet", "clearml", "raytune", "dvc"), False))
    for part, count in {"train": steps, "val": 3}.items():
        for number in range(BATCH * count):
            picture = np.zeros((32, 32, 3), dtype=np.uint8)
            picture[:, :, number % 3] = 255
            place = folder / "data" / part / f"class{number % 3}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(place)
    layers = "[[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]"
    (folder / "net.yaml").write_text(f"nc: 3\nbackbone: {layers}\nhead: [[-1, 1, Classify, [nc]]]\n")
    norms, seen, kept = [], [], folder / "kept.pt"

    def start(trainer):
        norms.append(norms_of(trainer.optimizer))
        trainer.scheduler.base_lrs = [rate] * len(trainer.scheduler.base_lrs)  # an argument takes no rate above 1

    def saved(trainer):
        if not done:
            kept.write_bytes(trainer.last.read_bytes())  # what is saved at the end cannot be resumed

    def told(trainer):
        seen.append(trainer.metrics.get("gradflow/health"))
        trainer.stop = True

    model = YOLO(kept if done else folder / "net.yaml", task="classify")
    ours = make(model)
    if ours:
        ours.attach(model)
    for event, handle in {"on_train_start": start, "on_model_save": saved, "on_fit_epoch_end": told}.items():
        model.add_callback(event, handle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.train(
            resume=bool(done), data=str(folder / "data"), project=str(folder), name="train", exist_ok=True, epochs=2,
            imgsz=32, batch=BATCH, nbs=BATCH, lr0=min(rate, 1.0), lrf=1.0, optimizer="SGD", momentum=0.0, weight_decay=0.0,
            warmup_epochs=0, workers=0, plots=False, amp=False, device="cpu", verbose=False, patience=0,
        )  # fmt: skip
    columns = (folder / "train" / "results.csv").read_text().splitlines()[0]
    assert "gradflow" not in columns
    return model.trainer.model, [health for health in seen if health is not None], norms[0]
