"""Who may import whom: the floor plan of docs/architecture.md, held against every import in the packages.

Read with `ast`, so nothing is executed. Functions import nothing but a few libraries, named here, and no type is
imported for type checkers alone. A name taken from a package that hands it on lazily counts as an import of the file
that it comes from. Beside the floors stand rules for tools, for other engines and for what executes its input.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numba_kernels", "tokenizer", "runtime", "models", "server")

# Module or package: its floor. The longest match counts. Files of a room at one floor may import each other.
FLOORS = {
    "numba_kernels.cuda.intrinsics": 1,
    "runtime.call_sites": 1,
    "runtime.dtype": 1,
    "runtime.errors": 1,
    "runtime.later": 1,
    "runtime.own_packages": 1,
    "runtime.progress": 1,
    "runtime.text_files": 1,
    "runtime.collector": 1,
    "runtime.images": 1,
    "runtime.version": 1,
    "tokenizer": 1,
    "numba_kernels": 2,
    "numba_kernels.cache": 1,
    "numba_kernels.cache_files": 1,
    "numba_kernels.closure_cache": 1,
    "numba_kernels.numba_patches": 1,
    "numba_kernels.source_digests": 1,
    "numba_kernels.pointers": 1,
    "numba_kernels.split_k": 1,
    "numba_kernels.sampler_chain": 1,
    "numba_kernels.latent_rows": 1,
    "runtime.pooling": 1,
    "numba_kernels.cuda": 2,
    "numba_kernels.cpu": 2,
    "runtime.device": 3,
    "runtime.emulator": 3,
    **dict.fromkeys(
        (
            f"runtime.{name}"
            for name in (
                "tensor", "ops", "state_ops", "latent_ops", "batch", "kv", "communicator", "shared_communicator",
                "nccl_communicator", "rank_notices", "sampling_arrays",
                "sampling_table", "linear", "rope_table", "routing", "backends",
            )
        ),
        4,
    ),
    "models": 5,
    "runtime.engine": 6,
    "runtime.text": 6,
    "runtime.parallel": 6,
    "runtime.llm": 7,
    "server": 7,
    "runtime.bench": 8,
    "runtime.commands": 9,
    "runtime.facade": 9,
    "runtime.cli": 9,
}  # fmt: skip

SHARED_BY_THE_TOKENIZER = {"numba_kernels.cache", "numba_kernels.pointers", "runtime.later"}
"""What the tokenizer takes from the rest: where compiled code is kept, how it sees memory, and late imports."""

LATE = {
    "PIL": "of the extra `vision`: its absence is an error that names the extra",
    "cuda": "of the extra `cuda`: its absence is an error that names the extra",
    "opentelemetry": "of the extra `otel`, with --otlp-endpoint alone",
    "packaging": "of the machine with the GPU, in tools",
    "pytest": "of the machine with the GPU, in tools, after a check that it is there",
    "ray": "of the extra `ray`: its absence is an error that names the extra",
    "uvloop": "of the bench of a running server, which does without",
    **dict.fromkeys(
        ("gguf", "llama_cpp", "tiktoken", "tokenizers", "torch", "peft", "transformers"), "of peers' Pythons"
    ),
    **dict.fromkeys(("compressed_tensors", "gptqmodel", "modelopt", "safetensors"), "of the references' Python"),
}
"""Libraries that a function may import, and why. Everything else is imported at the top, or by `runtime.later`."""
AFTER_A_CHECK = {"runtime.facade.xserv": "runtime", "runtime.facade.xserv.command": "runtime.cli"}
"""The package that users import takes ours once it knows that no folder of theirs hides them."""

FOR_TYPE_CHECKERS = {
    "runtime": "names that the package hands on lazily",
    "runtime.facade.xserv": "names that the package hands on lazily",
    "runtime.engine.sampling_params": "a class that is made of a table",
    "runtime.tensor.tensor": "a method that would let every misspelt attribute pass",
}
"""Modules with code for type checkers alone, or hidden from them, and why. None imports a type so."""

PEERS = {f"runtime.bench.peers.peer_{name}" for name in ("child", "transformers", "llama")}
"""Scripts that another Python runs, against other engines. Nobody else imports them."""

EXECUTING = {f"runtime.engine.steps.{name}" for name in (
    "step_input", "executor", "local_executor", "sampling_results", "persistent_batch", "sampler", "layout",
    "pooling_pass", "inputs", "forwards", "recorder", "recorder_cpu", "recorder_gpu", "decode_arrays", "decode_graphs",
)}  # fmt: skip
PLANNING = ("runtime.engine.scheduling", "runtime.engine.steps.assemble", "runtime.engine.open_requests")
"""An executor knows steps by their value alone: what runs them reads no sequence, request or plan."""

FOREIGN = {"torch", "transformers", "tensorflow", "jax", "llama_cpp", "gguf"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
IMPORTERS = {
    "runtime.later",  # whose callers' names count
    "runtime.engine.logits.processors",  # names that the user of an engine gives, never a request or a model
}
UNSAFE_CALLS = {"eval", "exec", "__import__"}
UNSAFE_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}


@dataclass
class Module:
    """What one file imports and calls, as far as the rules care."""

    name: str
    is_package: bool
    imports: list[tuple[str, int]] = field(default_factory=list)  # dotted name, perhaps of an attribute; line
    late_imports: list[tuple[str, int]] = field(default_factory=list)  # those inside functions
    is_for_type_checkers: bool = False  # some of it
    hazards: list[tuple[str, int]] = field(default_factory=list)
    lazy_names: dict[str, str] = field(default_factory=dict)  # name that the package hands on: its module


class Reader(ast.NodeVisitor):
    """Collects a Module from its syntax tree."""

    def __init__(self, module: Module) -> None:
        self.module, self.depth = module, 0

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            self.module.is_for_type_checkers = True
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def note(self, names: list[tuple[str, int]]) -> None:
        self.module.imports += names
        if self.depth:
            self.module.late_imports += names

    def visit_Import(self, node: ast.Import) -> None:
        self.note([(alias.name, node.lineno) for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.module.name.split(".")
            kept = len(parts) - node.level + self.module.is_package
            base = ".".join([*parts[:kept], *([base] if base else [])])
        self.note([(f"{base}.{alias.name}", node.lineno) for alias in node.names])

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called in ("importlib.import_module", "import_module", "later"):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    self.module.imports.append((name, node.lineno))
                case _ if not (self.module.is_package or self.module.name in IMPORTERS):
                    self.module.hazards.append((f"{called} of a name that is made up at run time", node.lineno))
        if called in UNSAFE_CALLS:
            self.module.hazards.append((f"{called}()", node.lineno))
        if any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
            self.module.hazards.append(("allow_pickle", node.lineno))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in UNSAFE_ATTRIBUTES:
            self.module.hazards.append((f"{node.value.id}.{node.attr}", node.lineno))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        if self.module.is_package:
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    self.module.lazy_names[str(key.value)] = str(value.value)
        self.generic_visit(node)


@functools.cache
def read_tree(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Module]:
    """Every module of the packages beneath `root`, by dotted name."""
    modules = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            module = read_module(root, path)
            modules[module.name] = module
    return modules


@functools.cache
def read_module(root: Path, path: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = Module(".".join(parts[:-1] if is_package else parts), is_package)
    Reader(module).visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return module


def resolve(name: str, modules: dict[str, Module]) -> str | None:
    """The module of ours behind an imported dotted name: itself or what hands it on; None if not ours."""
    if name.partition(".")[0] not in (*PACKAGES, "tools", "tests"):
        return None
    if name in modules:
        return name
    parent, _, attribute = name.rpartition(".")
    if parent not in modules:
        return resolve(parent, modules) if parent else name
    lazy = modules[parent].lazy_names.get(attribute)
    return resolve(lazy, modules) if lazy else parent


def floor_of(name: str) -> int | None:
    while name:
        if name in FLOORS:
            return FLOORS[name]
        name = name.rpartition(".")[0]
    return None


def arrows(modules: dict[str, Module]) -> dict[str, dict[str, int]]:
    """importer: {imported module of ours: line}."""
    found: dict[str, dict[str, int]] = {}
    for module in modules.values():
        for name, line in module.imports:
            target = resolve(name, modules)
            if target is not None and target != module.name:
                found.setdefault(module.name, {}).setdefault(target, line)
    return found


def circles(graph: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """One circle for each set of files that reach each other."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in graph.get(name, {}):
            circle = walk(target, [*path, name])
            if circle:
                return circle
        done.add(name)
        return None

    for name in list(graph):
        circle = walk(name, [])
        if circle:
            done.update(circle)
            yield circle


