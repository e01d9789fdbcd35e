"""Every snippet of the debugging guide runs as written, with the import changed; its JSON is matched key for key.

Where the body of an ``if`` is comments alone, which Python does not take, a ``pass`` follows them; names that a snippet
uses without an import are given to it.
"""

import ast
import asyncio
import inspect
import json
import math
import types
import urllib.request

import pytest
import torch
from torch import nn

from gradflow_export import (
    AsyncTrainingLogger,
    DebugLevel,
    DiffusionModelDebugger,
    PyTorchDebugger,
    TrainingDebugger,
    TrainingPhase,
)
from gradflow_export.debugging.service.api import create_app, serving

CONTEXT = """
from gradflow_export import PyTorchDebugger, debug_context

# Using context manager
with debug_context(DebugLevel.BASIC) as debugger:
    # Your training code here
    loss = model(inputs)
    loss.backward()
    optimizer.step()

# Using debugger directly
debugger = PyTorchDebugger(DebugLevel.ADVANCED)
with debugger.autograd_anomaly_detection():
    # Training code
    pass
"""

TRAINING = """
from gradflow_export import TrainingDebugger

# Initialize training debugger
debugger = TrainingDebugger(DebugLevel.ADVANCED)

# Monitor training steps
for step in range(num_steps):
    loss = model(inputs)
    loss.backward()

    # Monitor step for anomalies
    step_info = debugger.monitor_training_step(model, loss, step)

    optimizer.step()

# Get training summary
summary = debugger.get_training_summary()
print(f"Anomaly rate: {summary['anomaly_rate']:.2%}")
"""

DIFFUSION = """
from gradflow_export import DiffusionModelDebugger

# Initialize diffusion debugger
debugger = DiffusionModelDebugger(DebugLevel.BASIC)

# Analyze diffusion pipeline
pipeline_analysis = debugger.analyze_diffusion_pipeline(pipeline)
print(f"Total parameters: {pipeline_analysis['total_parameters']}")

# Monitor diffusion steps
for step in range(num_inference_steps):
    # Your diffusion step
    latents = pipeline.unet(latents, timestep, encoder_hidden_states)

    # Monitor step
    step_info = debugger.monitor_diffusion_step(pipeline, step, latents)
"""

TENSORS = """
from gradflow_export import PyTorchDebugger

debugger = PyTorchDebugger()

# Analyze individual tensor
tensor_info = debugger.analyze_tensor(my_tensor, "my_tensor")
print(f"Has NaN: {tensor_info.has_nan}")
print(f"Mean value: {tensor_info.mean_value}")

# Analyze model parameters
param_analysis = debugger.analyze_model_parameters(model)
for name, info in param_analysis.items():
    if info.has_nan:
        print(f"Parameter {name} has NaN values")
"""

GRADIENTS = """
# Analyze gradients
gradient_info = debugger.analyze_gradients(model)

# Check for gradient explosion
exploded_params = debugger.check_gradient_explosion(model, threshold=10.0)
if exploded_params:
    print(f"Gradient explosion in: {exploded_params}")

# Check for gradient vanishing
vanished_params = debugger.check_gradient_vanishing(model, threshold=1e-6)
if vanished_params:
    print(f"Gradient vanishing in: {vanished_params}")
"""

LOGGER = """
from gradflow_export import AsyncTrainingLogger

# Initialize logger with autograd debugging
logger = AsyncTrainingLogger(
    user_id=123,
    model_name="microsoft/DialoGPT-medium",
    enable_autograd_debug=True  # Enables PyTorch debugging
)

# Start training (autograd debugging automatically enabled)
logger.start_training(total_epochs=10, total_steps=1000)

# Check tensor anomalies during training
tensor_info = await logger.check_tensor_anomalies_async(loss_tensor, "loss")
if tensor_info["has_nan"]:
    logger.log_warning("Loss tensor contains NaN values")

# Check gradient anomalies
gradient_info = await logger.check_gradient_anomalies_async(model)
if gradient_info["params_with_nan_grad"] > 0:
    logger.log_warning("Model has parameters with NaN gradients")
"""

