"""The rules of docs/architecture.md, checked on the syntax trees of every module that is shipped."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE, PLUGIN = "gradflow_export", "tensorboard_plugin_gradflow"
FOLDERS = {CORE: ROOT / CORE, PLUGIN: ROOT / "tb_plugin" / PLUGIN}

FLOORS = (
    {"errors", "extensions", "native", "hooks.torch_private", "autograd_graph.nodes"},
    {"records", "schedule"},
    {"metrics", "rules", "storage"},
    {"hooks", "report", "writers"},
    {"autograd_graph", "config", "distributed", "instruments.base", "validation"},
    {"checks", "instruments"},
    {"profiles"},
    {"engine", "monitor"},
    {"exporter"},
    {"analyzers", "debugging", "diagnostics", "experiments", "integrations"},
    {"cli"},
    {"__main__"},
)
"""Every room, and every module at the top level. Imports go down only."""
PRIVATE = "hooks.torch_private"
NODES = "autograd_graph.nodes"
BASE = "instruments.base"
TOP, FOLDER = 10, 25
PLUGIN_MAY_IMPORT = {"records", "storage", "errors"}
WITHOUT_TORCH = {"errors", "native", "records", "storage", "rules", "writers", "report", "schedule", "extensions"}
MUTABLE_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet",
}  # fmt: skip


def floor(part: str) -> int:
    """Return the floor of a part of gradflow_export; a part that stands on none is an error."""
    found = [number for number, parts in enumerate(FLOORS) if part in parts]
    assert found, f"{part} stands on no floor: name it in FLOORS"
    return found[0]


def modules() -> dict[str, Path]:
    """Files by dotted module name."""
    out = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            out[".".join(part for part in parts if part != "__init__")] = path
    return out


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Syntax trees by dotted module name, read by the first test that asks: every process collects this file."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in modules().items()}


def imports(name: str, tree: ast.AST, for_checkers: bool = True) -> Iterator[str]:
    """Yield the dotted name of everything that is imported, at any depth.

    ``for_checkers`` says whether ``if TYPE_CHECKING:`` counts.
    """
    hidden = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_checkers
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the full name"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(dotted: str) -> str | None:
    """Return the part of gradflow_export that a dotted name lies in; ``None`` when it is another package's."""
    pieces = dotted.split(".")
    if pieces[0] != CORE or len(pieces) < 2:
        return None
    if ".".join(pieces[1:3]) in {PRIVATE, NODES, BASE}:
        return ".".join(pieces[1:3])
    exists = (FOLDERS[CORE] / pieces[1]).is_dir() or (FOLDERS[CORE] / f"{pieces[1]}.py").is_file()
    return pieces[1] if exists else "__init__"


def core_edges() -> Iterator[tuple[str, str, str]]:
    """Yield (module, its part, imported part) inside gradflow_export; the package's own __init__ is left out."""
    for name, tree in sources().items():
        own = part_of(name)
        if own is not None:
            for target in imports(name, tree):
                part = part_of(target)
                if part not in {None, own, "__init__"}:
                    yield name, own, part


def test_imports_go_down_only():
    """Every import goes to a lower floor; what stands on one floor does not know the others there."""
    assert [f"{name} imports {part}" for name, own, part in core_edges() if floor(part) >= floor(own)] == []


def test_one_module_reads_the_graph_of_autograd():
    """Names of nodes, and what they lead to, stand in one place: elsewhere a node is of a kind, and has sources."""
    kinds = {
        value.value
        for node in ast.walk(sources()[f"{CORE}.{NODES}"])
        if isinstance(node, ast.AnnAssign) and isinstance(value := node.value, ast.Constant)
    } - {"T"}
    rooms = {"autograd_graph", "checks"}
    wrong = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in sources().items()
        if name.startswith(CORE) and part_of(name) != NODES
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "next_functions")
        or (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and part_of(name) in rooms
            and node.value in kinds
        )
        or (
            isinstance(node, ast.Constant)
            and re.fullmatch(r"\w+Backward\d?|torch::autograd::\w+|next_functions", str(node.value))
        )
    ]
    assert wrong == []