def violations(root: Path) -> list[str]:
    """What breaks the plan in the packages beneath `root`, one line each."""
    modules = read_tree(root)
    graph = arrows(modules)
    found = []
    for module in modules.values():
        floor = floor_of(module.name)
        if floor is None and module.name != "runtime":
            found.append(f"{module.name} has no floor in the plan")
        for target, line in graph.get(module.name, {}).items():
            where = f"{module.name}:{line} imports {target}"
            target_floor = floor_of(target)
            top = target.partition(".")[0]
            if top in ("tools", "tests"):
                found.append(f"{where}: {top} is imported by nobody")
            elif (
                module.name.partition(".")[0] == "tokenizer"
                and top != "tokenizer"
                and target not in SHARED_BY_THE_TOKENIZER
            ):
                found.append(f"{where}: the tokenizer imports nothing of ours")
            elif module.name in EXECUTING and target.startswith(PLANNING):
                found.append(f"{where}: an executor sees no sequences")
            elif target in PEERS:
                found.append(f"{where}: peers are run, not imported")
            elif floor is None or (target_floor is not None and target_floor > floor):
                found.append(f"{where}: floor {floor} -> {target_floor}")
        for name, line in module.imports:
            top = name.partition(".")[0]
            if top in FOREIGN and module.name not in PEERS:
                found.append(f"{module.name}:{line} imports {name}: other engines stay outside")
            if top in UNSAFE_MODULES:
                found.append(f"{module.name}:{line} imports {name}: unsafe to load")
        found += [f"{module.name}:{line} uses {hazard}: unsafe" for hazard, line in module.hazards]
    found += [f"circle: {' -> '.join(circle)}" for circle in circles(graph)]
    return [*found, *late(modules)]