LOOP = '''
async def debug_training_loop(model, dataloader, optimizer, logger):
    """Training loop with comprehensive debugging."""

    for epoch in range(num_epochs):
        for step, batch in enumerate(dataloader):
            try:
                # Forward pass
                outputs = model(batch)
                loss = outputs.loss

                # Check loss tensor
                loss_info = await logger.check_tensor_anomalies_async(loss, "loss")
                if loss_info["has_nan"] or loss_info["has_inf"]:
                    logger.log_error(
                        ValueError("Loss contains NaN/Inf values"),
                        TrainingPhase.TRAINING,
                        {"epoch": epoch, "step": step, "loss_info": loss_info}
                    )
                    continue

                # Backward pass
                loss.backward()

                # Check gradients
                gradient_info = await logger.check_gradient_anomalies_async(model)
                if gradient_info["params_with_nan_grad"] > 0:
                    logger.log_warning(
                        f"Gradient anomalies detected at step {step}",
                        TrainingPhase.TRAINING
                    )

                # Update progress
                await logger.update_progress_async(
                    epoch=epoch,
                    step=step,
                    loss=loss.item(),
                    learning_rate=optimizer.param_groups[0]['lr']
                )

                optimizer.step()
                optimizer.zero_grad()

            except Exception as e:
                logger.log_error(e, TrainingPhase.TRAINING, {
                    "epoch": epoch,
                    "step": step
                })
                raise
'''

COMMON = {
    "NaN loss": """
# Problem: Loss becomes NaN
if torch.isnan(loss):
    # Check input data
    input_info = debugger.analyze_tensor(inputs, "model_inputs")

    # Check model parameters
    param_info = debugger.analyze_model_parameters(model)

    # Check learning rate
    if learning_rate > 1.0:
        logger.log_warning("Learning rate too high")
""",
    "explosion": """
# Problem: Gradients become very large
exploded_params = debugger.check_gradient_explosion(model, threshold=10.0)
if exploded_params:
    # Solutions:
    # 1. Reduce learning rate
    # 2. Apply gradient clipping
    # 3. Check input scaling
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
""",
    "vanishing": """
# Problem: Gradients become very small
vanished_params = debugger.check_gradient_vanishing(model, threshold=1e-6)
if vanished_params:
    # Solutions:
    # 1. Increase learning rate
    # 2. Use different activation functions
    # 3. Check weight initialization
    # 4. Use skip connections
    pass
""",
    "memory": """
# Problem: Out of memory errors
memory_profile = debugger.profile_memory_usage(model)
total_memory = memory_profile["total"]

if total_memory > available_memory:
    # Solutions:
    # 1. Reduce batch size
    # 2. Use gradient checkpointing
    # 3. Move to CPU if possible
    # 4. Use mixed precision training
    pass
""",
    "development": """
# Always enable debugging during development
logger = AsyncTrainingLogger(
    user_id=123,
    model_name="model_name",
    enable_autograd_debug=True
)
""",
    "critical tensors": """
# Monitor loss, gradients, and key tensors
await logger.check_tensor_anomalies_async(loss, "loss")
await logger.check_gradient_anomalies_async(model)
""",
    "thresholds": """
# Use reasonable thresholds for your model
exploded_params = debugger.check_gradient_explosion(model, threshold=10.0)
vanished_params = debugger.check_gradient_vanishing(model, threshold=1e-6)
""",
    "summary": """
# Check debug summary regularly
summary = debugger.get_debug_summary()
if summary["total_anomalies"] > threshold:
    logger.log_warning("High anomaly rate detected")
""",
    "clean up": """
# Clear debug history periodically
debugger.clear_debug_history()
""",
}


