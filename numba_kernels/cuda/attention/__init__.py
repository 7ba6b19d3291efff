"""Causal attention over paged keys and values, for chunks of any length: prefill, decode and both in one batch.

    out[i] = sum_j softmax_j(scale q[i] . k[j]) v[j]      over positions  p_i - window < j <= p_i

q and out are [T, Hq, D] and [T, Hq * D] in f32, f16 or bf16, K and V pages of the same dtype (`kv_cache`), head dims
1 to 512, any number of query heads a KV head. A window, sinks (a logit of each query head that joins the softmax and
has no value) and a soft cap c (scores become c tanh(score / c)) are compiled in or left out. Pages outside the window
are not read. The batch is ragged: query_start [S + 1], seq_lens [S], block_tables [S, table_width], int32. A row
without visible keys gives zeros. NaN stays in the rows that see it, but a NaN in V may also reach rows whose last
position lies in the same key tile.

The tiers, each one a step:

    naive                 all scores in memory; also gives the softmax weights
    flash_float32         tiles, online softmax, nothing materialised; products of float32 in registers
    flash_tensor_core     the same walk with mma.sync, f16 and bf16, and asynchronous copies
    flash_hopper          tiles brought by the TMA and multiplied by wgmma, softmax beside the products
    flash_wide            heads wider than 256: warps divide their columns; prompts, and decode
    decode_tensor_core    few queries: bound by bandwidth, sequences split over blocks (`runs`; `parts` for float32's
                          `flash_float32` with is_split), one read of K and V for all query heads that share them

`plan` chooses. Blocks of the flash tier are laid over (tiles of the longest chunk, KV heads, sequences), and those
beyond a sequence's own rows exit at once: simple, and wasteful only where one long chunk stands beside many short
ones. Those of flash_hopper stay and look up the tiles.
"""

from numba_kernels.cuda.attention.planning import (
    TIERS,
    AttentionPlan,
    ExpandedPlan,
    can_expand,
    plan,
    plan_expanded,
    specialisations,
)

__all__ = ["TIERS", "AttentionPlan", "ExpandedPlan", "can_expand", "plan", "plan_expanded", "specialisations"]
