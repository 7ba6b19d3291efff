"""Memory that was declared immutable: every way to write it is a fault, until its block or allocation ends."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.device.errors import CaptureError, LaunchError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor
from tests.runtime.device.emulated import new_gpu
from tests.runtime.device.kernels import launch_of, scale
from tests.runtime.emulator.tensor_harness import launch_text

N = 64
TEXT = """
.visible .entry k(.param .u64 p) {{
.reg .b64 %x; .reg .b32 %a; .reg .b128 %q; .shared .align 16 .b8 tile[16];
ld.param.u64 %x, [p]; mov.u32 %a, 0; st.shared.u32 [tile], %a;
{body}
ret; }}
"""


@pytest.mark.parametrize(
    "body",
    [
        "st.global.b32 [%x], %a;",
        "st.global.v2.b32 [%x+8], {%a, %a};",
        "st.volatile.b32 [%x], %a;",
        "red.global.add.u32 [%x], %a;",
        "atom.global.cas.b32 %a, [%x], %a, %a;",
        "cp.async.bulk.global.shared::cta.bulk_group [%x], [tile], 16;\ncp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group 0;",
    ],
)
def test_a_kernel_may_not_write_it(body: str) -> None:
    text = TEXT.format(body=body).replace("st.shared.u32 [tile], %a;", "st.shared.v4.u32 [tile], {%a, %a, %a, %a};\n"
                                          "fence.proxy.async;")  # fmt: skip
    array = np.ones(N, np.float32)
    launch_text(text, [array], threads=1)
    array.flags.writeable = False
    with pytest.raises(EmulatorFault) as caught:
        launch_text(text, [array], threads=1)
    assert caught.value.kind == FaultKind.IMMUTABLE_WRITTEN
    assert "which was declared immutable" in str(caught.value)


@pytest.fixture
def gpu() -> Gpu:
    return new_gpu()


def test_the_blocks_end_ends_it(gpu: Gpu) -> None:
    x, y = gpu.allocate(4 * N), gpu.allocate(4 * N)
    gpu.write(x.address, np.ones(N, np.float32))
    gpu.declare_immutable(x)
    gpu.launch(launch_of(scale(), N), x.address, y.address, N, 2.0)
    address = x.address
    x.release()
    again = gpu.allocate(4 * N)
    assert again.address == address
    gpu.launch(launch_of(scale(), N), y.address, address, N, 2.0)
    gpu.synchronize()


@pytest.mark.parametrize("how", ["kernel", "copy", "fill"])
def test_work_behind_the_declaration_may_not_write_it(gpu: Gpu, how: str) -> None:
    """Work in front of it may, though it has not run yet."""
    x, y = gpu.allocate(4 * N), gpu.allocate(4 * N)
    gpu.write(y.address, np.ones(N, np.float32))
    gpu.launch(launch_of(scale(), N), y.address, x.address, N, 2.0)
    gpu.declare_immutable(x)
    gpu.synchronize()
    if how == "kernel":
        gpu.launch(launch_of(scale(), N), y.address, x.address, N, 2.0)
    elif how == "copy":
        gpu.write(x.address, np.ones(1, np.float32))
    else:
        gpu.fill(x.address, 0, 4)
    with pytest.raises(LaunchError, match="declared immutable"):
        gpu.synchronize()


def test_a_frozen_tensor_refuses_writes() -> None:
    for where in ("emulated:sm_90a", "cpu"):
        tensor = Tensor.zeros((4,), device=where)
        tensor[0:2] = 1
        tensor.storage.freeze()
        with pytest.raises(InvalidArgumentError, match="read-only"):
            tensor[0:2] = 2
        assert tensor.to("cpu").array.tolist() == [1, 1, 0, 0]


def test_a_stream_that_is_captured_declares_nothing(gpu: Gpu) -> None:
    x = gpu.allocate(4 * N)
    gpu.write(x.address, np.ones(N, np.float32))

    def work() -> None:
        gpu.declare_immutable(x)

    with pytest.raises(CaptureError, match="declare_immutable"):
        Graph.capture(gpu, work)