class Scalar(nn.Module):
    """A model that returns its loss, as the guide's does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs):
        """Return the loss."""
        return self.body(inputs).square().mean()


class Language(Scalar):
    """A model whose output has a loss."""

    def forward(self, batch):
        """Return an output."""
        return types.SimpleNamespace(loss=super().forward(batch))


class Denoiser(nn.Module):
    """A tiny UNet: down, middle with the time and the text, up with a skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.time, self.text = nn.Linear(1, 8), nn.Linear(6, 8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 4, 4, stride=2, padding=1)

    def forward(self, latents, timestep, encoder_hidden_states):
        """Return the noise that is left."""
        down = torch.relu(self.down(latents))
        told = self.time(timestep.reshape(1, 1).float()) + self.text(encoder_hidden_states).mean(1)
        middle = torch.relu(self.middle(down + told[:, :, None, None]))
        return self.up(torch.cat([down, middle], dim=1))


class Pipeline:
    """Modules among the attributes of an object that is no module."""

    def __init__(self):
        self.unet, self.vae = Denoiser(), nn.Conv2d(4, 3, 1)
        self.text_encoder = nn.Embedding(10, 6)
        self.scheduler = object()


def run(source, **names):
    """Run a snippet, with ``await`` at its top where it has one, and return its names."""
    code = compile(source, "guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"DebugLevel": DebugLevel, "TrainingPhase": TrainingPhase, "torch": torch, **names}

    async def within():
        done = types.FunctionType(code, names)()
        if inspect.isawaitable(done):
            await done

    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(within())
    else:
        exec(code, names)
    return names


@pytest.fixture
def parts():
    """A model that returns its loss, its optimizer, and inputs."""
    torch.manual_seed(0)
    model = Scalar()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "inputs": torch.randn(16, 4)}


def test_the_context_looks_at_what_the_optimizer_uses(parts):
    """The first snippet runs, and a NaN inside the block is remembered."""
    names = run(CONTEXT, **parts)
    assert names["debugger"].level is DebugLevel.ADVANCED
    from gradflow_export import debug_context

    with debug_context(DebugLevel.BASIC) as debugger:
        (parts["model"](parts["inputs"]) * math.nan).backward()
        parts["optimizer"].step()
    assert debugger.get_debug_summary() == {"total_anomalies": 1, "debug_history_length": 1}
    assert debugger.history.entries[0].anomalies[0].startswith("NaN or Inf: ")


def test_the_training_debugger_counts(parts, capsys):
    """A healthy run has no anomalies and is printed as the guide does."""
    names = run(TRAINING, num_steps=5, **parts)
    assert capsys.readouterr().out == "Anomaly rate: 0.00%\n"
    assert names["step_info"]["step"] == 4
    assert set(names["step_info"]["parameters"]) == {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}


def test_the_diffusion_debugger_follows_latents(capsys):
    """A pipeline of three modules is counted, and its latents are looked at after each step."""
    torch.manual_seed(0)
    pipeline = Pipeline()
    with torch.no_grad():
        names = run(
            DIFFUSION,
            pipeline=pipeline,
            num_inference_steps=4,
            latents=torch.randn(2, 4, 8, 8),
            timestep=torch.tensor(3),
            encoder_hidden_states=torch.randn(2, 5, 6),
        )
    count = sum(p.numel() for m in (pipeline.unet, pipeline.vae, pipeline.text_encoder) for p in m.parameters())
    assert capsys.readouterr().out == f"Total parameters: {count}\n"
    assert set(names["pipeline_analysis"]["components"]) == {"unet", "vae", "text_encoder"}
    assert names["step_info"]["latents"].shape == (2, 4, 8, 8)
    assert names["debugger"].get_debug_summary() == {"total_anomalies": 0, "debug_history_length": 5}