def test_every_module_stands_on_a_floor():
    """A new room, or a new module at the top level, is placed on purpose; none is named that is not there."""
    assert {part_of(name) for name in sources()} - {None, "__init__"} == set().union(*FLOORS)


def test_rooms_stay_small():
    """There are at most ten modules at the top level, and at most 25 in a folder."""
    folders = [FOLDERS[CORE], *(path for path in FOLDERS[CORE].rglob("*") if path.is_dir())]
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > (TOP if name == CORE else FOLDER)} == {}


def test_the_plugin_sees_only_data():
    """The TensorBoard plugin uses records, catalogue, storage form, store, statistics and errors of ours, and nothing else."""
    wrong = [
        f"{name} imports {target}"
        for name, tree in sources().items()
        if name.startswith(PLUGIN)
        for target in imports(name, tree)
        if target.split(".")[0] == CORE and part_of(target) not in PLUGIN_MAY_IMPORT
    ]
    assert wrong == []


def test_the_core_does_not_know_the_plugin_package():
    """Only ``gradflow doctor``, ``view`` and ``snapshot`` look at the plugin; everything else works without it."""
    wrong = [
        f"{name} imports {target}"
        for name, tree in sources().items()
        if name.startswith(CORE) and name not in {f"{CORE}.cli.doctor", f"{CORE}.cli.view"}
        for target in imports(name, tree)
        if target.split(".")[0] == PLUGIN
    ]
    assert wrong == []


def test_data_rules_and_writers_do_not_import_torch():
    """What reads, judges and writes records works where torch is not installed."""
    wrong = [
        f"{name} imports {target}"
        for name, tree in sources().items()
        if name.startswith(PLUGIN) or part_of(name) in WITHOUT_TORCH or name in {CORE, f"{CORE}.cli.report"}
        for target in imports(name, tree, for_checkers=False)
        if target.split(".")[0] == "torch"
    ]
    assert wrong == []


OF_NODES = ("_saved_", "_raw_saved_", "_input_metadata")
OF_OTHERS = frozenset(
    {
        "argparse._SubParsersAction",
        "self.run._teardown_hooks",
        "sys._current_frames",
        "sys._getframe",
        "workspace._to_model",
        "_teardown_hooks",
    }
)


def private_names(tree: ast.AST, ours: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield what a module uses of torch that is not public.

    That is what is imported from torch and has an underscore in its path, any attribute with one that none of ours
    sets or defines, and any word with one that is handed to ``getattr``, ``hasattr`` or ``attrgetter``. What nodes of
    an autograd graph saved is left out.
    """
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in ours and ast.unparse(node) not in OF_OTHERS:
            found = [f"torch.{node.attr}"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {
            "getattr", "hasattr", "setattr", "delattr", "attrgetter"
        }:  # fmt: skip
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            found = [f"torch.{word}" for word in words if word not in ours | OF_OTHERS]
        for name in found:
            pieces = name.split(".")
            hidden = [piece for piece in pieces[1:] if piece.startswith("_") and not piece.startswith("__")]
            if pieces[0] == "torch" and hidden and not hidden[0].startswith(OF_NODES):
                yield name


def own_names(trees: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names with an underscore that ours define, or set on objects that they made."""
    out: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            out.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(out)


def test_names_of_torch_that_are_not_public_stand_in_one_file():
    """Everything else uses them through ``hooks/torch_private.py``, which has a fallback for each."""
    home = f"{CORE}.{PRIVATE}"
    ours = own_names(tree for name, tree in sources().items() if name != home)
    wrong = [
        f"{name} uses {used}"
        for name, tree in sources().items()
        if name != home and name.startswith(CORE) and part_of(name) not in WITHOUT_TORCH
        for used in private_names(tree, ours)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._dynamo import reset", ["torch._dynamo.reset"]),
        ("from torch.nn.modules.dropout import _DropoutNd", ["torch.nn.modules.dropout._DropoutNd"]),
        ("import torch._inductor", ["torch._inductor"]),
        ("torch._foreach_norm(x)", ["torch._foreach_norm"]),
        ("getattr(module, '_compiled_call_impl', None)", ["torch._compiled_call_impl"]),
        ("optimizer._optimizer_step_pre_hooks", ["torch._optimizer_step_pre_hooks"]),
        ("import torch\ntorch.nn.Linear(1, 1).weight\nself._mine\nnode._saved_dim", []),
    ],
)
def test_the_search_for_private_names_finds_them(source, names):
    """The check above fails where it should and only there."""
    assert list(private_names(ast.parse(source), frozenset({"_mine"}))) == names


