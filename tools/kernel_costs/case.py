"""One line of the kernel report: a launch, and its minimum work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.bench.kernels.cases import Case as Operation
from tools.kernel_costs.counts import Bench, Work


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report.

    Attributes:
        name, family, shape: its name, its family, its sizes in words.
        work: its minimum work.
        run: uploads and launches.
        scattered_because: why its accesses cannot fill whole sectors; "" if they should.
        tiled_bytes: the minimum traffic of its tiling, without tables and lengths; 0 if unchecked.
        is_on_tensor_cores: whether its products should run there.
        arch: of its emulated GPU; the report's if "".
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


def counted(
    operation: Operation, family: str, *, suffix: str = "", scattered_because: str = "", tiled_bytes: int = 0,
    is_on_tensor_cores: bool = False, has_16_bits: bool = False,
) -> Case:  # fmt: skip
    """A line for a case of `bench kernels`; its result is compared with numpy's.

    `has_16_bits`: its products have 16-bit factors, so that tensor cores could do them."""
    return Case(
        operation.name + suffix, family, operation.shape, Work(operation.least_bytes, operation.flops, has_16_bits),
        lambda bench: bench.check(operation), scattered_because, tiled_bytes, is_on_tensor_cores,
    )  # fmt: skip
