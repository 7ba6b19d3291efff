"""What a decode graph does on a GPU before its model, as `runtime.ops` describes it."""

from __future__ import annotations

from numba_kernels.cuda import decode_inputs as _decode_inputs
from runtime.backends.cuda_checks import check, first
from runtime.dtype import int32
from runtime.tensor.tensor import Tensor


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, drawn: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    op = "take_decode_inputs"
    gpu = first(op, "changes", changes, int32, (None,))
    device, num_tokens = changes.device, token_ids.shape[0]
    gpu.launch(
        _decode_inputs.plan(),
        changes.address,
        check(op, "num_changes", num_changes, device, int32, (1,)),
        check(op, "tables", tables, device, int32, (None, None)),
        check(op, "sources", sources, device, int32, (num_tokens,)),
        check(op, "drawn", drawn, device, int32, (None,)),
        check(op, "token_ids", token_ids, device, int32, (num_tokens,)),
        num_tokens,
    )
