"""Log-probabilities of raw logits: of a chosen token, with its rank, and of the best few of each row.

    log p_i = (x_i - max) - log sum_j e^(x_j - max)

A block has one row. The sum is of integers (multiples of 2^-44) and so does not depend on the order of additions. The
best `top_n` tokens are those from a rank on, found digit by digit (`numba_kernels.cuda.selection`); each finds its
place among them by counting those ahead of it. As in `numba_kernels.cpu.logprobs`, ties go to the lower id, and a row
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
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.rounded import exp, subtract
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.row_blocks import ENTRIES_BYTES, THREADS, WARPS, exchange
from numba_kernels.cuda.selection import (
    ID_BITS,
    INFINITY,
    LOWEST,
    MAX_VOCAB,
    NAN,
    NO_TOKEN,
    SEARCH_BYTES,
    TOO_MANY,
    clear_search,
    load_quad,
    mass_of,
    of_rising,
    rank_of,
    rising,
    searcher,
    xor_u64,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

float32, uint32, uint64 = types.float32, types.uint32, types.uint64

MAX_TOP_N = THREADS
SHARED_BYTES = 16 + ENTRIES_BYTES + SEARCH_BYTES

_f32_from_u64 = instruction("cvt.rn.f32.u64 $0, $1;", "f", "l", is_pure=True)
_log2 = instruction("lg2.approx.f32 $0, $1;", "f", "f", is_pure=True)
_take_place = instruction("atom.shared.add.u32 $0, [$1], 1;", "r", "r")


@device_function
def _block_sum(value, totals):
    """The sum of a uint64 over all threads, in each of them. ``totals``: shared memory for one of each warp."""
    thread = uint32(cuda.threadIdx.x)
    distance = uint32(16)
    while distance > uint32(0):
        value += xor_u64(value, distance)
        distance >>= uint32(1)
    sync_block()  # the memory may still be read
    totals[thread >> uint32(5)] = value
    sync_block()
    total = uint64(0)
    for warp in range(WARPS):
        total += totals[warp]
    return total


@functools.cache
def _kernel() -> Specialisation:
    exchanged, find_lowest = exchange(False), searcher(False)

    def logprobs(logits, chosen, chosen_logprob, chosen_rank, top_ids, top_logprobs, vocab, top_n):
        entries = uint32(uint32(memory.shared_address(cuda.shared.array(0, uint32)) + uint32(15)) & uint32(0xFFFFFFF0))
        search = uint32(entries + uint32(ENTRIES_BYTES))
        totals = cuda.shared.array(WARPS, uint64)
        ranks = cuda.shared.array(MAX_TOP_N, uint64)
        num_best = cuda.shared.array(1, uint32)
        thread, block = uint32(cuda.threadIdx.x), uint64(cuda.blockIdx.x)
        num_quads = uint32(uint32(vocab + uint32(3)) >> uint32(2))
        row = logits + block * uint64(vocab) * uint64(4)
        picked = memory.load_b32(chosen + block * uint64(4))
        picked_logit = float32(INFINITY)
        if picked < vocab:
            picked_logit = memory.load_f32(row + uint64(picked) * uint64(4))

        # NaN counts as +inf: either spoils the row.
        largest, ahead = float32(-INFINITY), uint64(0)
        quad = thread
        while quad < num_quads:
            quad_logits = load_quad(row, quad, vocab)
            for e in range(4):
                if quad_logits[e] > picked_logit:
                    ahead += uint64(1)
                logit = quad_logits[e] if quad_logits[e] < float32(INFINITY) else float32(INFINITY)
                largest = logit if logit > largest else largest
            quad = uint32(quad + uint32(THREADS))
        clear_search(search)
        best, _, _, _ = exchanged(entries, rising(largest), uint32(0), uint32(0), uint32(0))
        largest = of_rising(best)
        is_spoilt = largest == float32(INFINITY) or largest == float32(-INFINITY)
        ahead = _block_sum(ahead, totals)

        mass = uint64(0)
        if not is_spoilt:
            quad = thread
            while quad < num_quads:
                quad_logits = load_quad(row, quad, vocab)
                for e in range(4):
                    mass += mass_of(exp(subtract(quad_logits[e], largest)))
                quad = uint32(quad + uint32(THREADS))
        mass = _block_sum(mass, totals)
        log_sum = _log2(_f32_from_u64(mass) * float32(2.0**-44)) * float32(0.6931471805599453)
        if is_spoilt:
            log_sum = float32(NAN)
        if thread == uint32(0):
            logprob = subtract(picked_logit, largest) - log_sum if picked < vocab else float32(NAN)
            memory.store_f32(chosen_logprob + block * uint64(4), logprob)
            rank = uint32(ahead) + uint32(1) if picked < vocab else uint32(0)
            memory.store_b32(chosen_rank + block * uint64(4), rank)

        ids = top_ids + block * uint64(top_n) * uint64(4)
        best_logprobs = top_logprobs + block * uint64(top_n) * uint64(4)
        if is_spoilt:
            if thread < top_n:
                memory.store_b32(ids + uint64(thread) * uint64(4), uint32(NO_TOKEN))
                memory.store_f32(best_logprobs + uint64(thread) * uint64(4), log_sum)
        elif top_n > uint32(0):
            lowest, _, _ = find_lowest(
                (row, uint32(0), num_quads, vocab), largest, uint64(LOWEST), uint64(top_n), float32(1.0),
                (False, False, False), (uint32(TOO_MANY), uint32(0)), search,
            )  # fmt: skip
            # All from it on, in any order.
            if thread == uint32(0):
                num_best[0] = uint32(0)
            sync_block()
            counter = memory.shared_address(num_best)
            quad = thread
            while quad < num_quads:
                quad_logits = load_quad(row, quad, vocab)
                for e in range(4):
                    token = uint32(uint32(quad * uint32(4)) + uint32(e))
                    rank = rank_of(quad_logits[e], token)
                    if token < vocab and rank >= lowest:
                        ranks[_take_place(counter)] = rank
                quad = uint32(quad + uint32(THREADS))
            sync_block()
            if thread < top_n:
                own = ranks[thread]
                place = uint32(0)
                i = uint32(0)
                while i < top_n:
                    if ranks[i] > own:
                        place += uint32(1)
                    i += uint32(1)
                best = uint32((1 << ID_BITS) - 1) - (uint32(own) & uint32((1 << ID_BITS) - 1))
                logit = memory.load_f32(row + uint64(best) * uint64(4))
                memory.store_b32(ids + uint64(place) * uint64(4), best)
                memory.store_f32(best_logprobs + uint64(place) * uint64(4), subtract(logit, largest) - log_sum)

    return Specialisation(
        name="logprobs",
        kernel=cuda.jit(logprobs),
        argument_types=(uint64,) * 6 + (uint32,) * 2,
        max_threads=THREADS,
    )


def plan(num_rows: int, vocab: int, top_n: int) -> Launch | None:
    """The launch for ``logits [num_rows, vocab]``, or None where there are no rows.

    Args:
        top_n: how many of the best to find, 0 to `MAX_TOP_N` and to `vocab`.

    Raises ValueError for sizes outside those limits, and for a vocabulary of no token or more than `MAX_VOCAB`.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"logprobs: vocab is {vocab}, must be 1 to {MAX_VOCAB}")
    if not 0 <= top_n <= min(MAX_TOP_N, vocab):
        raise ValueError(f"logprobs: top_n is {top_n}, must be 0 to {min(MAX_TOP_N, vocab)}")
    if num_rows == 0:
        return None
    return Launch(_kernel(), (num_rows, 1, 1), (THREADS, 1, 1), SHARED_BYTES)


def specialisations() -> Iterator[Specialisation]:
    """The family's one kernel."""
    yield _kernel()
