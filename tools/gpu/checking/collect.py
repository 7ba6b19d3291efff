"""The compiled kernels that a section of gpu_check launches.

    python -m tools.gpu.checking.collect SECTION --part FILE ...

The section's own code runs on a dummy device, at the sizes and on the paths of the real one, and every requested kernel
is recorded. Results are zeros, so that a case's comparisons fail after its launches; those of tests are ignored
(`make_lenient`). Then each kernel is compiled into the section's bundle. The last line printed is JSON: {"kernels",
"compiled", "refused": {kernel: why}, "odd": {case: error}, "cases": {case: [kernel]}}.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np

from numba_kernels.cuda.specialisation import Specialisation
from runtime.device import device as device_module
from runtime.device import gpu as gpu_module
from runtime.device import nccl as nccl_module
from runtime.device.compiled_kernel import CompiledKernel, image_kind, write_bundle
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.errors import CompileError
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache, KernelList, is_meant_for
from runtime.device.kernel_key import kernel_index
from runtime.device.nccl import Nccl
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.emulator.nccl.emulated_nccl import DryNccl
from runtime.engine.config import EngineConfig
from runtime.engine.model_kernels import kernels_of_model
from runtime.tensor import arithmetic
from tools.gpu.checking.worker import outcome
from tools.gpu.sections import ROOT, Options, Section, find
from tools.gpu.serving.models import config_of, quick_weights_of

EXPECTED = ("AssertionError", "Failed: DID NOT RAISE", "BenchmarkError")
"""Errors that comparisons of zeros end in. Any other may hide launches."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.checking.collect")
    parser.add_argument("section")
    parser.add_argument("--device", required=True, help="cuda:0, or emulated:sm_90a for kernels as PTX")
    parser.add_argument("--arch", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", type=Path, required=True, help="the bundle to write; none where nothing is launched")
    asked = parser.parse_args(arguments)
    section, options = find(asked.section), Options(asked.device, asked.quick, is_dry=True)
    found, launched = dry_device(asked.device, asked.arch)
    odd, cases = run_dry(section, options, launched)
    wanted = [*found.specialisations, *served(section, options, asked.arch)]
    kernels, refused, compiled = compile_all(wanted, asked.arch, is_ptx=not options.is_real)
    if kernels:
        write_bundle(asked.part, kernels)
    print()
    print(json.dumps({"kernels": len(kernels), "compiled": compiled, "refused": refused, "odd": odd, "cases": cases}))
    return 0


def dry_device(name: str, arch: str) -> tuple[KernelList, set[str]]:
    """Replaces the device of that name by a dummy for the rest of the process; returns the kernels requested of it, and
    the set to which it adds the names of those that it launches."""
    device, noting = Device(name), NotingDriver(arch)
    driver = _DryDriver(noting, cuda_bindings("the kernels' compiler"), arch=device.arch)
    driver.call("cuInit", 0)
    for module in (device_module, gpu_module):
        vars(module)["open_driver"] = lambda arch=None: driver
    vars(nccl_module)["load"] = lambda: Nccl(DryNccl(driver.api), is_emulated=True, is_dry=True)
    found = KernelList()
    Gpu(device, driver, kernel_cache=found).install()
    return found, noting.launched


class NotingDriver(DryDriver):
    """Notes the names of the kernels that it is to launch, in `launched`."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self._names: dict[int, str] = {}
        self.launched: set[str] = set()

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, int]:
        status, function = self._new()
        self._names[function] = name.decode()
        return status, function

    def cuLaunchKernelEx(self, config: Any, function: Any, *_: Any) -> tuple[Any]:
        self.launched.add(self._names[int(function)])
        return self._accept()


class _DryDriver(Driver):
    """A dummy driver, with the emulator's C functions in place of a real driver's."""

    def c_function(self, name: str, prototype: Any) -> Any:
        return prototype(getattr(self.api, name))


def run_dry(section: Section, options: Options, launched: set[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Runs the cases; returns errors other than failed comparisons, and the names of launched kernels, both by case."""
    errors: dict[str, str] = {}
    cases: dict[str, list[str]] = {}
    if section.is_session:
        make_lenient()

        def report(**line: Any) -> None:
            if "begin" in line:
                launched.clear()
            if "end" in line:
                cases[line["end"]] = sorted(launched)
            if "error" in line:
                errors[line["end"]] = line["error"].split("\n")[0]

        section.start(options, (), report)
    else:
        for case in section.start(options):
            launched.clear()
            found = outcome(case)
            cases[case.name] = sorted(launched)
            if "error" in found:
                errors[case.name] = found["error"]
    odd = {name: error[:300] for name, error in errors.items() if not any(kind in error for kind in EXPECTED)}
    return odd, cases


def served(section: Section, options: Options, arch: str) -> list[Specialisation]:
    """The kernels for serving the section's models, in batches and prompts of all kinds."""
    found = []
    for name in section.models:
        with tempfile.TemporaryDirectory() as folder, quick_weights_of(name):
            (Path(folder) / "config.json").write_text(json.dumps(config_of(options, name)), encoding="utf-8")
            found += kernels_of_model(Path(folder), arch, EngineConfig(dtype="bfloat16"))
    return found


def compile_all(
    wanted: Sequence[Specialisation], arch: str, *, is_ptx: bool
) -> tuple[list[tuple[Specialisation, CompiledKernel]], dict[str, str], int]:
    """Compiles each kernel once; returns the errors, and the number that was not on disk yet."""
    cache = KernelCache()
    unique = {kernel_index(each, arch, image_kind(is_ptx)): each for each in wanted if is_meant_for(each, arch)}
    kernels, refused = [], {}
    for number, each in enumerate(unique.values(), 1):
        print(f"\r{number}/{len(unique)} {each.name[:60]:<60}", end="", file=sys.stderr, flush=True)
        try:
            kernels.append((each, cache.get(each, arch, is_ptx=is_ptx)))
        except CompileError as error:
            refused[each.name] = str(error)[:500]
    return kernels, refused, cache.num_compiled


def make_lenient() -> None:
    """Makes tests continue after failures until the process ends, so that a dummy device sees all of their launches.

    In modules of `tests` imported afterwards, assertions are evaluated and their outcome is ignored; a call statement
    may raise AssertionError, or the IndexError of a comparison of zeros. `pytest.raises` passes without an error.
    Divisors may be zero. Nested functions are unchanged: kernels are among them.
    """
    of_arithmetic = vars(arithmetic)
    for each in (np.floor_divide, np.remainder):  # results, and so divisors, are zeros
        of_arithmetic[each.__name__] = of_arithmetic["_binary_operation"](
            each.__name__, each, of_arithmetic["_as_number"]
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "tests":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and str(spec.origin).startswith(str(ROOT)):
            spec.loader = _Loader(fullname, str(spec.origin))
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Always compiles from the source: the result must not reach a cache of compiled files."""
        path = self.get_filename(fullname)
        tree = _Ignoring().visit(ast.parse(self.get_data(path), path))
        code: types.CodeType = compile(ast.fix_missing_locations(tree), path, "exec")
        return code


class _Ignoring(ast.NodeTransformer):
    def __init__(self) -> None:
        self._is_in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self._is_in_function:
            return node
        self._is_in_function = True
        self.generic_visit(node)
        self._is_in_function = False
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return _tried(node, ast.copy_location(ast.Expr(node.test), node), ["Exception"])

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        calls = [each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)]
        is_raises = any(isinstance(call.func, ast.Attribute) and call.func.attr == "raises" for call in calls)
        return _tried(node, node, ["BaseException"]) if is_raises else node  # pytest's own are not Exceptions

    def visit_Expr(self, node: ast.Expr) -> Any:
        is_call = isinstance(node.value, ast.Call)
        return _tried(node, node, ["AssertionError", "IndexError"]) if is_call else node


def _tried(node: ast.stmt, statement: ast.stmt, errors: list[str]) -> ast.stmt:
    names = ast.Tuple([ast.Name(error, ast.Load()) for error in errors], ast.Load())
    handler = ast.ExceptHandler(names, None, [ast.Pass()])
    return ast.copy_location(ast.Try([statement], [handler], [], []), node)


if __name__ == "__main__":
    sys.exit(main())
