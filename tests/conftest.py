"""Rules of all tests.

- A kernel launched on an emulated device must be fit for hardware, too.
- Work that is recorded on a GPU keeps no memory of the run before it (`recordings`).
- Python's collector looks at lasting objects once: it would take a sixth of the time otherwise.
- Tests of whole engines and servers compute on one thread; in others, threads that help sleep after 20 us without work.
- Processes of engines and ranks are forked, since their imports took a twelfth of all processor time (`fork_server`).
- Clients of one process share the certificates that they trust, which take longer to read than a server to start.
- There are two workers more than there are cores: tests wait for a third of their time. Each begins with other files.
"""

from __future__ import annotations

import gc
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from numba_kernels.cpu.running import pool
from runtime.device.assemble import require_compiler
from runtime.device.errors import CompileError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.device.kernel_cache import KernelCache, KernelList
from runtime.engine.process import spawning
from tests import fork_server, recordings
from tests.kernel_budget import Loaded, is_over_budget
from tests.selection import mark_cases, refuse_empty_names, refuse_unregistered_marks

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation
    from runtime.device.kernel import Kernel

ONE_THREAD = (
    "tests/clients/", "tests/runtime/bench/", "tests/runtime/commands/", "tests/runtime/engine/grammar/",
    "tests/runtime/engine/logits/", "tests/runtime/engine/process/", "tests/runtime/engine/scheduling/",
    "tests/runtime/engine/speculation/", "tests/runtime/engine/test_", "tests/runtime/engine/weights/",
    "tests/runtime/llm/", "tests/runtime/parallel/", "tests/server/", "tests/test_",
)  # fmt: skip
"""Tests whose kernels run on one thread, in this process and in those that it starts. Threads that wait for small
kernels spin, which took a third of the processor time of a server's tests. Kernels, operations, models, steps,
transfers and ranks keep all threads."""

THREADS = "NUMBA_NUM_THREADS"
_given_threads = os.environ.get(THREADS)

OURS = "numba_kernels.cuda."  # tests have kernels of their own, which may do as they like

_loaded: list[tuple[Specialisation, str]] = []
_examined: set[tuple[Specialisation, str]] = set()
_assembled: set[tuple[object, str]] = set()  # the code of a kernel without its constants, and an architecture
_load = Gpu.kernel
_budget = Loaded()


def _record(gpu: Gpu, specialisation: Specialisation) -> Kernel:
    key = specialisation, gpu.arch
    is_ours = specialisation.kernel.py_func.__module__.startswith(OURS)
    if key not in _examined and gpu.driver.is_emulated and is_ours and not isinstance(gpu.kernel_cache, KernelList):
        kernel = _budget.load(_load, gpu, specialisation)
        _examined.add(key)
        _loaded.append(key)
        _budget.names.add(specialisation.name)
        return kernel
    return _load(gpu, specialisation)


pool.SPIN_ROUNDS = 500  # of 20,000: between the small kernels of tests, helpers would take a core from other workers
Gpu.kernel = _record  # type: ignore[method-assign]
Graph.capture = staticmethod(recordings.capture)  # type: ignore[method-assign]
spawning.spawn = fork_server.spawn
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of workers that `--numprocesses auto` starts. With one that waits for a third of its time, 3 use 89 %
    of two cores and 4 use 97 %."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2


def pytest_configure(config: pytest.Config) -> None:
    """Workers report a test's result alone: the starts of tests, and setups and teardowns that were quick and passed,
    took a third of what reporting 14,000 tests costs."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = partial(_send, plugin.sendevent)


def _send(send: Callable[..., None], name: str, **event: Any) -> None:
    data = event.get("data", {})
    is_quiet = data.get("outcome") == "passed" and not data.get("sections") and data.get("duration", 1.0) < 0.1
    if name != "logstart" and not (name == "testreport" and data["when"] != "call" and is_quiet):
        send(name, **event)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # modules and items, a million objects, live until the end
    if (worker := getattr(session.config, "workerinput", None)) is not None:
        _import_from(int(worker["workerid"].removeprefix("gw")) / worker["workercount"], session.config)


def _import_from(part: float, config: pytest.Config) -> None:
    """Imports all tests that were asked for, beginning after a part of them. In a fresh checkout each worker would
    compile each file, in the same order; so each file is compiled by one. Errors are left to pytest, which collects the
    files afterwards: the first worker imports none before that."""
    root, asked = config.rootpath, [Path(each.partition("::")[0]).resolve() for each in config.args]
    files = [file for file in sorted(root.glob("tests/**/test_*.py")) if any(map(file.is_relative_to, asked))]
    first = int(part * len(files))
    for file in [*files[first:], *files[:first]] if part else []:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    refuse_unregistered_marks(config)
    mark_cases(items, config)
    yield
    refuse_empty_names(items, config)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread for the tests of `ONE_THREAD`, all threads for others."""
    has_one = item.nodeid.startswith(ONE_THREAD)
    pool.limit_threads(1 if has_one else pool.NUM_THREADS)
    if has_one or _given_threads is not None:
        os.environ[THREADS] = "1" if has_one else str(_given_threads)
    else:
        os.environ.pop(THREADS, None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file of tests has left (compilers keep millions of objects) is looked at once: a collection takes seconds
    else, and tests that watch memory ask for several."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    if "kernels" in getattr(node, "workeroutput", {}):
        _budget.add(*node.workeroutput["kernels"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernels"] = _budget.plain()
    elif is_over_budget(_budget, session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _budget.names:
        terminalreporter.write_line(str(_budget), red=is_over_budget(_budget, config))


@pytest.fixture(autouse=True)
def kernels_are_fit_for_hardware() -> Iterator[None]:
    """Fails a test that is the first to load a kernel that uses local memory or float64. The first kernel of each code,
    whatever its constants, may not spill either, have ptxas complain, or have machine code that is not as meant (it is
    read where nvdisasm is installed). The emulator would not mind any of it. ptxas and nvdisasm take a second a kernel:
    `tests/tools/test_kernel_report.py` has all of them assembled, on all architectures. Without the kernels' compiler
    they come out of a bundle, and were examined where that was made."""
    yield
    if _loaded and _has_compiler():
        from tools.kernel_costs.machine_code import nvdisasm_if_any
        from tools.kernel_costs.static import examine, examine_text
        from tools.kernel_report import offenders

        cache, nvdisasm = KernelCache(), nvdisasm_if_any()
        loaded, facts = _loaded.copy(), []
        _loaded.clear()
        assert [words for each, arch in loaded for words in examine_text(each, arch, cache)] == []
        for each, arch in loaded:
            if (key := (_code_of(each), arch)) not in _assembled:
                _assembled.add(key)
                facts += examine(each, (arch,), cache, nvdisasm)
        assert offenders(facts, []) == []


def _code_of(specialisation: Specialisation) -> tuple[object, ...]:
    """A kernel's code and that of the functions given to its factory, such as those of `riding.product_kernel`."""
    function = specialisation.kernel.py_func
    given = [getattr(cell.cell_contents, "py_func", None) for cell in function.__closure__ or ()]
    return function.__code__, *(each.__code__ for each in given if each is not None)


def _has_compiler() -> bool:
    try:
        require_compiler()
    except CompileError:
        return False
    return True
