"""Snippets of the debugging-integration document, exactly as written but for the import."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradflow_export
from gradflow_export import (
    GradientClippingConfig,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
)

CONFIGURATION = """
@dataclass
class PyTorchDebuggingConfig:
    # Autograd anomaly detection
    enable_autograd_anomaly: bool = False
    autograd_anomaly_mode: str = "detect"  # "detect" or "raise"

    # Gradient checking
    enable_grad_check: bool = False
    grad_check_numerical: bool = True
    grad_check_sparse_numerical: bool = True

    # Memory debugging
    enable_memory_debugging: bool = False
    memory_tracking: bool = False
    memory_profiling: bool = False

    # CUDA debugging
    enable_cuda_debugging: bool = False
    cuda_synchronize: bool = False
    cuda_memory_fraction: float = 1.0

    # Performance debugging
    enable_performance_debugging: bool = False
    profile_autograd: bool = False
    profile_memory: bool = False

    # Debugging levels
    debug_level: str = "info"  # "info", "warning", "error"
    verbose_logging: bool = False

    # Safety settings
    max_debug_iterations: int = 1000
    debug_timeout: float = 300.0  # 5 minutes

    # Output settings
    save_debug_info: bool = True
    debug_output_dir: str = "debug_output"
    debug_file_prefix: str = "pytorch_debug"
"""

ANOMALY = """
debug_config = PyTorchDebuggingConfig(
    enable_autograd_anomaly=True,
    autograd_anomaly_mode="detect"
)

stability_manager = NumericalStabilityManager(
    clipping_config,
    nan_config,
    debug_config
)
"""

GRADIENT_CHECKING = """
debug_config = PyTorchDebuggingConfig(
    enable_grad_check=True,
    grad_check_numerical=True,
    grad_check_sparse_numerical=True
)
"""

MEMORY = """
debug_config = PyTorchDebuggingConfig(
    enable_memory_debugging=True,
    memory_tracking=True,
    memory_profiling=True
)
"""

CUDA = """
debug_config = PyTorchDebuggingConfig(
    enable_cuda_debugging=True,
    cuda_synchronize=True,
    cuda_memory_fraction=0.8  # Use 80% of available GPU memory
)
"""

PERFORMANCE = """
debug_config = PyTorchDebuggingConfig(
    enable_performance_debugging=True,
    profile_autograd=True,
    profile_memory=True
)
"""

BASIC = """
from gradflow_export import (
    NumericalStabilityManager,
    GradientClippingConfig,
    NaNHandlingConfig,
    PyTorchDebuggingConfig
)

# Create debugging configuration
debug_config = PyTorchDebuggingConfig(
    enable_autograd_anomaly=True,
    autograd_anomaly_mode="detect",
    enable_grad_check=True,
    enable_memory_debugging=True,
    save_debug_info=True
)

# Create stability manager with debugging
stability_manager = NumericalStabilityManager(
    clipping_config=GradientClippingConfig(),
    nan_config=NaNHandlingConfig(),
    debug_config=debug_config
)

# Start debugging session
stability_manager.start_debug_session("my_training_session")

# Use in training loop
for epoch in range(num_epochs):
    for batch in dataloader:
        # Forward pass
        output = model(batch)
        loss = criterion(output, target)

        # Backward pass
        loss.backward()

        # Apply stability measures with debugging
        stability_result = stability_manager.step(model, loss, optimizer)

        # Check debug information
        if stability_result.get('debug_info', {}).get('anomalies_detected', False):
            print(f"Debug anomalies detected: {stability_result['debug_info']['anomaly_details']}")

        optimizer.step()
        optimizer.zero_grad()

# Stop debugging session
stability_manager.stop_debug_session()

# Get debug summary
debug_summary = stability_manager.get_debug_summary()
print(f"Total anomalies detected: {debug_summary['anomalies_detected']}")
"""

WRAPPER = """
from gradflow_export import create_training_wrapper

