"""The machine, its tools and packages, and the device: the context of all other results."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict

from runtime.bench.environment import describe_machine
from runtime.device.assemble import require_compiler
from runtime.device.errors import CompileError
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from runtime.device.kernel_key import tool_versions
from tools.gpu.checking.unpack import installed
from tools.gpu.sections import ROOT, Case, Options, Result

PACKAGES = (
    "numpy", "numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core", "cuda-pathfinder", "ml_dtypes",
    "safetensors", "torch", "triton", "nvidia-cublas", "nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-nvrtc",
    "msgspec", "regex", "jinja2", "pytest", "hypothesis",
)  # fmt: skip
TOOLS = ("nvcc", "ptxas", "ncu", "compute-sanitizer", "nvidia-smi")


def cases(options: Options) -> Iterator[Case]:
    yield Case("machine", _machine)
    yield Case("packages", lambda: {name: installed(name) for name in PACKAGES})
    yield Case("tools", lambda: {name: shutil.which(name) for name in TOOLS})
    yield Case("nvidia-smi", _nvidia_smi)
    yield Case("device", lambda: _device(options))
    yield Case("kernels", _kernels)
    if options.is_real and not options.is_dry:
        yield Case("torch", _torch)


def _machine() -> Result:
    return describe_machine() | {"commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")}


def _output(*command: str) -> str | None:
    """A command's output, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvidia_smi() -> Result:
    names = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu"
    said = _output("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader")
    if said is None:
        return {"skipped": "nvidia-smi is missing, or fails"}
    return dict(zip(names.split(","), (word.strip() for word in said.splitlines()[0].split(","))))


def _device(options: Options) -> Result:
    gpu = Gpu.of(options.device)
    return asdict(gpu.properties) | {"arch": gpu.arch, "driver": gpu.driver.call("cuDriverGetVersion")}


def _kernels() -> Result:
    """The bundles in the cache of kernels, and the compiler, if installed."""
    try:
        require_compiler()
        compiler = tool_versions()
    except CompileError as error:
        compiler = str(error)
    bundles = [
        {
            "name": bundle.path.name, "kernels": len(bundle), "arch": bundle.arch, "image": bundle.image_kind,
            "is_current": bundle.is_current,
        }
        for bundle in KernelCache().bundles
    ]  # fmt: skip
    return {"bundles": bundles, "compiler": compiler}


def _torch() -> Result:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return {"skipped": f"torch is not installed ({error})"}
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "has_cuda": torch.cuda.is_available()}
