"""Fixed-order split-K: exact mode adds up a product over K in an order that ranks can follow.

A matrix ``[N, K]`` that is split over its inputs is multiplied by several ranks, each with K / ranks of them, and the
ranks' results are added. The bits of a float32 sum depend on its order, so exact mode fixes one that 1, 2, 4 and 8
ranks can all follow. One rank alone follows it, too:

1. K is cut into `SEGMENTS` segments at multiples of a step. A step is `STEP` elements, or the least multiple of it that
   the weight's format can be cut at (`runtime.linear.format`). With ``steps = ceil(K / step)``, segment i has the steps
   from ``floor(steps * i / SEGMENTS)`` up to where segment i + 1 begins. So lengths differ by at most one step, the
   last segment may end within its last step, and where steps are fewer than segments, some are empty.
2. Each segment is added up by itself in float32, from zero, in the order that the kernel takes for a K of this length.
   That kernel depends on the whole map's N and K, never on a rank's.
3. Neighbours are added: ``((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))``, in float32.
4. Then come an output channel's scale, bias and residual, and the result is rounded once.

A rank of R has segments ``8 / R * rank`` up to those of the next one, which is a subtree of 3: it adds its own, and all
ranks add the R subtrees. Where R divides the steps, and K is a multiple of the step, the rule of 1 cuts a rank's K / R
elements into 8 / R segments exactly there. Other splits would cut segments, and are refused.

A map that is split over its outputs needs no segments: each rank adds up all of K for the outputs that it has.
"""

from __future__ import annotations

SEGMENTS = 8
STEP = 16
"""The depth of a tensor core's product of 16-bit factors; 32 bytes of them, a sector of a GPU's memory."""
