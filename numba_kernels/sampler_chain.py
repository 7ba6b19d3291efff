"""A chain: the samplers of one row in an order of its own, as 32-bit words for the kernels of all devices.

The words are the numbers of `runtime.sampling_table` that only chains read, in the table's order; mirostat's mu; the
order; then ids whose logits are lowered (by DRY), and as many float32 that are subtracted from them.

The order has four bits a sampler, the first in the lowest: numbers from 1 on, 0 after the last. Masks, biases,
penalties and DRY come before all of these.

Numbers that decide are whole numbers (masses, multiples of 2^-44), or float64 sums in a fixed order: each device keeps
the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

(
    TOP_N_SIGMA, TYPICAL_P, XTC_PROBABILITY, XTC_THRESHOLD, DYNATEMP_RANGE, DYNATEMP_EXPONENT, MIROSTAT, MIROSTAT_TAU,
    MIROSTAT_ETA, MU, ORDER, NUM_WORDS,
) = range(12)  # fmt: skip
"""Places of words; the ids are from ``NUM_WORDS`` on."""

(IS_TEMPERATURE, IS_MIN_P, IS_TOP_K, IS_TYPICAL, IS_TOP_P, IS_XTC, IS_TOP_N_SIGMA, IS_MIROSTAT) = range(1, 9)
STAGES = {
    "top_n_sigma": IS_TOP_N_SIGMA, "top_k": IS_TOP_K, "typ_p": IS_TYPICAL, "top_p": IS_TOP_P, "min_p": IS_MIN_P,
    "xtc": IS_XTC, "temperature": IS_TEMPERATURE,
}  # fmt: skip
"""By llama.cpp's names, in the order of its default chain."""

LANES = 512
"""Partial sums of a fixed order: quad q of tokens belongs to lane q % LANES, and lanes are added by halves."""
XTC_STREAM = 2
"""Fourth counter word of the random number that decides whether XTC acts; the draw's is 0, rejection's is 1."""
GREEDY_BELOW = 1e-5
"""vLLM's: a lower temperature keeps the most probable token alone."""
MASS_UNIT = 2.0**44
"""The mass of a weight of 1."""
MAX_PENALTY = 1e30
"""Most that is subtracted from a logit, so that it stays finite."""


def packed(stages: Sequence[int]) -> int:
    """The order's word."""
    return sum(stage << 4 * place for place, stage in enumerate(stages))


USUAL_STAGES = IS_TOP_N_SIGMA, IS_TEMPERATURE, IS_MIN_P, IS_TOP_K, IS_TYPICAL, IS_TOP_P, IS_XTC
"""vLLM's order, with the samplers that it lacks where llama.cpp has them beside the others."""
