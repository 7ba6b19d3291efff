"""What a recorded decode step does on the cpu before its model, as `runtime.ops` describes it."""

from __future__ import annotations

from numba_kernels.cpu import decode_inputs as _decode_inputs
from runtime.backends.cpu_checks import checked_address
from runtime.dtype import int32
from runtime.tensor.tensor import Tensor


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, drawn: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    op, num_tokens = "take_decode_inputs", token_ids.shape[0]
    _decode_inputs.decode_inputs_kernel()(
        1, 1,
        checked_address(op, "changes", changes, int32, (None,)),
        checked_address(op, "num_changes", num_changes, int32, (1,)),
        checked_address(op, "tables", tables, int32, (None, None)),
        checked_address(op, "sources", sources, int32, (num_tokens,)),
        checked_address(op, "drawn", drawn, int32, (None,)),
        checked_address(op, "token_ids", token_ids, int32, (num_tokens,)),
        num_tokens, tables.size, drawn.size,
    )  # fmt: skip
