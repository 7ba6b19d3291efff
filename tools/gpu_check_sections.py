"""What gpu_check does, cut into sections, each of which runs in a process of its own."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "ml_dtypes", "safetensors", "torch", "msgspec",
    "regex", "jinja2", "huggingface_hub", "rich", "pytest", "pytest-asyncio", "hypothesis",
)  # fmt: skip
MOST_TEST_WORKERS = 8

Result = dict[str, Any]
Report = Callable[[Result], None]


@dataclass(frozen=True)
class Options:
    """What a section is told: the device's name, and whether sizes are to be tiny."""

    device: str
    is_quick: bool

    @property
    def is_real(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
        name: "kernels", "model gpt2", "tests test_gemm_on_hardware".
        limit_s: seconds after which its process is ended.
        run: does it; what it reports on the way is kept if it never returns. Raises AssertionError and others where
            something is wrong.
        needs_hardware: whether an emulated device cannot do it.
    """

    name: str
    limit_s: float
    run: Callable[[Options, Report], Result]
    needs_hardware: bool = False


def sections() -> Iterator[Section]:
    """All of them, the most telling first."""
    yield Section("environment", 40, _environment)
    yield Section("bandwidth", 45, _bandwidth)
    yield Section("build", 200, _build)
    yield Section("kernels", 150, _kernels)
    yield Section("goals", 150, _goals)
    yield Section("model gpt2", 60, _model("gpt2"))
    yield Section("model qwen3-0.6b", 70, _model("qwen3-0.6b"))
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        yield Section(f"tests {path.stem}", 180, _tests(path))
    yield Section("model qwen3-8b", 120, _model("qwen3-8b"))
    for tool in ("memcheck", "racecheck", "synccheck"):
        yield Section(f"sanitizer {tool}", 60, _sanitizer(tool), needs_hardware=True)
    yield Section("verification", 60, _verification)


def find(name: str) -> Section:
    """The section of that name. Raises KeyError."""
    return {section.name: section for section in sections()}[name]


def _environment(options: Options, report: Report) -> Result:
    from runtime.bench.environment import describe_machine
    from runtime.device.gpu import Gpu

    result: Result = {"machine": describe_machine(), "packages": {}}
    for name in PACKAGES:
        try:
            result["packages"][name] = version(name)
        except PackageNotFoundError:
            result["packages"][name] = None
    tools = ("nvcc", "ptxas", "ncu", "compute-sanitizer")
    result["tools"] = {name: shutil.which(name) is not None for name in tools}
    result["commit"] = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu"
    result["nvidia_smi"] = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv"])
    report(result)
    gpu = Gpu.of(options.device)
    result["device"] = asdict(gpu.properties) | {"arch": gpu.arch, "driver": gpu.driver.call("cuDriverGetVersion")}
    if options.is_real and result["packages"]["torch"]:
        torch = importlib.import_module("torch")
        result["torch"] = {"cuda": torch.version.cuda, "has_cuda": torch.cuda.is_available()}
    return result


def _output(command: list[str]) -> str | None:
    """What a command says, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _bandwidth(options: Options, report: Report) -> Result:
    from runtime.bench.kernels.bandwidth import bandwidth
    from runtime.bench.kernels.timing import Stopwatch
    from runtime.device.gpu import Gpu

    gpu = Gpu.of(options.device)
    return bandwidth(gpu, Stopwatch(gpu, 2 if options.is_quick else 20), options.is_quick)


def _build(options: Options, report: Report) -> Result:
    from runtime.device.gpu import Gpu
    from tools.gpu_check_build import build

    arch = Gpu.of(options.device).arch
    return build(arch, is_ptx=not options.is_real, is_quick=options.is_quick, report=report)


def _kernels(options: Options, report: Report) -> Result:
    return _table(options, report, has_times=True)


def _verification(options: Options, report: Report) -> Result:
    """The quick cases on the device, results alone: what compute-sanitizer watches."""
    return _table(Options(options.device, True), report, has_times=False)


def _table(options: Options, report: Report, *, has_times: bool) -> Result:
    from runtime.bench.kernels.timing import Stopwatch
    from runtime.device.gpu import Gpu
    from tools.gpu_check_kernels import kernel_table

    gpu = Gpu.of(options.device)
    rows: list[Result] = []

    def add(row: Result) -> None:
        rows.append(row)
        report({"rows": rows})

    kernel_table(gpu, Stopwatch(gpu, 2 if options.is_quick else 30), options.is_quick, add, has_times=has_times)
    if wrong := [row for row in rows if "error" in row]:
        raise AssertionError(f"{len(wrong)} of {len(rows)} cases failed, {wrong[0]['case']}: {wrong[0]['error']}")
    return {"rows": rows}


def _goals(options: Options, report: Report) -> Result:
    """`xserv bench kernels`, part by part, so that one that fails costs no other: what fills the goals' table."""
    from runtime.bench.kernels.bench_kernels import PARTS, bench_kernels

    result: Result = {}
    wrong = []
    for part in PARTS:
        try:
            found = bench_kernels(options.device, parts=(part,), report_progress=lambda line: print(line, flush=True))
        except Exception as error:
            wrong.append(f"{part}: {type(error).__name__}: {error}")
            continue
        result = found | {"rows": [*result.get("rows", []), *found["rows"]]}
        report(result)
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(PARTS)} parts failed; {'; '.join(wrong)}")
    return result


