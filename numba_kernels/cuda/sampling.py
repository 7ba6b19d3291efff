"""One token for each row of logits, as `numba_kernels.cpu.sampling` and with its choices: the same token for the same
logits and parameters.

In vLLM's order: allowed mask, logit bias, penalties, then the argmax (lowest id among equals) for a greedy row, else
temperature, min-p, top-k, top-p and the draw, which is a race: token i finishes after E_i / w_i with E_i from Philox,
and the first to finish wins.

A block of 512 threads has one row, and passes over it a few times. Logits are changed in `work`, so that the raw ones
stay as they are; a row that nothing changes is read where it lies. No float64: logits and weights are rounded where the
cpu kernel rounds them, masses are integers, and finishing times are pairs of float32.

The order of the arguments, addresses but for the last two:

    logits [rows, vocab] f32; temperature f32, top_k i32, top_p f32, min_p f32, repetition f32, presence f32,
    frequency f32, seed u64, choice i32, position i32 [rows each]; prompt_ids i32 [any], prompt_start i32,
    prompt_end i32 [rows each]; output_ids i32 [any], output_start i32, output_end i32 [rows each]; bias_ids i32,
    bias_values f32 [any], bias_start i32, bias_end i32 [rows each];
    allowed u32 [rows, mask_words] or 0; work f32 [rows, vocab]; counts i32 [rows, vocab] or 0 where no row has a
    penalty; token_ids i32 [rows]; status i32 [rows]; vocab u32; mask_words u32

A row's token is -1 unless its status is OK.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.philox import philox
from numba_kernels.cuda.intrinsics.rounded import (
    add,
    count_leading_zeros,
    divide,
    exp,
    exponential_of_word,
    f32_from_u32,
    multiply,
    pair_quotient,
    subtract,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_b32, shuffle_xor_f32
from numba_kernels.cuda.selection import (
    FIRST_SHIFT,
    INFINITY,
    LOGIT_SHIFT,
    MAX_VOCAB,
    NO_TOKEN,
    NUM_BINS,
    THREADS,
    WARPS,
    choose_digit,
    digit_search,
    first_largest,
    quad_loader,
    rank_of,
    share_of,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

float32, int32, uint32, uint64 = types.float32, types.int32, types.uint32, types.uint64

OK = 0
NOTHING_TO_DRAW = 1  # NaN or +inf among the row's logits, or -inf alone
BAD_ID = 2  # an id outside the vocabulary among bias or penalty ids
GREEDY_BELOW = 1e-5  # vLLM's: a lower temperature is the argmax
_IN_PROMPT = 1 << 31  # of a count: the token is in the prompt

_count = instruction("red.global.add.u32 [$0], $1;", "", "l r")
_mark = instruction("red.global.or.b32 [$0], $1;", "", "l r")
_load_u64 = instruction("ld.global.b64 $0, [$1];", "l", "l")


@functools.cache
def _quad_storer(is_aligned: bool) -> Any:
    """A device function ``(row address, quad, vocab, values)``."""
    if is_aligned:
        store_4 = memory.store_4xf32

        @device_function
        def store_aligned(row, quad, vocab, values):
            store_4(row + uint64(quad) * uint64(16), (values[0], values[1], values[2], values[3]))

        return store_aligned
    store_1 = memory.store_f32

    @device_function
    def store_quad(row, quad, vocab, values):
        for e in range(4):
            token = quad * uint32(4) + uint32(e)
            if token < vocab:
                store_1(row + uint64(token) * uint64(4), values[e])

    return store_quad


@device_function
def _repeat(logit, penalty):
    return divide(logit, penalty) if logit > float32(0.0) else multiply(logit, penalty)


@device_function
def _add_bias(row, vocab, ids, values, count):
    """Adds a list of biases; those of one token in their order, by the thread that has the first. 0 or BAD_ID."""
    status = int32(0)
    i = uint32(cuda.threadIdx.x)
    while i < count:
        token = memory.load_b32(ids + uint64(i) * uint64(4))
        if token >= vocab:
            status = int32(BAD_ID)
        else:
            is_first = True
            j = uint32(0)
            while j < i and is_first:
                is_first = memory.load_b32(ids + uint64(j) * uint64(4)) != token
                j += uint32(1)
            if is_first:
                place = row + uint64(token) * uint64(4)
                logit = memory.load_f32(place)
                j = i
                while j < count:
                    if memory.load_b32(ids + uint64(j) * uint64(4)) == token:
                        logit = add(logit, memory.load_f32(values + uint64(j) * uint64(4)))
                    j += uint32(1)
                memory.store_f32(place, logit)
        i += uint32(THREADS)
    return status


@device_function
def _count_tokens(counts, vocab, ids, count, is_prompt):
    """Counts a list's tokens, or marks them as the prompt's. 0 or BAD_ID."""
    status = int32(0)
    i = uint32(cuda.threadIdx.x)
    while i < count:
        token = memory.load_b32(ids + uint64(i) * uint64(4))
        if token >= vocab:
            status = int32(BAD_ID)
        elif is_prompt:
            _mark(counts + uint64(token) * uint64(4), uint32(_IN_PROMPT))
        else:
            _count(counts + uint64(token) * uint64(4), uint32(1))
        i += uint32(THREADS)
    return status


@device_function
def _penalised(logit, count, repetition, presence, frequency):
    """Repetition over prompt and output, frequency and presence over the output."""
    if count != uint32(0):
        logit = _repeat(logit, repetition)
        times = count & uint32(_IN_PROMPT - 1)
        if times > uint32(0):
            logit = subtract(subtract(logit, multiply(frequency, f32_from_u32(times))), presence)
    return logit


@device_function
def _pick(items, index):
    """One of a tuple of four."""
    low = items[0] if index == uint32(0) else items[1]
    high = items[2] if index == uint32(2) else items[3]
    return low if index < uint32(2) else high


@device_function
def _no_later_than(word):
    """A bound above -ln(1 - u), u = (word + 0.5) / 2^32: it is convex, and 1 - u is at least 2^-(s + 1)."""
    steps = f32_from_u32(count_leading_zeros(word ^ uint32(0xFFFFFFFF)) + uint32(1))
    chord = f32_from_u32(word) * float32(1.387 * 2.0**-32) + float32(2.0**-32)
    return steps * float32(0.6932) if word >> uint32(31) != uint32(0) else chord


@device_function
def _first_to_finish(high, low, token, highs, lows, tokens):
    """The token of the lowest pair of the block's threads, the lowest token among equals."""
    lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
    level = uint32(0)
    while level < uint32(2):  # within warps, then over the warps' results
        distance = uint32(16)
        while distance > uint32(0):
            other_high, other_low = shuffle_xor_f32(high, distance), shuffle_xor_f32(low, distance)
            other_token = shuffle_xor_b32(token, distance)
            if other_high < high or (
                other_high == high and (other_low < low or (other_low == low and other_token < token))
            ):
                high, low, token = other_high, other_low, other_token
            distance >>= uint32(1)
        if level == uint32(0):
            sync_block()
            if lane == uint32(0):
                highs[warp] = high
                lows[warp] = low
                tokens[warp] = token
            sync_block()
            high, low, token = highs[lane % uint32(WARPS)], lows[lane % uint32(WARPS)], tokens[lane % uint32(WARPS)]
        level += uint32(1)
    return token


