"""The inputs of a decode graph on a GPU, as `runtime.ops` describes them."""

from __future__ import annotations

from numba_kernels.cuda import decode_inputs as _decode_inputs
from runtime.device.gpu import Gpu
from runtime.tensor.tensor import Tensor


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, drawn: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    tensors = changes, num_changes, tables, sources, drawn, token_ids
    addresses = (tensor.address for tensor in tensors)
    Gpu.of(changes.device).launch(_decode_inputs.plan(), *addresses, token_ids.size)
