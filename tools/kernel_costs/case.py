"""One line of the kernel report: a launch, and the least that it has to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.bench.kernels.cases import Case as Operation
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


def counted(
    operation: Operation, family: str, *, suffix: str = "", scattered_because: str = "", tiled_bytes: int = 0,
    is_on_tensor_cores: bool = False, has_16_bits: bool = False,
) -> Case:  # fmt: skip
    """A line about what `bench kernels` has, too; its result is compared with numpy's where it is counted.

    `has_16_bits`: its products are of such factors, so that tensor cores could do them."""
    return Case(
        operation.name + suffix, family, operation.shape, Work(operation.least_bytes, operation.flops, has_16_bits),
        lambda bench: bench.check(operation), scattered_because, tiled_bytes, is_on_tensor_cores,
    )  # fmt: skip