@functools.cache
def _kernel(is_aligned: bool) -> Specialisation:
    load, store = quad_loader(is_aligned), _quad_storer(is_aligned)
    sum_digits = digit_search(is_aligned)
    load_f32, load_b32, load_u64 = memory.load_f32, memory.load_b32, _load_u64

    def sampling(
        logits, temperatures, top_ks, top_ps, min_ps, repetitions, presences, frequencies, seeds, choices, positions,
        prompt_ids, prompt_start, prompt_end, output_ids, output_start, output_end, bias_ids, bias_values, bias_start,
        bias_end, allowed, work, all_counts, token_ids, statuses, vocab, mask_words,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        bins = cuda.shared.array(NUM_BINS, uint64)
        totals = cuda.shared.array(WARPS, uint64)
        found = cuda.shared.array(2, uint64)
        values = cuda.shared.array(WARPS, float32)
        more_values = cuda.shared.array(WARPS, float32)
        tokens = cuda.shared.array(WARPS, uint32)
        changed = cuda.local.array(4, float32)
        thread = uint32(cuda.threadIdx.x)
        of_row = uint64(cuda.blockIdx.x) * uint64(4)
        temperature = load_f32(temperatures + of_row)
        repetition = load_f32(repetitions + of_row)
        presence = load_f32(presences + of_row)
        frequency = load_f32(frequencies + of_row)
        min_p = load_f32(min_ps + of_row)
        first_bias = load_b32(bias_start + of_row)
        num_bias = load_b32(bias_end + of_row) - first_bias
        is_penalised = repetition != float32(1.0) or presence != float32(0.0) or frequency != float32(0.0)
        is_greedy = temperature < float32(GREEDY_BELOW)
        is_listed = allowed != uint64(0) or num_bias > uint32(0) or is_penalised
        is_changed = is_listed or not (is_greedy or (temperature == float32(1.0) and min_p == float32(0.0)))
        row_bytes = uint64(vocab) * uint64(4)
        raw = logits + uint64(cuda.blockIdx.x) * row_bytes
        row = work + uint64(cuda.blockIdx.x) * row_bytes if is_changed else raw
        counts = all_counts + uint64(cuda.blockIdx.x) * row_bytes
        mask = allowed + uint64(cuda.blockIdx.x) * uint64(mask_words) * uint64(4)

        # The raw row: NaN counts as +inf, either spoils it. What is not allowed leaves it.
        largest, token = float32(-INFINITY), uint32(NO_TOKEN)
        quad = thread
        while quad * uint32(4) < vocab:
            quad_logits = load(raw, quad, vocab)
            allowed_bits = uint32(0xF)
            if allowed != uint64(0):
                allowed_bits = load_b32(mask + uint64(quad >> uint32(3)) * uint64(4)) >> (
                    (quad & uint32(7)) << uint32(2)
                )
            for e in range(4):
                logit = quad_logits[e] if quad_logits[e] < float32(INFINITY) else float32(INFINITY)
                if logit > largest:
                    largest, token = logit, quad * uint32(4) + uint32(e)
                changed[e] = logit if (allowed_bits >> uint32(e)) & uint32(1) != uint32(0) else float32(-INFINITY)
            if is_changed:
                store(row, quad, vocab, changed)
            if is_penalised:
                for e in range(4):
                    if quad * uint32(4) + uint32(e) < vocab:
                        memory.store_b32(counts + uint64(quad * uint32(4) + uint32(e)) * uint64(4), uint32(0))
            quad += uint32(THREADS)
        largest, token = first_largest(largest, token, values, tokens)
        status = int32(OK)
        if largest == float32(INFINITY) or largest == float32(-INFINITY):
            status = int32(NOTHING_TO_DRAW)

        if is_changed and status == int32(OK):
            sync_block()
            place = uint64(first_bias) * uint64(4)
            bad = _add_bias(row, vocab, bias_ids + place, bias_values + place, num_bias)
            if is_penalised:
                start = load_b32(prompt_start + of_row)
                count = load_b32(prompt_end + of_row) - start
                bad |= _count_tokens(counts, vocab, prompt_ids + uint64(start) * uint64(4), count, True)
                start = load_b32(output_start + of_row)
                count = load_b32(output_end + of_row) - start
                bad |= _count_tokens(counts, vocab, output_ids + uint64(start) * uint64(4), count, False)
            if cuda.syncthreads_or(bad) != int32(0):
                status = int32(BAD_ID)
            largest, token = float32(-INFINITY), uint32(NO_TOKEN)
            quad = thread
            while quad * uint32(4) < vocab:
                quad_logits = load(row, quad, vocab)
                for e in range(4):
                    logit = quad_logits[e]
                    if is_penalised and quad * uint32(4) + uint32(e) < vocab:
                        times = load_b32(counts + uint64(quad * uint32(4) + uint32(e)) * uint64(4))
                        logit = _penalised(logit, times, repetition, presence, frequency)
                    if not is_greedy:
                        logit = divide(logit, temperature)
                    logit = logit if logit < float32(INFINITY) else float32(INFINITY)
                    if logit > largest:
                        largest, token = logit, quad * uint32(4) + uint32(e)
                    changed[e] = logit
                store(row, quad, vocab, changed)
                quad += uint32(THREADS)
            largest, token = first_largest(largest, token, values, tokens)
            if status == int32(OK) and (largest == float32(INFINITY) or largest == float32(-INFINITY)):
                status = int32(NOTHING_TO_DRAW)

        if status == int32(OK) and not is_greedy:
            if min_p > float32(0.0):
                quad = thread
                while quad * uint32(4) < vocab:
                    quad_logits = load(row, quad, vocab)
                    for e in range(4):
                        is_kept = exp(subtract(quad_logits[e], largest)) >= min_p
                        changed[e] = quad_logits[e] if is_kept else float32(-INFINITY)
                    store(row, quad, vocab, changed)
                    quad += uint32(THREADS)

            # The lowest rank that is kept: at first all but -inf, then top-k with its ties, then top-p.
            top_k = load_b32(top_ks + of_row)
            top_p = load_f32(top_ps + of_row)
            lowest = rank_of(float32(-INFINITY), uint32(0)) + uint64(1)
            is_mass = False
            searches = uint32(0)
            while searches < uint32(2):
                is_mass = searches == uint32(1)
                shift = uint32(FIRST_SHIFT)
                prefix = uint64(0)
                wanted = uint64(top_k)
                is_searching = top_p < float32(1.0) if is_mass else int32(top_k) > int32(0) and top_k < vocab
                while is_searching:
                    front, total = sum_digits(row, vocab, largest, lowest, prefix, shift, is_mass, bins, totals)
                    if shift == uint32(FIRST_SHIFT):
                        if is_mass:
                            wanted = share_of(total, top_p)
                        is_searching = is_mass or wanted < total
                    if is_searching:
                        digit, front = choose_digit(front, wanted, bins, found)
                        prefix = (prefix << uint64(11)) | digit
                        wanted -= front
                        if is_mass and shift == uint32(0):
                            lowest = prefix
                            is_searching = False
                        elif not is_mass and shift == uint32(LOGIT_SHIFT):
                            lowest = prefix >> uint64(1) << uint64(LOGIT_SHIFT + 1)
                            is_searching = False
                        else:
                            shift -= uint32(11)
                searches += uint32(1)

            # The race. The first of the largest, of weight 1, runs in front: who cannot be faster needs no logarithm.
            seed = load_u64(seeds + of_row * uint64(2))
            key_low, key_high = uint32(seed), uint32(seed >> uint64(32))
            choice, position = load_b32(choices + of_row), load_b32(positions + of_row)
            words = philox(token >> uint32(2), choice, position, uint32(0), key_low, key_high)
            best, best_low = _no_later_than(_pick(words, token & uint32(3))), float32(0.0)
            token = uint32(NO_TOKEN)
            quad = thread
            while quad * uint32(4) < vocab:
                quad_logits = load(row, quad, vocab)
                is_any = False
                for e in range(4):
                    is_any |= rank_of(quad_logits[e], quad * uint32(4) + uint32(e)) >= lowest
                if is_any:
                    words = philox(quad, choice, position, uint32(0), key_low, key_high)
                    e = uint32(0)
                    while e < uint32(4):
                        logit, word, candidate = _pick(quad_logits, e), _pick(words, e), quad * uint32(4) + e
                        weight = exp(subtract(logit, largest))
                        # Its time is at least uniform / weight; no word makes a weight of 2^-40 win.
                        uniform = multiply(f32_from_u32(word), float32(2.0**-32))
                        may_win = uniform <= best * weight * float32(1.000001) and weight > float32(2.0**-40)
                        if may_win and rank_of(logit, candidate) >= lowest:
                            time, time_low = pair_quotient(exponential_of_word(word), (weight, float32(0.0)))
                            if time < best or (
                                time == best and (time_low < best_low or (time_low == best_low and candidate < token))
                            ):
                                best, best_low, token = time, time_low, candidate
                        e += uint32(1)
                quad += uint32(THREADS)
            token = _first_to_finish(best, best_low, token, values, more_values, tokens)

        if thread == uint32(0):
            memory.store_b32(token_ids + of_row, token if status == int32(OK) else uint32(NO_TOKEN))
            memory.store_b32(statuses + of_row, uint32(status))

    return Specialisation(
        name=f"sampling_{'aligned' if is_aligned else 'any'}",
        kernel=cuda.jit(sampling),
        argument_types=(uint64,) * (len(inspect.signature(sampling).parameters) - 2) + (uint32,) * 2,
        max_threads=THREADS,
        constants={"is_aligned": is_aligned},
    )


def plan(num_rows: int, vocab: int, *, is_aligned: bool = True) -> Launch | None:
    """The launch for ``logits [num_rows, vocab]``, or None where there are no rows.

    Args:
        is_aligned: whether logits and work begin on 16-byte bounds.

    Raises ValueError for a vocabulary of no token, or of more than `MAX_VOCAB`.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"sampling: vocab is {vocab}, must be 1 to {MAX_VOCAB}")
    if num_rows == 0:
        return None
    return Launch(_kernel(is_aligned and vocab % 4 == 0), (num_rows, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for is_aligned in (True, False):
        yield _kernel(is_aligned)
