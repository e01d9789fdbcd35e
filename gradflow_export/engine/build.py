"""What an exporter needs to begin: its taps and loop, a place for files, a description of the run."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.checks.arrival_reader import ArrivalTap
from gradflow_export.checks.batch_evidence import InputTap
from gradflow_export.checks.connectivity import WiringTap
from gradflow_export.checks.initial_weights import InitialTap
from gradflow_export.checks.loss_accumulation import SumTap
from gradflow_export.checks.missing_step import LonelyPasses
from gradflow_export.checks.mode_reader import ModeTap
from gradflow_export.checks.reloads import ReloadTap
from gradflow_export.checks.repeated_layers import RepeatedTap
from gradflow_export.checks.structure import StructureTap
from gradflow_export.config import Settings
from gradflow_export.distributed.rank_transport import Exchange
from gradflow_export.engine.external_issues import ToldJudge
from gradflow_export.engine.forked import new_session
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.step_timer import StepClock
from gradflow_export.engine.training_loop import Taps, TrainingLoop
from gradflow_export.engine.transfer import Bundle
from gradflow_export.engine.worker import Worker
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import find_blocks, named_blocks, site_name, unwrap
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.optimizer_steps import OptimizerSteps
from gradflow_export.hooks.shard_layout import is_spread, this_rank
from gradflow_export.instruments.activations.modules import ActivationTap
from gradflow_export.instruments.architecture import PictureTap
from gradflow_export.instruments.attention import AttentionTap
from gradflow_export.instruments.base import SampledTap
from gradflow_export.instruments.blocks import BlockTap
from gradflow_export.instruments.copies import Copies, CopyTap
from gradflow_export.instruments.discrete.declared_grids import Grids
from gradflow_export.instruments.discrete.nodes import Pairs
from gradflow_export.instruments.discrete.updates import DiscreteTap
from gradflow_export.instruments.gradients.clipping import ClippingTap
from gradflow_export.instruments.gradients.parameters import GradientTap
from gradflow_export.instruments.loss import LossTap
from gradflow_export.instruments.moments import MomentTap
from gradflow_export.instruments.origin import OriginTap
from gradflow_export.instruments.policy import PolicyTap
from gradflow_export.instruments.replicas import ReplicaTap
from gradflow_export.instruments.runtime import RuntimeTap
from gradflow_export.instruments.updates import UpdateTap
from gradflow_export.profiles import profile as rules_of
from gradflow_export.records.step_record import RunInfo

_log = logging.getLogger("gradflow_export")


def make_loop(
    model: nn.Module,
    settings: Settings,
    guard: Guard,
    hand_over: Callable[[Bundle], None],
    *,
    runtime: RuntimeTap,
    criterion: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    blocks: Iterable[str | nn.Module] | None = None,
    pairs: Pairs = None,
    grids: Grids = None,
    copies: Copies = None,
    compiled: bool = False,
) -> TrainingLoop:
    """Make the taps of one exporter and the loop that reads them; nothing is attached yet.

    Args:
        model: The unwrapped model; only a weak reference to it is kept.
        settings: When instruments are read.
        guard: Keeps their errors out of the user's loop.
        hand_over: Takes a finished step.
        runtime: Reads the memory of the process.
        criterion: The loss module, if there is one.
        optimizer: Count only the steps of these.
        blocks: Names or modules in depth order; found when ``None``.
        pairs: Names of parameters that are phase and magnitude of the same nodes, or ``"rows"``.
        grids: Width of the grid that weights are rounded to when they are used, or widths by name.
        copies: Groups of names of what should stay equal.
        compiled: Whether calls of modules happen inside compiled code.

    Raises:
        ArgumentError: A block, a pair or a grid is not part of the model.
        ArgumentTypeError: A block is neither a name nor a module, a pair is none, or a grid has no width.
    """
    chosen, leaves = find_blocks(model) if blocks is None else (named_blocks(model, blocks), False)
    code = CompiledCode(model, known=compiled, inside=settings.compiled)
    say_what_is_not_read(code)
    part, reference = guard.part, weakref.ref(model)
    only = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    discrete = DiscreteTap(model, pairs=pairs, grids=grids, code=code, guard=part("discrete"))
    clipping = ClippingTap(reference, guard=part("clipping"))
    calls, found = ModuleCalls(code=code), blocks is None
    block = BlockTap(calls, chosen, by_call_order=leaves, found=found, guard=part("blocks"))
    follow, inputs = part("blocks")(block.follow), InputTap(reference, guard=part("inputs"))
    wiring, lonely = WiringTap(model, calls=not code.found, code=code, guard=part("wiring")), LonelyPasses(reference)
    names = tuple(name for name, _ in chosen)
    picture = PictureTap(model, names, calls=not code.found, guard=part("wiring"))
    modes, structure = (
        ModeTap(model, code=code, guard=part("wiring")),
        StructureTap(model, code=code, guard=part("inputs")),
    )
    repeated, sums = RepeatedTap(model, guard=part("wiring")), SumTap(model)
    see_sums = part("wiring")(sums.see)

    origin = OriginTap(reference, rerun=settings.rerun_nonfinite, guard=part("origin"))
    see_origin = part("origin")(origin.see)

    def on_root(root: Tensor) -> None:
        see_origin(root)
        inputs.see(root)
        structure.see(root)
        see_sums(root)

    def start_over() -> None:
        block.store.clear()
        clipping.start_over()
        origin.start_over()

    calls.on_transformed = part("wiring")(lonely.transformed)
    taps = Taps(
        block,
        GradientTap(),
        UpdateTap(reference),
        LossTap(
            criterion,
            model=reference,
            on_over=clipping.over,
            on_cleared=start_over,
            on_loss=follow,
            on_root=on_root,
            guard=part("loss"),
        ),
        runtime,
        origin,
        MomentTap(),
        clipping,
        (*_sampled(model, guard, code), inputs, structure, modes, picture, *([repeated] if repeated.modules else [])),
        (
            *([discrete] if discrete.modules else []),
            *([ReplicaTap(model)] if is_spread() else []),
            CopyTap(model, copies),
            wiring,
            ArrivalTap(model, guard=part("wiring")),
            sums,
            InitialTap(model),
            ReloadTap(model, guard=part("wiring")),
        ),
    )
    # Parameters are read by few calls for all of them, blocks and activations by some for each.
    tensors = sum(1 for _ in model.parameters()) // 2
    sites = {"blocks": len(chosen), "updates": tensors, "statistics": tensors, "clipping": tensors}
    sites.update((tap.instrument, tap.modules) for tap in taps.armed)
    sites["inputs"] = tensors  # the graph of the loss is followed through all of them
    sites["wiring"] = 2 * tensors  # each parameter is looked at by itself, and how they hang together seldom changes
    loop = TrainingLoop(taps, settings.schedule.for_sites(sites), guard, hand_over, lonely)
    loop.clock = StepClock(settings.budget, settings.floor)
    picture.tell, taps.gradients.flagged = loop.told.append, loop.pace.flagged

    def foreign(stranger: Optimizer) -> None:
        wiring.noticed(stranger)
        lonely.noticed(stranger)
        taps.loss.passes.note_step()

    loop.optimizers = OptimizerSteps(
        reference,
        loop.before,
        loop.after,
        only,
        skipped=loop.skip,
        foreign=foreign,
        guard=part("the optimizer step"),
    )
    return loop


def _sampled(model: nn.Module, guard: Guard, code: CompiledCode) -> tuple[SampledTap, ...]:
    """Return the taps for which the model has something to read."""
    taps: list[SampledTap] = [
        ActivationTap(ModuleCalls(code=code), model, guard=guard.part("activations")),
        AttentionTap(model, enabled=not code.found, code=code, guard=guard.part("attention")),
        PolicyTap(model),
    ]
    if any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in model.modules()):
        from gradflow_export.instruments.recurrent import RecurrentTap  # noqa: PLC0415 - memory that few models have a use for

        taps.append(RecurrentTap(ModuleCalls(code=code), model, guard=guard.part("recurrent")))
    return tuple(tap for tap in taps if tap.modules)


def say_what_is_not_read(code: CompiledCode) -> None:
    """Say in one line what of a compiled model is not read."""
    if code.known and not code.read:
        _log.warning(
            "gradflow: the model is compiled; block gains and activations are not read inside compiled code. "
            "Gradients, updates, loss and memory are."
        )


def join_ranks(model: nn.Module, loop: TrainingLoop, worker: Worker) -> None:
    """Have the workers of all ranks bring their readings to rank 0; one process alone is left as it is.

    Args:
        model: The unwrapped model. Of several models with the same parameters the first that is watched on one rank
            belongs to the first on another, and so on.
        loop: Its plan comes to depend on the step alone, so that the ranks read the same things at the same steps.
        worker: Not started yet.
    """
    if not is_spread():
        return
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        _log.warning(
            "gradflow: FullyShardedDataParallel hides how its parameters lie; each rank reads its own part only. Use "
            "torch.distributed.fsdp.fully_shard for readings of the whole model."
        )
        return
    if loop.clock.budget is not None and not loop.clock.floor:
        _log.warning("gradflow: budget= is ignored on several ranks, which must read the same things at the same steps")
    loop.alone, loop.clock = False, StepClock()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shapes = (f"{site_name(name)}{list(parameter.shape)}" for name, parameter in model.named_parameters())
    names = ",".join([type(model).__name__, *shapes])
    session = f"gradflow/{hashlib.sha256(names.encode()).hexdigest()[:16]}"
    ranks = Exchange(None, rank, world)
    try:
        common = torch_private.default_store()
        # A connection of its own, so that waiting there keeps nobody else from the store.
        common = common.clone() if hasattr(common, "clone") else common
        joined = Exchange(torch.distributed.distributed_c10d.PrefixStore(session, common), rank, world)
        joined.open()
        ranks = joined
    except Exception as error:
        _log.warning("gradflow: the ranks cannot be joined: no key-value store. %s: %s", type(error).__name__, error)
    worker.join(ranks)


def make_judge(settings: Settings, *, strict: bool) -> ToldJudge:
    """Return the judge that the settings ask for; one without rules when alerts are off or rank 0 judges."""
    rules = rules_of(settings.profile, settings.thresholds)
    judge = ToldJudge(rules if settings.alerts_enabled and this_rank() == 0 else (), strict=strict)
    judge.ignored = settings.ignored
    return judge


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile(model)`` made this module, or ``model.compile()`` was called, wrapped or not."""
    wrapped = any(torch_private.inside(module) is not None for module in (model, getattr(model, "module", None)))
    return wrapped or torch_private.compiles_calls(unwrap(model))


def default_logdir(model: nn.Module) -> Path:
    """Return ``runs/<date>_<time>_<model class>``, with a number when that exists already."""
    stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{type(model).__name__}"
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}_{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not path.exists())


def describe(model: nn.Module, settings: Settings) -> RunInfo:
    """Return what is known of a run before its first step."""
    now = time.time()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["gradflow-export"] = metadata.version("gradflow-export")
    held = list(model.parameters())
    return RunInfo(
        session=new_session(now, rank),
        started=now,
        model=type(model).__name__,
        parameters=sum(p.numel() for p in held if p.requires_grad),
        rank=rank,
        world_size=torch.distributed.get_world_size() if distributed else 1,
        settings=settings.as_json(),
        versions=versions,
        entries=sum(p.numel() for p in held),
        tensors=len(held),
        frozen=sum(not p.requires_grad for p in held),
    )
