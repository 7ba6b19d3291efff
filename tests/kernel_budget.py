"""How many GPU kernels the tests of a run load on emulated devices, and what it took to compile them.

A kernel takes seconds to compile, whichever test wants it first, so that the number of different kernels decides how
long `make test` takes on a clean checkout. `MOST_KERNELS` is the budget of the default tests: a run of all of them that
loads more fails. A new test takes a kernel that others have, in place of another one, or is for `make test-all`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from runtime.device import gpu as gpus
from runtime.device.kernel_cache import default_folder

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation
    from runtime.device.gpu import Gpu
    from runtime.device.kernel import Kernel

MOST_KERNELS = 256
"""Names of kernels, each of which Numba compiles once for all architectures. A run of all has 256 (2026-12-01): a
new one in a default test takes another's place."""
DEFAULT = "not exhaustive"
LASTING = default_folder()


@dataclass(slots=True)
class Loaded:
    """What one process, or all of a run together, has loaded; subprocesses of tests are not seen."""

    names: set[str] = field(default_factory=set)
    num_compiled: int = 0
    cpu_s: float = 0.0

    def load(self, load: Callable[[Gpu, Specialisation], Kernel], gpu: Gpu, specialisation: Specialisation) -> Kernel:
        """`load`, counted."""
        before, began = gpu.kernel_cache.num_compiled, time.thread_time()
        kernel = load(gpu, specialisation)
        if gpu.kernel_cache.num_compiled > before:
            folders = LASTING, default_folder()
            is_old = gpus._opened.get(gpu.device.type) is gpu and gpu.kernel_cache.folder not in folders
            assert not is_old, f"a test has opened {gpu.device} with a folder of its own: all kernels are compiled anew"
            self.num_compiled += 1
            self.cpu_s += time.thread_time() - began
        return kernel

    def add(self, names: list[str], num_compiled: int, cpu_s: float) -> None:
        """What a worker has loaded."""
        self.names |= set(names)
        self.num_compiled += num_compiled
        self.cpu_s += cpu_s

    def plain(self) -> list[Any]:
        """The arguments of `add`, as a worker sends them."""
        return [sorted(self.names), self.num_compiled, self.cpu_s]

    def __str__(self) -> str:
        return (
            f"{len(self.names)} GPU kernels (budget of the default tests: {MOST_KERNELS}); {self.num_compiled} were "
            f"compiled, in {self.cpu_s:.0f} CPU seconds"
        )


def is_over_budget(loaded: Loaded, config: pytest.Config) -> bool:
    """Whether the default tests, all of them, load more kernels than they may."""
    is_whole = config.option.markexpr == DEFAULT and not config.option.keyword
    return is_whole and config.args == config.getini("testpaths") and len(loaded.names) > MOST_KERNELS
