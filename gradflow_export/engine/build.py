"""What an exporter needs to begin: its instruments and loop, a place for files, a description of the run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.checks.missing_step import AwaitedStep, LonelyPasses
from gradflow_export.config import Settings
from gradflow_export.distributed.rank_transport import Exchange
from gradflow_export.engine.external_issues import ToldJudge
from gradflow_export.engine.instruments import Instruments
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.optimizer_groups import Roles
from gradflow_export.engine.registry import make_instruments, stepped
from gradflow_export.engine.sessions.forked import new_session
from gradflow_export.engine.step_timer import StepClock
from gradflow_export.engine.training_loop import TOLD, TrainingLoop
from gradflow_export.engine.transfer import Bundle
from gradflow_export.engine.worker import Worker
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import Found, find_blocks, given_blocks, site_name, unwrap
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.optimizer_steps import OptimizerSteps
from gradflow_export.hooks.shard_layout import fsdp_class, is_spread, this_rank
from gradflow_export.instruments.base import Instrument, Setting, overrides
from gradflow_export.instruments.blocks import BlockInstrument
from gradflow_export.instruments.copies import Copies
from gradflow_export.instruments.discrete.declared_grids import Grids
from gradflow_export.instruments.discrete.nodes import Pairs
from gradflow_export.instruments.games import Game
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument
from gradflow_export.instruments.hand_updates import HandUpdates
from gradflow_export.instruments.loss import LossInstrument
from gradflow_export.profiles import profile as rules_of
from gradflow_export.records.lost import DISABLED
from gradflow_export.records.step_record import Issue, Note, RunInfo

_log = logging.getLogger("gradflow_export")


def make_loop(
    model: nn.Module,
    settings: Settings,
    guard: Guard,
    hand_over: Callable[[Bundle], None],
    *,
    criterion: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    blocks: Iterable[str | nn.Module] | None = None,
    pairs: Pairs = None,
    grids: Grids = None,
    copies: Copies = None,
    roles: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> TrainingLoop:
    """Make the instruments of one exporter and the loop that reads them; nothing is attached yet.

    Args:
        model: The unwrapped model; only a weak reference to it is kept.
        settings: When instruments are read.
        guard: Keeps their errors out of the user's loop.
        hand_over: Takes a finished step.
        criterion: The loss module, if there is one.
        optimizer: Count only the steps of these.
        blocks: Names or modules in depth order; found when ``None``.
        pairs: Names of parameters that are phase and magnitude of the same nodes, or ``"rows"``.
        grids: Width of the grid that weights are rounded to when they are used, or widths by name.
        copies: Groups of names of what should stay equal.
        roles: Modules of the model or their names, by the name of their part.
        compiled: Whether calls of modules happen inside compiled code.

    Raises:
        ArgumentError: A block, a pair, a grid or a role is not part of the model.
        ArgumentTypeError: A block is neither a name nor a module, a pair is none, or a grid has no width.
    """
    code = CompiledCode(model, known=compiled, inside=settings.compiled)
    say_what_is_not_read(code)
    part, reference = guard.part, weakref.ref(model)
    told: deque[Issue | Note] = deque(maxlen=TOLD)
    lonely, awaited = LonelyPasses(reference), AwaitedStep(reference, told.append)
    clipping = ClippingInstrument(reference, guard=part("clipping"))
    block = _make_blocks(model, blocks, code, part)
    block.calls.on_passed_over = part("wiring")(lonely.passed_over)
    given = {"pairs": pairs, "grids": grids, "copies": copies, "rerun_nonfinite": settings.rerun_nonfinite}
    found = make_instruments(Setting(model, code, part, block.names, told.append, given))
    armed = tuple(sorted(found, key=stepped))
    hand = HandUpdates(reference, code, guard=part("wiring"))
    loss = _make_loss(criterion, reference, block, clipping, hand, awaited, armed, part)
    instruments = Instruments(block, GradientInstrument(), loss, clipping, armed)
    schedule = settings.schedule.for_sites(_sites(model, instruments, settings))
    loop = TrainingLoop(instruments, schedule, guard, hand_over, lonely, awaited, hand)
    loop.told, loop.clock = told, StepClock(settings.budget, settings.floor)
    guard.on_failure = lambda name: told.append(Note(DISABLED, name, loop.steps + 1))
    loop.partners.roles = Roles(model, roles)
    instruments.gradients.flagged = loop.pace.flagged
    loop.optimizers = _follow_optimizers(loop, reference, optimizer, part)
    return loop


def _make_blocks(
    model: nn.Module, blocks: Iterable[str | nn.Module] | None, code: CompiledCode, part: Callable[[str], Part]
) -> BlockInstrument:
    """Return what reads blocks: those that the user names, or those that are found."""
    found = blocks is None
    if blocks is None:
        choice = Found([], leaves=True, choices=()) if code.deep else find_blocks(model)
    else:
        choice = given_blocks(model, blocks)
    block = BlockInstrument(
        ModuleCalls(code=code),
        choice.blocks,
        by_call_order=found and choice.joined,
        whole=choice.leaves,
        found=found,
        guard=part("blocks"),
    )
    block.choices = choice.choices
    return block


def _make_loss(
    criterion: nn.Module | None,
    model: Callable[[], nn.Module | None],
    block: BlockInstrument,
    clipping: ClippingInstrument,
    hand: HandUpdates,
    awaited: AwaitedStep,
    armed: Sequence[Instrument],
    part: Callable[[str], Part],
) -> LossInstrument:
    """Return what reads losses, and reports backward passes to all others."""
    end_awaited = part("wiring")(awaited.over)
    cleared = [block.store.clear, clipping.start_over, *(each.cleared for each in armed if overrides(each, "cleared"))]

    def start_over() -> None:
        for forget in cleared:
            forget()

    def over() -> None:
        clipping.over()
        hand.over()
        if awaited.looks:
            end_awaited()
        block.store.after = True

    loss = LossInstrument(
        criterion,
        model=model,
        on_over=over,
        on_cleared=start_over,
        on_loss=part("blocks")(block.follow),
        guard=part("loss"),
    )
    block.store.under = loss.passes.under
    return loss


def _sites(model: nn.Module, instruments: Instruments, settings: Settings) -> dict[str, int]:
    """Return how many sites each instrument with an interval reads."""
    # Parameters are read by few calls for all of them, blocks and activations by some for each.
    tensors = sum(1 for _ in model.parameters()) // 2
    sites = dict.fromkeys(("updates", "statistics", "clipping", "moments"), tensors)
    sites |= dict.fromkeys(("blocks", "ranks"), len(instruments.blocks.names))
    for each in instruments.armed:
        if each.instrument in settings.schedule.intervals:
            sites[each.instrument] = max(each.modules, sites.get(each.instrument, 0))
    return sites


def _follow_optimizers(
    loop: TrainingLoop,
    model: Callable[[], nn.Module | None],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    part: Callable[[str], Part],
) -> OptimizerSteps:
    """Return what calls the loop around the steps of the model's optimizers, and reports those of others."""
    armed, loss = loop.instruments.armed, loop.instruments.loss
    noticing: list[Callable[[Optimizer], None]] = [
        loop.lonely.noticed,
        loop.awaited.start_over,
        Game(model, loss.roots, part("games")).stepped,
        *(each.noticed for each in armed if overrides(each, "noticed")),
    ]

    def foreign(stranger: Optimizer) -> None:
        # That of a model in another thread: while it steps, this model's gradients may be written and freed.
        if loss.roots.thread not in {0, threading.get_ident()}:
            return
        for notice in noticing:
            notice(stranger)
        loss.passes.note_step()

    return OptimizerSteps(
        model,
        loop.before,
        loop.after,
        [optimizer] if isinstance(optimizer, Optimizer) else optimizer,
        skipped=loop.skip,
        foreign=foreign,
        gone=loop.quiet.leave,
        guard=part("the optimizer step"),
    )