def test_tensors_and_gradients_are_analysed(parts, capsys):
    """Mean and NaN are printed, and thresholds name parameters."""
    with torch.no_grad():
        parts["model"].body[0].weight[0, 0] = math.nan
    names = run(TENSORS, my_tensor=torch.tensor([1.0, 2.0, 3.0]), **parts)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["Has NaN: False", "Mean value: 2.0", "Parameter body.0.weight has NaN values"]
    for p in parts["model"].parameters():
        p.grad = torch.full_like(p, 100.0)
    parts["model"].body[2].bias.grad.fill_(1e-9)
    found = run(GRADIENTS, debugger=names["debugger"], **parts)
    assert found["exploded_params"] == ["body.0.weight", "body.0.bias", "body.2.weight"]
    assert found["vanished_params"] == ["body.2.bias"]
    assert set(found["gradient_info"]) == {name for name, _ in parts["model"].named_parameters()}


def test_the_async_logger_checks_and_warns(parts):
    """A NaN in the loss and in the gradients is warned of; anomaly mode lasts as long as the training."""
    for p in parts["model"].parameters():
        p.grad = torch.full_like(p, math.nan)
    names = run(LOGGER, loss_tensor=torch.tensor(math.nan), **parts)
    logger = names["logger"]
    assert torch.is_anomaly_enabled()
    logger.end_training()
    assert not torch.is_anomaly_enabled()
    assert names["gradient_info"]["params_with_nan_grad"] == 4
    messages = [event["message"] for event in logger.get_training_summary()["events"] if event["level"] == "warning"]
    assert messages == ["Loss tensor contains NaN values", "Model has parameters with NaN gradients"]


def test_the_async_loop_trains_and_skips_a_broken_batch():
    """The custom loop runs to the end; the broken batch is logged as an error and left out."""
    torch.manual_seed(0)
    model = Language()
    batches = [torch.randn(8, 4), torch.full((8, 4), math.inf), torch.randn(8, 4)]
    logger = AsyncTrainingLogger(user_id=1, model_name="language")
    logger.start_training(total_epochs=2, total_steps=6)
    loop = run(LOOP, num_epochs=2)["debug_training_loop"]
    asyncio.run(loop(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), logger))
    logger.end_training()
    summary = logger.get_training_summary()
    assert summary["phase"] == "completed"
    assert summary["progress"]["steps_done"] == 4
    assert summary["errors"] == 2
    assert summary["events"][1]["context"]["loss_info"]["has_nan"] is True
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_async_loop_logs_what_it_raises():
    """An error in the model is logged and raised."""
    logger = AsyncTrainingLogger(user_id=1, model_name="language")
    loop = run(LOOP, num_epochs=1)["debug_training_loop"]
    model = Language()
    with pytest.raises(RuntimeError, match="shapes"):
        asyncio.run(loop(model, [torch.randn(8, 5)], torch.optim.SGD(model.parameters(), lr=0.1), logger))
    logger.end_training(TrainingPhase.FAILED)
    assert logger.get_training_summary()["errors"] == 1


@pytest.mark.parametrize("title", sorted(COMMON))
def test_a_common_problem_is_answered_as_written(title, parts):
    """Each snippet of the guide's later parts runs, with a debugger of any kind."""
    parts["model"](parts["inputs"]).backward()
    for debugger in (PyTorchDebugger(), TrainingDebugger(DebugLevel.EXTREME)):
        with AsyncTrainingLogger(user_id=1, model_name="m") as logger:
            names = {
                "debugger": debugger,
                "logger": logger,
                "loss": torch.tensor(math.nan),
                "learning_rate": 2.0,
                "available_memory": 10,
                "threshold": -1,
                "AsyncTrainingLogger": AsyncTrainingLogger,
            }
            run(COMMON[title], **{**names, **parts})
    warned = [event["message"] for event in logger.get_training_summary()["events"] if event["level"] == "warning"]
    told = {"NaN loss": ["Learning rate too high"], "summary": ["High anomaly rate detected"]}
    assert warned == told.get(title, [])
    if title == "memory":
        held = sum(p.numel() for p in parts["model"].parameters()) * 4
        assert debugger.profile_memory_usage(parts["model"])["total"] == 2 * held