def late(modules: dict[str, Module]) -> Iterator[str]:
    """Imports inside functions, and code for type checkers, that are not among the named ones."""
    for module in modules.values():
        for name, line in module.late_imports:
            is_checked = name.startswith(AFTER_A_CHECK.get(module.name, "no module"))
            if name.partition(".")[0] not in LATE and not is_checked:
                yield f"{module.name}:{line} imports {name} late"
        if module.is_for_type_checkers and module.name not in FOR_TYPE_CHECKERS:
            yield f"{module.name} has code for type checkers alone"


def test_the_tree_keeps_to_the_plan() -> None:
    assert violations(ROOT) == []


def test_tools_import_at_the_top_and_each_exception_is_needed() -> None:
    modules = read_tree(ROOT, (*PACKAGES, "tools"))
    assert list(late(modules)) == []
    assert LATE.keys() <= {name.partition(".")[0] for each in modules.values() for name, _ in each.late_imports}
    assert AFTER_A_CHECK.keys() <= {module.name for module in modules.values() if module.late_imports}
    assert FOR_TYPE_CHECKERS.keys() == {module.name for module in modules.values() if module.is_for_type_checkers}


def test_the_check_reads_the_whole_tree() -> None:
    modules = read_tree(ROOT)
    known = {"runtime.tensor.tensor", "tokenizer.tokenizer", "server.app", "models.families.llama", "runtime.cli"}
    assert known <= set(modules)
    graph = arrows(modules)
    assert "runtime.dtype" in graph["runtime.tensor.tensor"]
    assert resolve("runtime.LLM", modules) == "runtime.llm"
    assert resolve("runtime.tensor.tensor.Tensor", modules) == "runtime.tensor.tensor"
    assert resolve("numpy.ndarray", modules) is None