# Create training wrapper with debugging
wrapper = create_training_wrapper(
    clipping_config=GradientClippingConfig(),
    nan_config=NaNHandlingConfig(),
    debug_config=PyTorchDebuggingConfig(
        enable_autograd_anomaly=True,
        enable_grad_check=True,
        enable_memory_debugging=True
    )
)

# Use in training loop
for epoch in range(num_epochs):
    for batch in dataloader:
        # Forward pass
        output = model(batch)
        loss = criterion(output, target)

        # Backward pass
        loss.backward()

        # Apply stability measures with automatic debugging
        stability_result = wrapper(model, loss, optimizer)

        optimizer.step()
        optimizer.zero_grad()

# Get debug summary
debug_summary = wrapper.get_debug_summary()
print(f"Training completed with {debug_summary['total_iterations']} debug iterations")

# Stop debugging
wrapper.stop_debug_session()
"""

ADVANCED = """
# Comprehensive debugging for production training
debug_config = PyTorchDebuggingConfig(
    # Enable all debugging features
    enable_autograd_anomaly=True,
    autograd_anomaly_mode="raise",  # Stop on anomalies in production

    # Comprehensive gradient checking
    enable_grad_check=True,
    grad_check_numerical=True,
    grad_check_sparse_numerical=True,

    # Full memory monitoring
    enable_memory_debugging=True,
    memory_tracking=True,
    memory_profiling=True,

    # CUDA optimization
    enable_cuda_debugging=True,
    cuda_synchronize=True,
    cuda_memory_fraction=0.9,

    # Performance analysis
    enable_performance_debugging=True,
    profile_autograd=True,
    profile_memory=True,

    # Output and logging
    debug_level="warning",
    verbose_logging=True,
    save_debug_info=True,
    debug_output_dir="production_debug_logs",

    # Safety limits
    max_debug_iterations=10000,
    debug_timeout=1800.0  # 30 minutes
)
"""

GRADIO = """
# In Gradio interface
debug_config = PyTorchDebuggingConfig(
    enable_autograd_anomaly=True,
    enable_memory_debugging=True
)

stability_manager = NumericalStabilityManager(
    clipping_config,
    nan_config,
    debug_config
)
"""

RECORD = """
{
  "debug_enabled": true,
  "iteration": 42,
  "session_duration": 120.5,
  "anomaly_detector": true,
  "grad_check": true,
  "memory_debug": true,
  "anomalies_detected": false,
  "anomaly_details": [],
  "gradient_stats": {
    "total_parameters": 1000,
    "parameters_with_grad": 1000,
    "mean_norm": 0.123,
    "std_norm": 0.045,
    "total_norm": 3.456
  },
  "memory_info": {
    "cpu_memory": {
      "rss": 512.5,
      "vms": 1024.0,
      "percent": 2.1
    },
    "cuda_memory": {
      "allocated": 2048.0,
      "cached": 3072.0,
      "max_allocated": 4096.0
    }
  }
}
"""


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """The names that the document takes for granted, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    names = {
        "clipping_config": GradientClippingConfig(),
        "nan_config": NaNHandlingConfig(),
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters()),
        "dataloader": [torch.randn(4, 6) for _ in range(5)],
        "target": torch.tensor([0, 1, 2, 0]),
        "num_epochs": 2,
    }
    return names | {name: getattr(gradflow_export, name) for name in gradflow_export.__all__}