def say_what_is_not_read(code: CompiledCode) -> None:
    """Say in one line what of a compiled or deeply nested model is not read."""
    if code.deep:
        _log.warning(
            "gradflow: the modules are nested so deep that calls with hooks may meet Python's recursion limit (%d); "
            "block gains and activations are not read. Gradients, updates, loss and memory are. To have all read, call "
            "sys.setrecursionlimit(%d) before Exporter(...).watch().",
            sys.getrecursionlimit(),
            code.recursion,
        )
        return
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
    if any(isinstance(module, fsdp_class("FullyShardedDataParallel")) for module in model.modules()):
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


_CHOOSING = threading.Lock()


@functools.cache
def _claims(_path: Path) -> Iterator[int]:
    """Return what counts the exporters of this process that asked for a folder, which only the first one has."""
    return itertools.count()


def default_logdir(model: nn.Module) -> Path:
    """Return ``runs/<date>_<time>_<model class>``, with a number when that exists, or another exporter here has it."""
    stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{type(model).__name__}"
    candidates = (Path("runs") / (stem if n == 1 else f"{stem}_{n}") for n in range(1, 10_000))
    with _CHOOSING:  # one thread may choose while another one has chosen and not yet written
        return next(path for path in candidates if not path.exists() and next(_claims(path.absolute())) == 0)


@functools.cache
def _versions() -> dict[str, str]:
    """Return what a run is made with; our own version stands in a file, which is read once."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["gradflow-export"] = metadata.version("gradflow-export")
    return versions


def describe(model: nn.Module, settings: Settings) -> RunInfo:
    """Return what is known of a run before its first step."""
    now = time.time()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    held = list(model.parameters())
    return RunInfo(
        session=new_session(now, rank),
        started=now,
        model=type(model).__name__,
        parameters=sum(p.numel() for p in held if p.requires_grad),
        rank=rank,
        world_size=torch.distributed.get_world_size() if distributed else 1,
        settings=settings.as_json(),
        versions=dict(_versions()),
        entries=sum(p.numel() for p in held),
        tensors=len(held),
        frozen=sum(not p.requires_grad for p in held),
    )