GOOD = {
    "runtime/__init__.py": '_HOME = {"LLM": "runtime.llm"}\n',
    "runtime/dtype.py": "import numpy\n",
    "runtime/tensor/tensor.py": "from runtime.dtype import x\n",
    "runtime/ops.py": "from runtime.tensor import tensor\n",
    "runtime/engine/engine.py": "from runtime.engine import engine\n",
    "runtime/llm.py": "from models import base\n",
    "models/__init__.py": "",
    "models/base.py": "import typing\nfrom runtime.tensor.tensor import Tensor\ndef f():\n    import PIL.Image\n",
    "server/app.py": "from runtime import LLM\nimport models.base as base\n",
    "tokenizer/bpe.py": "from . import merges\n",
    "tokenizer/merges.py": "import regex\n",
    "tokenizer/__init__.py": "from .bpe import f\n",
    "runtime/bench/peers/peer_transformers.py": "import torch\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**GOOD, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_good_tree_passes(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("runtime/dtype.py", "import runtime.tensor.tensor", "dtype:1 imports runtime.tensor.tensor: floor 1 -> 4"),
        ("runtime/dtype.py", "def f():\n  from runtime.tensor.tensor import Tensor", "floor 1 -> 4"),
        (
            "runtime/dtype.py",
            "class C:\n  try:\n    from runtime.tensor import tensor\n  except E: pass",
            "floor 1 -> 4",
        ),
        ("models/base.py", "from runtime import LLM", "models.base:1 imports runtime.llm: floor 5 -> 7"),
        ("models/base.py", "import importlib\nimportlib.import_module('runtime.llm')", "floor 5 -> 7"),
        ("models/base.py", "if TYPE_CHECKING:\n  pass\nelse:\n  import server.app", "floor 5 -> 7"),
        ("models/base.py", "from models.x import y\nfrom runtime.engine.engine import z", "floor 5 -> 6"),
        ("models/base.py", "import importlib\nimportlib.import_module(name)", "made up at run time"),
        ("runtime/__init__.py", "from runtime.llm import LLM", "runtime:1 imports runtime.llm: floor None"),
        ("runtime/tensor/storage.py", "from runtime.tensor.tensor import x", "tensor.tensor -> runtime.tensor.storage"),
        ("runtime/ops.py", "from runtime.batch import f", "runtime.batch -> runtime.ops -> runtime.batch"),
        (
            "tokenizer/bpe.py",
            "from runtime.errors import XservError",
            "the tokenizer imports nothing of ours",
        ),
        ("tokenizer/merges.py", "from .bpe import x", "tokenizer.bpe -> tokenizer.merges -> tokenizer.bpe"),
        (
            "runtime/engine/steps/persistent_batch.py",
            "from runtime.engine.scheduling import x",
            "an executor sees no sequences",
        ),
        ("server/app.py", "from tools.serving.soak import run", "tools is imported by nobody"),
        ("server/app.py", "import tests.fakes", "tests is imported by nobody"),
        ("server/app.py", "def f():\n  import torch.nn", "server.app:2 imports torch.nn: other engines"),
        ("models/base.py", "from transformers import AutoModel", "other engines stay outside"),
        ("runtime/llm.py", "import runtime.bench.peers.peer_transformers", "peers are run, not imported"),
        ("server/app.py", "import pickle", "unsafe to load"),
        ("server/app.py", "from cloudpickle import loads", "unsafe to load"),
        ("server/app.py", "x = eval(text)", "uses eval(): unsafe"),
        ("server/app.py", "f = lambda: exec(text)", "uses exec(): unsafe"),
        ("server/app.py", "x = torch.load(path)", "uses torch.load: unsafe"),
        ("server/app.py", "x = np.load(path, allow_pickle=True)", "uses allow_pickle: unsafe"),
        ("models/base.py", "def f():\n  import numpy", "models.base:2 imports numpy late"),
        ("models/base.py", "class C:\n  def f(self):\n    from runtime.dtype import x", "imports runtime.dtype.x late"),
        ("models/base.py", "def f():\n  import runtime.cli", "models.base:2 imports runtime.cli late"),
        ("models/base.py", "if TYPE_CHECKING:\n  from runtime.tensor.tensor import T", "for type checkers alone"),
        ("runtime/attic.py", "", "runtime.attic has no floor in the plan"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, file: str, text: str, expected: str) -> None:
    others = {
        "runtime/tensor/storage.py": {"runtime/tensor/tensor.py": "from runtime.tensor import storage"},
        "runtime/ops.py": {"runtime/batch.py": "from runtime.ops import f"},
        "runtime/engine/steps/persistent_batch.py": {"runtime/engine/scheduling/__init__.py": ""},
    }.get(file, {})
    found = violations(plant(tmp_path, {**others, file: text}))
    assert any(expected in line for line in found), found