def test_the_training_summary_is_matched_key_for_key(parts):
    """Counts over a thousand steps give the rates of the guide."""
    debugger = TrainingDebugger()
    model = parts["model"]
    model(parts["inputs"]).backward()
    healthy = {name: p.grad.clone() for name, p in model.named_parameters()}
    for step in range(1000):
        for name, p in model.named_parameters():
            p.grad.copy_(healthy[name])
        if step in {10, 20}:
            model.body[0].weight.grad.fill_(50.0)
        if step == 30:
            for p in model.parameters():
                p.grad.fill_(1e-12)
        debugger.monitor_training_step(model, math.nan if step in {30, 40, 50} else 0.5, step)
    assert json.loads(json.dumps(debugger.get_training_summary())) == {
        "total_steps": 1000,
        "anomaly_steps": 5,
        "gradient_explosions": 2,
        "gradient_vanishing": 1,
        "loss_anomalies": 3,
        "anomaly_rate": 0.005,
        "loss_anomaly_rate": 0.003,
        "gradient_explosion_rate": 0.002,
        "gradient_vanishing_rate": 0.001,
    }
    assert debugger.get_debug_summary() == {
        "total_anomalies": 5,
        "debug_history_length": 100,
        "total_steps": 1000,
        "anomaly_rate": 0.005,
        "gradient_explosion_rate": 0.002,
    }


SUMMARY = """
{
  "training_debugger": {
    "total_anomalies": 5,
    "debug_history_length": 100,
    "total_steps": 1000,
    "anomaly_rate": 0.005,
    "gradient_explosion_rate": 0.002
  },
  "diffusion_debugger": {
    "total_anomalies": 2,
    "debug_history_length": 50
  },
  "general_debugger": {
    "total_anomalies": 3,
    "debug_history_length": 75
  }
}
"""


def test_the_four_requests_of_the_guide_are_answered_over_http(parts):
    """The debug summary is the guide's own JSON; level and history change by POST with the token."""
    model = parts["model"]
    model(parts["inputs"]).backward()
    training, diffusion, general = TrainingDebugger(), DiffusionModelDebugger(), PyTorchDebugger()
    for step in range(1000):
        if step in {10, 20}:
            model.body[0].weight.grad.fill_(50.0)
        elif step in {11, 21}:
            model.body[0].weight.grad.fill_(0.1)
        training.monitor_training_step(model, math.nan if step in {30, 40, 50} else 0.5, step)
    for step in range(50):
        diffusion.monitor_diffusion_step(model, step, torch.randn(4, 4) * (math.nan if step in {7, 8} else 1.0))
    for number in range(75):
        general.analyze_tensor(torch.tensor([math.inf if number < 3 else 1.0]), "x")
    app = create_app(training, diffusion, general, token="a-token-of-some-length")
    with serving(app, port=0) as address:

        def request(method, path):
            asked = urllib.request.Request(f"{address}{path}", method=method)
            asked.add_header("Authorization", "Bearer a-token-of-some-length")
            with urllib.request.urlopen(asked) as answer:
                return json.loads(answer.read())

        assert request("GET", "/training-logs/debug/summary") == json.loads(SUMMARY)
        counts = request("GET", "/training-logs/debug/training/summary")
        assert (counts["total_steps"], counts["anomaly_steps"], counts["gradient_explosions"]) == (1000, 5, 2)
        assert request("POST", "/training-logs/debug/level/advanced") == {"level": "advanced"}
        assert training.level is diffusion.level is general.level is DebugLevel.ADVANCED
        request("POST", "/training-logs/debug/clear")
        assert request("GET", "/training-logs/debug/summary")["training_debugger"]["total_steps"] == 0