def _model(name: str) -> Callable[[Options, Report], Result]:
    def run(options: Options, report: Report) -> Result:
        from tools.gpu_check_models import model_figures

        return model_figures(name, options.device, options.is_quick)

    return run


def _tests(path: Path) -> Callable[[Options, Report], Result]:
    """All cases of a file of tests; quick: the first of each test."""

    def run(options: Options, report: Report) -> Result:
        if find_spec("pytest") is None:
            raise AssertionError("pytest is not installed: carry it in --packages")
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "pytest.ini"
            config.write_text(_pytest_config())
            command = [
                sys.executable, "-m", "pytest", "-c", str(config), "--rootdir", str(ROOT),
                "-p", "no:cacheprovider", "-q", "-rs", "--tb=short", "-m", "gpu", str(path),
            ]  # fmt: skip
            if options.is_real and find_spec("xdist") is not None:  # what takes long is compiling
                command += ["-p", "xdist", "-n", str(min(MOST_TEST_WORKERS, len(os.sched_getaffinity(0))))]
            told = {
                "XSERV_TEST_DEVICE": options.device,
                "XSERV_TEST_CASES": "first" if options.is_quick else "all",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins warn, and a warning is an error
            }
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | told)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        report({"summary": last})
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:])
            raise AssertionError(f"pytest: {last or done.stderr.strip()[-300:]}")
        if "passed" not in last or "skipped" in last:
            print(done.stdout[-3000:])
            raise AssertionError(f"tests were skipped on a machine that was said to have a GPU: {last}")
        return {"summary": last}

    return run


def _pytest_config() -> str:
    """pyproject's markers and filters, without the plugins that it names and a plain image has not."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]"]
    for name in ("markers", "filterwarnings"):
        lines += [f"{name} =", *(f"    {line}" for line in options[name])]
    return "\n".join(lines) + "\n"


def _sanitizer(tool: str) -> Callable[[Options, Report], Result]:
    def run(options: Options, report: Report) -> Result:
        program = shutil.which("compute-sanitizer")
        if program is None:
            return {"skipped": "compute-sanitizer is not on PATH"}
        command = [
            program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20", sys.executable, "-m",
            "tools.gpu_check", "--device", options.device, "--run-section", "verification",
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            command += ["--result", str(Path(folder) / "result.json")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
        lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        report({"lines": lines[-40:]})
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:])
            raise AssertionError(f"compute-sanitizer {tool}: exit status {done.returncode}: {' '.join(lines[-1:])}")
        return {"lines": lines[-5:]}

    return run
