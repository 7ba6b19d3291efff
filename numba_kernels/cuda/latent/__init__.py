"""Latent attention on a GPU (MLA, DeepSeek-V2, https://arxiv.org/abs/2405.04434): pages of one row a token, and
attention over them.

    q[t, h]  = [rotated q[t, h, :R] | q[t, h, R:]] * q_scales[p_t],    row[t] = [rotated k[t] | RMSNorm(c[t]) * weight]
    out[t, h] = sum_j softmax_j(scale q[t, h] . row[j]) c[j]      over positions  j <= p_t

Pages are ``[blocks, block size, width rounded up to 8]`` of the activations' type: a row is the key of all heads, and
all but its first R numbers are their value. The tiers:

    plain          float32 arithmetic, any widths: float32, and rows that the others have no tiles for
    tensor_core    mma.sync on 16 rows of queries, f16 and bf16, sequences split over many blocks
    hopper         wgmma on 64 rows, for many heads or tokens (sm_90a)

Long prompts expand rows to keys and values of all heads (`plan_rows`, a product), and take `attention.plan_expanded`.
Exact mode takes the first two, and does not split a sequence. Either way equal inputs give equal bits.
"""

from numba_kernels.cuda.latent.head_maps import HeadMap, rows_of
from numba_kernels.cuda.latent.planning import (
    ROW_MULTIPLE,
    LatentPlan,
    plan_absorb,
    plan_attention,
    plan_prepare,
    plan_rows,
    plan_values,
    specialisations,
    why_not,
)

__all__ = [
    "ROW_MULTIPLE", "HeadMap", "LatentPlan", "plan_absorb", "plan_attention", "plan_prepare", "plan_rows",
    "plan_values", "rows_of", "specialisations", "why_not",
]  # fmt: skip
