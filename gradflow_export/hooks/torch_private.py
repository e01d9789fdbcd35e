"""Every name of torch that is not public, each with what is done where a release has none (floor 0, needs torch).

They are looked up once, when this module is imported. A fallback keeps the package working in a reduced form: what it
then does not tell is said beside it. Attributes of the nodes of an autograd graph (``_saved_dim``) are read where they
are needed, and asked for with a default.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - used elsewhere
    from typing_extensions import Self


def _find(path: str, fallback: Any) -> Any:
    """Return what has this dotted name, or the fallback."""
    pieces = path.split(".")
    found: Any = sys.modules[pieces[0]]
    for count, piece in enumerate(pieces[1:], start=2):
        found = getattr(found, piece, None) or _submodule(".".join(pieces[:count]))
    return fallback if found is None else found


def _submodule(name: str) -> Any:
    """Import a submodule that is there and that nobody has imported yet; ``None`` where there is none."""
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        return None


class _Nothing:
    """A class that has no instances."""


class _NoMode:
    """A dispatch mode that sees nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


def _never(*_args: Any) -> bool:
    return False


def _nothing(*_args: Any, **_named: Any) -> None:
    return None


def _some() -> int:
    return 1


def _no_task(*_args: Any) -> int:
    return -1


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _copies(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
    for target, source in zip(into, out_of, strict=True):
        target.copy_(source)


def _no_store() -> Any:
    raise RuntimeError("this release of torch does not tell the store of a distributed job")


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

# Whether torch.jit.trace is running; the public form has no types and costs another call.
traces: Callable[[], bool] = _find("torch._C._is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]

# How many dispatch modes there are, and the one of make_fx; without them what hooks compute stands in its graphs.
dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", _some)
_proxies: Callable[[], Any] = _find("torch.fx.experimental.proxy_tensor.get_proxy_mode", _nothing)

# How many function modes there are, a default device among them; without it the default device is asked for each time.
function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", _some)

# The innermost function transform (vmap, grad), and what it or is_grads_batched wraps; else read as if outside.
transform: Callable[[], Any] = _find("torch._C._functorch.peek_interpreter_stack", _nothing)
is_transformed: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor", _never)
is_batched: Callable[[Tensor], bool] = _find("torch._C._functorch.is_legacy_batchedtensor", _never)
# Number of the backward pass that is running, -1 outside; without it several passes of a step are counted as one.
backward_number: Callable[[], int] = _find("torch._C._current_graph_task_id", _no_task)

norms: Callable[..., Sequence[Tensor]] = _find("torch._foreach_norm", _norms)
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = _find("torch._foreach_copy_", _copies)

# What clip_grad_value_ calls before it writes; without it such a call before another is a change by hand.
grouping: Any = _find("torch.utils._foreach_utils._group_tensors_by_device_and_dtype", _nothing)

FakeTensor: Any = _find("torch._subclasses.fake_tensor.FakeTensor", _Nothing)
BatchNorm: Any = _find("torch.nn.modules.batchnorm._BatchNorm", _BATCH_NORMS)
Norm: Any = _find("torch.nn.modules.batchnorm._NormBase", _NORMS)
Dropout: Any = _find("torch.nn.modules.dropout._DropoutNd", _DROPOUTS)
Loss: Any = _find("torch.nn.modules.loss._Loss", _Nothing)
AttentionOutput: Any = _find("torch.nn.modules.linear.NonDynamicallyQuantizableLinear", _Nothing)

# Without modes, and without what subclasses of tensors add to functions; else those of the user see ours.
no_dispatch_modes: Any = _find("torch.utils._python_dispatch._disable_current_modes", _NoMode)
no_functions: Any = _find("torch._C.DisableTorchFunction", _NoMode)

# A mode that sees every operation; without it a repeated pass over a sharded model is not ended at its collectives.
if not TYPE_CHECKING:
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode", _NoMode)

# Containers of tensors, nested in any way; without it those in containers are not looked at.
_PYTREE: Any = _find("torch.utils._pytree", None)

# How often a tensor was written to; without it writes between two looks are unknown.
version: Callable[[Tensor], int] = attrgetter("_version") if hasattr(Tensor, "_version") else _no_task

_Held = tuple[Mapping[str, nn.Module | None], Mapping[str, Tensor | None]]


def _held(module: nn.Module) -> _Held:
    return dict(module.named_children()), dict(module.named_parameters(recurse=False))


# What a module holds itself, by name: its children, then its parameters.
_HELD: Callable[[nn.Module], _Held] = attrgetter("_modules", "_parameters")
held: Callable[[nn.Module], _Held] = _HELD if {"_modules", "_parameters"} <= vars(nn.Module()).keys() else _held

_HAS_HOOKS = hasattr(Tensor, "_backward_hooks")

_ENGINE: Any = _find("torch.autograd.Variable._execution_engine", None)

COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""Operators that need other ranks."""

# What compiled modules ask before they warn of hooks that every call runs; without it they warn of ours.
MODULES, ASKS_FOR_HOOKS = sys.modules[nn.Module.__module__], "_has_any_global_hook"
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("backward_pre", "backward", "forward_pre", "forward"))

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which wrappers keep the module inside."""


def default_store() -> Any:
    """Return the store that the ranks of a job meet in; raises RuntimeError where it is not known."""
    return _find("torch.distributed.distributed_c10d._get_default_store", _no_store)()


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """Compute as if there were no mode: nobody sees it, and new tensors hold numbers whatever the default device is."""
    with no_dispatch_modes(), no_functions():
        yield


def global_hooks() -> list[Mapping[int, Any]]:
    """Return the hooks that every call of a module runs, by number."""
    return [hooks for name in _GLOBAL_HOOKS if (hooks := getattr(MODULES, name, None))]


def tree_leaves(tree: Any) -> list[Any]:
    """Return what nested tuples, lists, dicts and registered containers hold."""
    leaves: list[Any] = [tree] if _PYTREE is None else _PYTREE.tree_leaves(tree)
    return leaves


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with ``function`` applied to the leaves of one type."""
    if _PYTREE is None:
        return function(tree) if isinstance(tree, kind) else tree
    return _PYTREE.tree_map_only(kind, function, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves, and the form from which :func:`tree_unflatten` makes the tree again."""
    flat: tuple[list[Any], Any] = ([tree], None) if _PYTREE is None else _PYTREE.tree_flatten(tree)
    return flat


def tree_unflatten(leaves: Sequence[Any], form: Any) -> Any:
    """Undo :func:`tree_flatten`."""
    return leaves[0] if _PYTREE is None else _PYTREE.tree_unflatten(leaves, form)


def inside(module: Any) -> Any:
    """Return what ``torch.compile`` wrapped in this module, ``None`` where it wrapped nothing."""
    return getattr(module, WRAPPERS[0], None)


def compiles_calls(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiles_backward() -> bool:
    """Whether ``torch.compile`` takes backward passes too, where no hook may stand; False where unknown."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False))


def named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children by name, those that are there twice as often."""
    return [(name, child) for name, child in held(module)[0].items() if child is not None]


def children(module: nn.Module) -> list[nn.Module]:
    """Return a module's children, those that are there twice as often."""
    return [child for _, child in named_children(module)]


def buffers(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return a module's own buffers by name; without the private name only those that are there."""
    held = getattr(module, "_buffers", None)
    return list(module.named_buffers(recurse=False) if held is None else held.items())


def parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's own parameters by name, those that are there."""
    return [(name, parameter) for name, parameter in held(module)[1].items() if parameter is not None]


def own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer, never what a parametrization computes; ``None`` where none is."""
    for kind in ("_parameters", "_buffers"):
        held = getattr(module, kind, {})  # of a scripted module it is no dictionary
        if name in held and isinstance(held[name], Tensor):
            found: Tensor = held[name]
            return found
    return None if hasattr(module, "_parameters") else dict(module.named_parameters(recurse=False)).get(name)


def own_parameters(places: Iterable[tuple[nn.Module | None, str]]) -> list[Tensor | None]:
    """Return what :func:`own_tensor` does of many places, with one look each where parameters are."""
    out: list[Tensor | None] = []
    for module, name in places:
        held = getattr(module, "_parameters", None)
        found = held.get(name) if isinstance(held, dict) else None
        out.append(own_tensor(module, name) if found is None and module is not None else found)
    return out


def convert(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Apply a function to every parameter and buffer, in place; without the private name all become float64."""
    applied: nn.Module = getattr(module, "_apply", lambda _function: module.double())(function)
    return applied


def put_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Put another tensor in a buffer's place."""
    held = getattr(module, "_buffers", None)
    if held is None:
        setattr(module, name, buffer)
    else:
        held[name] = buffer


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` or ``make_fx`` makes a graph of what runs now."""
    return traces() or (dispatch_modes() > 0 and _proxies() is not None)


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the stored entries of a sparse tensor, coalesced or not; without the private name it must be."""
    return getattr(tensor, "_values", tensor.values)()


def sparse_indices(tensor: Tensor) -> Tensor:
    """Return the places of the stored entries of a sparse tensor, as :func:`sparse_values` does."""
    indices: Tensor = getattr(tensor, "_indices", tensor.indices)()
    return indices


def sequence_number(node: Any) -> int:
    """Return a number that tells a node of a graph from others."""
    return int(node._sequence_nr()) if hasattr(node, "_sequence_nr") else id(node)


def hook_gradient(tensor: Tensor, node: Any, hook: Any) -> None:
    """Have a hook called with the gradient of an output; ``node`` is its ``grad_fn``, where that is a plain one.

    As ``Tensor.register_hook`` does, less the handle that would remove the hook again, which costs most of it.
    """
    register = getattr(node, "_register_hook_dict", None)
    if register is None or not _HAS_HOOKS:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        register(tensor)
    hooks[hook] = hook


def queue_callback(call: Callable[[], None]) -> None:
    """Have a function called when the backward pass that is running ends; without the private name it never is."""
    if _ENGINE is not None:  # DistributedDataParallel uses it too
        _ENGINE.queue_callback(call)


def loss_scale(scaler: Any) -> Tensor | None:
    """Return what a gradient scaler multiplies losses by, where it lies; ``None`` without the private name."""
    scale = getattr(scaler, "_scale", None)  # get_scale() would wait for the device
    return scale if isinstance(scale, Tensor) else None


def scaler_state(scaler: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a gradient scaler has noted of an optimizer in this step; empty where that is nothing."""
    state: dict[str, Any] = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return state


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer has step hooks of its own; without the private names it is taken to have some."""
    before = getattr(optimizer, "_optimizer_step_pre_hooks", True)
    return bool(before or getattr(optimizer, "_optimizer_step_post_hooks", True))


def step_hooks(kind: str = "pre") -> list[Any]:
    """Return the process-wide hooks before or ``"post"`` steps, in order; without the private name there are none."""
    return list(getattr(sys.modules[Optimizer.__module__], f"_global_optimizer_{kind}_hooks", {}).values())


def mark_static(tensor: Tensor) -> None:
    """Tell ``torch.compile`` that a tensor stays where it is; else a graph that changes it is no CUDA graph."""
    _find("torch._dynamo.mark_static_address", _nothing)(tensor)


def library() -> str:
    """Return the path of the library that torch's functions are in; an AttributeError where there is none."""
    return str(torch._C.__file__)


def constant_when_traced(function: Callable[[], bool]) -> Callable[[], bool]:
    """Have ``torch.compile`` call a function while it traces, and take what it returns for a constant.

    What ``torch.compiler.assume_constant_result`` does, less the import of the compiler; without it the call is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traces_one_graph() -> bool:
    """Whether the trace that is running must give one graph, so that a break would raise; True where unknown."""
    local = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None)
    trace = getattr(local, "current_tx", None)
    return bool(getattr(trace, "one_graph", True) or getattr(trace, "error_on_graph_break", False))


def graphs() -> int:
    """Return how many graphs ``torch.compile`` has captured in this process; 0 where that is unknown."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if known is None else int(known["stats"]["unique_graphs"])


def keeps_cuda_graphs() -> bool:
    """Whether this process keeps a pool of CUDA graphs that ``torch.compile`` made."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return bool(getattr(getattr(trees, "local", None), "tree_manager_containers", None))


def forget_code(forwards: Iterable[Callable[..., Any]]) -> None:
    """Forget the compiled code of some functions and of what calls modules; without the private names it is kept."""
    frames: Any = _find("torch._C._dynamo.eval_frame", None) if "torch._dynamo.eval_frame" in sys.modules else None
    if not hasattr(frames, "_debug_get_cache_entry_list") or not hasattr(frames, "reset_code"):
        return
    for code in set(_codes((*forwards, *_callers()))):
        if frames._debug_get_cache_entry_list(code):
            frames.reset_code(code)


def _callers() -> Iterator[Any]:
    """Yield the functions that call a module's forward, on whose code compiled code may hang too."""
    yield getattr(nn.Module, "_call_impl", None)
    wrap: Any = _find("torch._dynamo.external_utils.wrap_inline", None)
    if wrap is not None:
        yield wrap(_nothing)


def _codes(functions: Iterable[Any]) -> Iterator[types.CodeType]:
    for function in functions:
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code
