"""Log-probabilities of raw logits: of a chosen token, with its rank, and of the best few of each row.

    log p_i = (x_i - max) - log sum_j e^(x_j - max)

A block has one row. The sum is of integers (multiples of 2^-44) and so does not depend on the order of additions. The
best `top_n` tokens are those from a rank on, found digit by digit (`numba_kernels.cuda.selection`); each finds its
place among them by counting who is ahead of it. As in `numba_kernels.cpu.logprobs`, ties go to the lower id, and a row
with NaN or +inf, or with -inf alone, gives NaN throughout; its top ids are -1.

The order of the arguments, addresses but for the last two:

    logits [rows, vocab] f32, chosen i32 [rows], chosen_logprob f32 [rows], chosen_rank i32 [rows],
    top_ids i32 [rows, top_n], top_logprobs f32 [rows, top_n], vocab u32, top_n u32

`chosen` holds ids of the vocabulary, or -1, for which the log-probability is NaN and the rank 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.rounded import exp, subtract
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.selection import (
    DIGIT_BITS,
    FIRST_SHIFT,
    ID_BITS,
    INFINITY,
    MAX_VOCAB,
    NAN,
    NO_TOKEN,
    NUM_BINS,
    THREADS,
    WARPS,
    block_sum,
    choose_digit,
    digit_search,
    first_largest,
    mass_of,
    quad_loader,
    rank_of,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

float32, uint32, uint64 = types.float32, types.uint32, types.uint64

MAX_TOP_N = THREADS

_f32_from_u64 = instruction("cvt.rn.f32.u64 $0, $1;", "f", "l", is_pure=True)
_log2 = instruction("lg2.approx.f32 $0, $1;", "f", "f", is_pure=True)
_take_place = instruction("atom.shared.add.u32 $0, [$1], 1;", "r", "r")


@functools.cache
def _kernel(is_aligned: bool) -> Specialisation:
    load = quad_loader(is_aligned)
    sum_digits = digit_search(is_aligned)

    def logprobs(logits, chosen, chosen_logprob, chosen_rank, top_ids, top_logprobs, vocab, top_n):
        bins = cuda.shared.array(NUM_BINS, uint64)
        totals = cuda.shared.array(WARPS, uint64)
        found = cuda.shared.array(2, uint64)
        values = cuda.shared.array(WARPS, float32)
        tokens = cuda.shared.array(WARPS, uint32)
        num_best = cuda.shared.array(1, uint32)
        thread, block = uint32(cuda.threadIdx.x), uint64(cuda.blockIdx.x)
        row = logits + block * uint64(vocab) * uint64(4)
        picked = memory.load_b32(chosen + block * uint64(4))
        picked_logit = float32(INFINITY)
        if picked < vocab:
            picked_logit = memory.load_f32(row + uint64(picked) * uint64(4))

        # NaN counts as +inf: either spoils the row.
        largest, token, ahead = float32(-INFINITY), uint32(NO_TOKEN), uint64(0)
        quad = thread
        while quad * uint32(4) < vocab:
            quad_logits = load(row, quad, vocab)
            for e in range(4):
                if quad_logits[e] > picked_logit:
                    ahead += uint64(1)
                logit = quad_logits[e] if quad_logits[e] < float32(INFINITY) else float32(INFINITY)
                if logit > largest:
                    largest, token = logit, quad * uint32(4) + uint32(e)
            quad += uint32(THREADS)
        largest, token = first_largest(largest, token, values, tokens)
        is_spoilt = largest == float32(INFINITY) or largest == float32(-INFINITY)
        ahead = block_sum(ahead, totals)

        mass = uint64(0)
        if not is_spoilt:
            quad = thread
            while quad * uint32(4) < vocab:
                quad_logits = load(row, quad, vocab)
                for e in range(4):
                    mass += mass_of(exp(subtract(quad_logits[e], largest)))
                quad += uint32(THREADS)
        mass = block_sum(mass, totals)
        log_sum = _log2(_f32_from_u64(mass) * float32(2.0**-44)) * float32(0.6931471805599453)
        if is_spoilt:
            log_sum = float32(NAN)
        if thread == uint32(0):
            logprob = subtract(picked_logit, largest) - log_sum if picked < vocab else float32(NAN)
            memory.store_f32(chosen_logprob + block * uint64(4), logprob)
            rank = uint32(ahead) + uint32(1) if picked < vocab else uint32(0)
            memory.store_b32(chosen_rank + block * uint64(4), rank)

        ids, best_logprobs = (
            top_ids + block * uint64(top_n) * uint64(4),
            top_logprobs + block * uint64(top_n) * uint64(4),
        )
        if is_spoilt:
            if thread < top_n:
                memory.store_b32(ids + uint64(thread) * uint64(4), uint32(NO_TOKEN))
                memory.store_f32(best_logprobs + uint64(thread) * uint64(4), log_sum)
        elif top_n > uint32(0):
            # The rank of the last of the best.
            lowest, prefix, wanted = uint64(0), uint64(0), uint64(top_n)
            shift = uint32(FIRST_SHIFT + DIGIT_BITS)
            while shift > uint32(0):
                shift -= uint32(DIGIT_BITS)
                front, _ = sum_digits(row, vocab, largest, lowest, prefix, shift, False, bins, totals)
                digit, before = choose_digit(front, wanted, bins, found)
                prefix = (prefix << uint64(DIGIT_BITS)) | digit
                wanted -= before
            # All from it on, in any order, into the bins, which are as many as needed.
            if thread == uint32(0):
                num_best[0] = uint32(0)
            sync_block()
            counter = memory.shared_address(num_best)
            quad = thread
            while quad * uint32(4) < vocab:
                quad_logits = load(row, quad, vocab)
                for e in range(4):
                    rank = rank_of(quad_logits[e], quad * uint32(4) + uint32(e))
                    if quad * uint32(4) + uint32(e) < vocab and rank >= prefix:
                        bins[_take_place(counter)] = rank
                quad += uint32(THREADS)
            sync_block()
            if thread < top_n:
                own = bins[thread]
                place = uint32(0)
                i = uint32(0)
                while i < top_n:
                    if bins[i] > own:
                        place += uint32(1)
                    i += uint32(1)
                best = uint32((1 << ID_BITS) - 1) - (uint32(own) & uint32((1 << ID_BITS) - 1))
                logit = memory.load_f32(row + uint64(best) * uint64(4))
                memory.store_b32(ids + uint64(place) * uint64(4), best)
                memory.store_f32(best_logprobs + uint64(place) * uint64(4), subtract(logit, largest) - log_sum)

    return Specialisation(
        name=f"logprobs_{'aligned' if is_aligned else 'any'}",
        kernel=cuda.jit(logprobs),
        argument_types=(uint64,) * 6 + (uint32,) * 2,
        max_threads=THREADS,
        constants={"is_aligned": is_aligned},
    )


def plan(num_rows: int, vocab: int, top_n: int, *, is_aligned: bool = True) -> Launch | None:
    """The launch for ``logits [num_rows, vocab]``, or None where there are no rows.

    Args:
        top_n: how many of the best are wanted, 0 to `MAX_TOP_N` and to `vocab`.
        is_aligned: whether logits begin on a 16-byte bound.

    Raises ValueError for sizes outside those limits, and for a vocabulary of no token or more than `MAX_VOCAB`.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"logprobs: vocab is {vocab}, must be 1 to {MAX_VOCAB}")
    if not 0 <= top_n <= min(MAX_TOP_N, vocab):
        raise ValueError(f"logprobs: top_n is {top_n}, must be 0 to {min(MAX_TOP_N, vocab)}")
    if num_rows == 0:
        return None
    return Launch(_kernel(is_aligned and vocab % 4 == 0), (num_rows, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for is_aligned in (True, False):
        yield _kernel(is_aligned)
