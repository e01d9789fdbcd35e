"""The reader of output sizes in evaluation: training keeps its bits, no hook is left, and inference mode is no obstacle."""

import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


def trained(watch, quiet=torch.inference_mode, scale=1.0):
    """Train and evaluate now and then, in other units; return the model and the issues."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0) if watch else None
    if exporter is not None:
        exporter.watch()
    for step in range(120):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        if step % 12 == 11:
            model.eval()
            with quiet():
                for _ in range(2):
                    model(scale * torch.randn(64, 8))
            model.train()
    if exporter is not None:
        exporter.close()
    return model, [] if exporter is None else exporter.issues


def test_training_has_the_same_bits_and_no_hook_is_left():
    alone, _ = trained(watch=False)
    model, _ = trained(watch=True)
    ends = zip(alone.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in ends)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_evaluation_in_inference_mode_is_compared_with_training():
    _, issues = trained(watch=True, scale=30.0)
    assert [issue.cause for issue in issues if issue.issue_type is IssueType.EVAL_RANDOM] == ["evaluation differs"]