def shape_of(value):
    """The keys and kinds of a JSON value."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    kinds = {bool: "bool", int: "number", float: "number", str: "text", list: "list"}
    return kinds[type(value)]


def test_the_configuration_has_every_field_with_its_default():
    """Fields, annotations and defaults are those of the document, in its order; ours come after them."""
    written = {"dataclass": dataclasses.dataclass}
    exec(CONFIGURATION, written)
    theirs = dataclasses.fields(written["PyTorchDebuggingConfig"])
    ours = dataclasses.fields(PyTorchDebuggingConfig)[: len(theirs)]
    assert [(f.name, f.default) for f in ours] == [(f.name, f.default) for f in theirs]
    assert [f.type for f in ours] == [getattr(f.type, "__name__", f.type) for f in theirs]


@pytest.mark.parametrize("snippet", [ANOMALY, GRADIENT_CHECKING, MEMORY, CUDA, PERFORMANCE, ADVANCED, GRADIO])
def test_configurations_of_the_document_can_be_used(snippet, loop):
    """Each of them is accepted, and a step runs with it."""
    exec(snippet, loop)
    manager = loop.get("stability_manager") or NumericalStabilityManager(debug_config=loop["debug_config"])
    with manager:
        for batch in loop["dataloader"]:
            loss = loop["criterion"](loop["model"](batch), loop["target"])
            loss.backward()
            info = manager.step(loop["model"], loss, loop["optimizer"])["debug_info"]
            loop["optimizer"].step()
            loop["optimizer"].zero_grad()
    assert info["debug_enabled"]
    assert not info["anomalies_detected"]


def test_basic_debugging_setup(loop, capsys):
    """The loop of the document trains, says what it found, and leaves four files."""
    loop["dataloader"][3][0, 0] = float("nan")
    exec(BASIC, loop)
    said = capsys.readouterr().out
    assert "Debug anomalies detected: [{" in said
    assert re.search(r"Total anomalies detected: 4$", said.strip())
    assert all(p.isfinite().all() for p in loop["model"].parameters())
    files = loop["debug_summary"]["files"]
    assert set(files) == {"history", "anomalies", "gradients", "memory"}
    for kind, path in files.items():
        assert re.fullmatch(rf"debug_output/pytorch_debug_{kind}_[0-9]{{8}}_[0-9]{{6}}[.]json", path)
    history = json.loads(Path(files["history"]).read_text())
    assert [record["iteration"] for record in history] == list(range(1, 11))


def test_training_wrapper_with_debugging(loop, capsys):
    """The wrapper is called in the loop and keeps a session of its own."""
    exec(WRAPPER, loop)
    assert "Training completed with 10 debug iterations" in capsys.readouterr().out


def test_the_step_record_has_the_structure_of_the_document(loop):
    """Every key is there, no other is, and each holds what the document shows; without CUDA its numbers are null."""
    exec(BASIC, loop)
    ours = json.loads(Path(loop["debug_summary"]["files"]["history"]).read_text())[-1]
    theirs = json.loads(RECORD)
    cuda = ours["memory_info"]["cuda_memory"]
    assert cuda.keys() == theirs["memory_info"]["cuda_memory"].keys()
    assert set(cuda.values()) == {None} or torch.cuda.is_available()
    theirs["memory_info"]["cuda_memory"] = ours["memory_info"]["cuda_memory"] = {}
    assert shape_of(ours) == shape_of(theirs)
    assert list(ours) == list(theirs)


class Off(torch.autograd.Function):
    """The identity, with a backward that is off by 0.1 %."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 1.001


class Wrong(nn.Module):
    """A model whose first layer gets wrong gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(Off.apply(self.first(x)).tanh())


def test_a_session_finds_a_wrong_backward(loop):
    """Catching such bugs early is the first benefit that the document names: what fails is told with its parameters."""
    exec(GRADIENT_CHECKING, loop)
    model = Wrong()
    optimizer = torch.optim.Adam(model.parameters())
    with NumericalStabilityManager(debug_config=loop["debug_config"]).watch(model) as manager:
        loss = loop["criterion"](model(loop["dataloader"][0]), loop["target"])
        loss.backward()
        details = manager.step(model, loss, optimizer)["debug_info"]["anomaly_details"]
    assert [detail["type"] for detail in details] == ["gradient_check"]
    assert details[0]["parameters"] == ["first.weight", "first.bias", "input 0"]


def test_the_pictures_of_the_document_are_drawn(loop):
    """Anomalies, gradient norms, memory and the kinds of anomalies: one picture each."""
    loop["dataloader"][3][0, 0] = float("nan")
    exec(BASIC, loop)
    pictures = loop["stability_manager"].debugging.plot()
    assert len(pictures) == 4
    assert all(path.stat().st_size > 1000 and path.suffix == ".png" for path in pictures.values())
