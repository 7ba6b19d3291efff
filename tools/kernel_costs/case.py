"""One line of the kernel report: a launch, and the least that it has to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.kernel_costs.counts import Bench, Work


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report.

    Attributes:
        name, family, shape: what it is called, where it belongs, its sizes in words.
        work: the least that it has to do.
        run: uploads and launches.
        scattered_because: why its accesses cannot fill whole sectors; "" where they should.
        tiled_bytes: the least that its tiling moves, without tables and lengths; 0 where that is not held against it.
        is_on_tensor_cores: whether they should do its products.
        arch: whose emulated GPU it runs on; "": the report's.
    """

    name: str
    family: str
    shape: str
    work: Work
    run: Callable[[Bench], None]
    scattered_because: str = ""
    tiled_bytes: int = 0
    is_on_tensor_cores: bool = False
    arch: str = ""