def is_mutable(value: ast.expr | None) -> bool:
    """Whether an expression makes a fresh mutable container."""
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return called in MUTABLE_CALLS


def mutable_globals(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that put a mutable object at module level or rebind a module-level name from inside."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                yield node.lineno
    yield from (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global))


def test_no_module_holds_mutable_state():
    """State lives in objects that somebody made and can close, never in a module."""
    assert [f"{name}:{line}" for name, tree in sources().items() for line in mutable_globals(tree)] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a = []", [1]),
        ("a: dict = {}", [1]),
        ("import weakref\na = weakref.WeakSet()", [2]),
        ("def f():\n    global a", [2]),
        ("a = ()\n__all__ = ['a']\nb = frozenset({1})", []),
    ],
)
def test_the_search_for_mutable_state_finds_it(source, lines):
    """The check above fails where it should and only there."""
    assert list(mutable_globals(ast.parse(source))) == lines


def test_classes_and_modules_stay_small():
    """No class is longer than 250 lines and no module longer than 400."""
    long_modules = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for folder in FOLDERS.values()
        for path in folder.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    ]
    long_classes = [
        f"{name}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > 250
    ]
    assert long_modules + long_classes == []


def undocumented(name: str, node: ast.AST) -> Iterator[str]:
    """Yield the public classes, functions and methods below a node that have no docstring."""
    for child in getattr(node, "body", []):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or child.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in child.decorator_list}
        if not decorators & {"overload", "setter", "override"} and not ast.get_docstring(child):
            yield f"{name}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(f"{name}.{child.name}", child)


def test_everything_public_is_documented():
    """Every module, public class, function and method says what it is."""
    missing = [name for name, tree in sources().items() if not ast.get_docstring(tree)]
    assert missing + [entry for name, tree in sources().items() for entry in undocumented(name, tree)] == []


@pytest.mark.parametrize(
    "statement",
    [
        "import gradflow_export",
        "import gradflow_export.cli",
        "from gradflow_export.cli import main; assert main(['report', LOGDIR]) == 0",
        "from gradflow_export.cli import main; assert main(['report', LOGDIR, '--json']) == 0",
        "from gradflow_export.cli import main; assert main(['schema']) == 0",
        "from gradflow_export.cli import main; assert main(['export', LOGDIR, '--format', 'csv']) == 0",
        "import tensorboard_plugin_gradflow.loader",
        "from tensorboard_plugin_gradflow.loader import GradflowLoader; GradflowLoader().define_flags",
        "import gradflow_export.rules, gradflow_export.writers, gradflow_export.storage.reader",
    ],
)
def test_torch_is_not_pulled_in(statement, tmp_path):
    """What only reads or judges records starts without torch, in a fresh process."""
    write_run(tmp_path)
    code = f"import sys; LOGDIR = {str(tmp_path)!r}; {statement}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "torch was imported"


def write_run(folder: Path) -> None:
    """Write a run of one step."""
    from gradflow_export.records.step_record import Reading, RunInfo, StepRecord
    from gradflow_export.writers import make_writer

    writer = make_writer("tensorboard", folder)
    writer.open(RunInfo(session="1732143600123-0", started=1732143600.123, model="MLP", parameters=7))
    writer.write(StepRecord(1, 1732143601.0, (Reading.run("loss", 2.5),)))
    writer.close()


OF_OTHERS_PACKAGES = {
    name for name in modules() if name.startswith(f"{CORE}.integrations.") and not name.endswith(".base")
}
"""What needs a framework that is not installed everywhere: ``make test-frameworks`` imports it."""


@pytest.mark.parametrize("backwards", [False, True])
def test_every_module_can_be_imported(backwards, programs):
    """All modules of both packages are imported in a process without them, by name and in the opposite order."""
    names = [name for name in modules() if not name.endswith("__main__") and name not in OF_OTHERS_PACKAGES]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = programs.start(code, *sorted(names, reverse=backwards))
    assert done.wait() == 0, done.err
