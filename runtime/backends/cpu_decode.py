"""The inputs of a recorded decode step on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

from numba_kernels.cpu import decode_inputs as _decode_inputs
from runtime.tensor.tensor import Tensor


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, drawn: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    tensors = changes, num_changes, tables, sources, drawn, token_ids
    addresses = (tensor.address for tensor in tensors)
    _decode_inputs.decode_inputs_kernel()(1, 1, *addresses, token_ids.size, tables.size, drawn.size)
