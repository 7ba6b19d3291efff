"""The compiled kernels that a section of gpu_check launches.

    python -m tools.gpu.checking.collect SECTION --part FILE ...

The section's own code runs on a dummy device, at the sizes and on the paths of the real one, and every requested kernel
is recorded. Results are zeros, so that a case's comparisons fail after its launches; those of tests are ignored
(`lenient`). Then each kernel is compiled into the section's bundle. The last line printed is JSON: {"kernels",
"compiled", "refused": {kernel: why}, "odd": {case: error}}.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from tools.gpu.checking import lenient
from tools.gpu.checking.worker import outcome
from tools.gpu.sections import Options, Section, find
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
    found = dry_device(asked.device, asked.arch)
    odd = run_dry(section, options)
    wanted = [*found.specialisations, *served(section, options, asked.arch)]
    kernels, refused, compiled = compile_all(wanted, asked.arch, is_ptx=not options.is_real)
    if kernels:
        write_bundle(asked.part, kernels)
    print()
    print(json.dumps({"kernels": len(kernels), "compiled": compiled, "refused": refused, "odd": odd}))
    return 0


def dry_device(name: str, arch: str) -> KernelList:
    """Replaces the device of that name by a dummy for the rest of the process; returns the kernels requested of it."""
    device = Device(name)
    driver = _DryDriver(DryDriver(arch), cuda_bindings("the kernels' compiler"), arch=device.arch)
    driver.call("cuInit", 0)
    for module in (device_module, gpu_module):
        vars(module)["open_driver"] = lambda arch=None: driver
    vars(nccl_module)["load"] = lambda: Nccl(DryNccl(driver.api), is_emulated=True, is_dry=True)
    found = KernelList()
    Gpu(device, driver, kernel_cache=found).install()
    return found


class _DryDriver(Driver):
    """A dummy driver, with the emulator's C functions in place of a real driver's."""

    def c_function(self, name: str, prototype: Any) -> Any:
        return prototype(getattr(self.api, name))


def run_dry(section: Section, options: Options) -> dict[str, str]:
    """Runs the cases; returns errors other than failed comparisons, by case."""
    errors: dict[str, str] = {}
    if section.is_session:
        lenient.install()

        def report(**line: Any) -> None:
            if "error" in line:
                errors[line["end"]] = line["error"].split("\n")[0]

        section.start(options, (), report)
    else:
        for case in section.start(options):
            found = outcome(case)
            if "error" in found:
                errors[case.name] = found["error"]
    return {name: error[:300] for name, error in errors.items() if not any(kind in error for kind in EXPECTED)}


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


if __name__ == "__main__":
    sys.exit(main())
