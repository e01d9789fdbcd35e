"""Only type checkers run this file: it uses the public names as users do and must pass ``mypy --strict``."""

from __future__ import annotations

import torch
from torch import nn

from gradflow_export import (
    BackwardPassDiagnostics,
    DiscreteUpdateAnalyzer,
    Exporter,
    GradientClippingConfig,
    GradientFlowAnalyzer,
    GradientGainMonitor,
    Issue,
    IssueType,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
    Severity,
    TrainContext,
    anomaly_mode,
    check_gradients,
    create_modular_train_context,
    create_training_wrapper,
    plot_debug_session,
    read_run,
)

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()

exporter: Exporter = Exporter(model).watch()
exporter = Exporter(model, backends=["tensorboard"], logdir="runs/a", every=10).watch(criterion)
exporter = Exporter(model, profile="seed", gradient_explosion_threshold=10.0).watch(optimizer=optimizer)
exporter = Exporter(model, backends="jsonl", intervals={"blocks": 50}, compiled="never", budget=None, verbose=0)
Exporter(model, backends=["wnadb"])  # type: ignore[list-item]
Exporter(model, profile="robst")  # type: ignore[arg-type]
Exporter(model, intervals={"block": 50})  # type: ignore[dict-item]
Exporter(model, gradient_explosion_treshold=10.0)  # type: ignore[call-arg]
Exporter(model, bugdet=0.1)  # type: ignore[call-arg]
exporter.watch(optimzer=optimizer)  # type: ignore[arg-type]
exporter.observe(loss=torch.tensor(1.0), logits=torch.zeros(2, 3), targets=torch.zeros(2, dtype=torch.long))

issues: tuple[Issue, ...] = exporter.issues
for issue in issues:
    kind: IssueType = issue.issue_type
    bad: bool = issue.severity >= Severity.HIGH
    where: tuple[str, int] = (issue.layer, issue.step)

summary: dict[str, object] = exporter.summary()
text: str = exporter.report()
exporter.print_report()
exporter.mark("saved", kind="checkpoint")
exporter.save("summary.json")
exporter.close()

with Exporter(model, backends=["memory"]).watch(blocks=["0", "2"]) as watching:
    watching.step()

with GradientGainMonitor(model, norm_type="l2", strict_single_backward=True, eps=1e-30) as monitor:
    norms: list[float | None] = monitor.norms()
    gains: list[float | None] = monitor.gains()
    log_gains: list[float | None] = monitor.log_gains()
    mean: float = monitor.summary_stats()["mean_gain"]
    described: str = monitor.report()
    monitor.reset()

analyzer = GradientFlowAnalyzer(model, enable_jacobian=True, enable_vector_analysis=True, vanishing_threshold=1e-6)
listed: list[Issue] = analyzer.analyze(lambda: torch.zeros(2, 4), lambda out: out.sum(), steps=5, optimizer=optimizer)
listed = analyzer.analyze(lambda: (torch.zeros(2, 4),), lambda out: (out.sum(), -out.sum()), players=["0", model[2]])
analyzer.print_summary(listed)
curl: float | None = None if analyzer.vector is None else analyzer.vector.curl

with BackwardPassDiagnostics(model, criterion, pairs=[("0.weight", "2.weight")], buffer=10) as diagnostics:
    diagnostics.register_analyzer("mine", print)
    told: dict[str, object] = diagnostics.get_diagnostic_summary()
    diagnostics.save_diagnostic_data("diagnostics.json")
watched = Exporter(model, backends=()).watch(pairs="rows")
context: TrainContext = create_modular_train_context("config.yaml", model=model, dataset=[], optimizer=optimizer)
trained: tuple[float, float] = context.train_single_sample(0)
scores: dict[str, float] = DiscreteUpdateAnalyzer().analyze(torch.zeros(2), torch.ones(2), torch.ones(2), step=0.5)

run = read_run("runs/a")
last: float | None = run.records[-1].value("loss")

clipping, policy = GradientClippingConfig(mode="adaptive", exclude=("2",)), NaNHandlingConfig(policy="rewind")
with NumericalStabilityManager(clipping, policy, PyTorchDebuggingConfig(), exporter=exporter).watch(model) as manager:
    outcome: dict[str, object] = manager.step(model, torch.tensor(1.0), optimizer)
    manager.start_debug_session("mine")
    counted: dict[str, object] = manager.get_debug_summary()
wrapped: dict[str, object] = create_training_wrapper(clipping, nan_config=policy)(model, 0.5, optimizer)
with anomaly_mode(check_nan=False):
    checked = check_gradients(model, torch.zeros(2, 4), loss=lambda out: out.sum())
worst: tuple[bool, str, float] = (checked.passed, checked.worst, checked.max_relative_error)
pictures = plot_debug_session("debug_output/history.json", "pictures")["memory"].stat()
