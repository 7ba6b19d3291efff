"""One token for each row of logits, as `numba_kernels.cpu.sampling` and with its choices: the same token for the same
logits and parameters.

In vLLM's order: allowed mask, logit bias, penalties, then the argmax (lowest id among equals) for a greedy row, else
temperature, min-p, top-k, top-p and the draw, which is a race: token i finishes after E_i / w_i with E_i from Philox,
and the first to finish wins.

A cluster of blocks shares a row; on devices without clusters one block has it. Logits are read from device memory
once: a block keeps its part, changed, in shared memory, or in `work` where that is too small. A greedy row without
lists takes that one pass. A draw takes one more over the part for min-p, one or two for the searches of top-k and
top-p, which go on with a list of candidates (`numba_kernels.cuda.selection`), and one for the race where there is no
such list. The blocks wait for each other once in the first pass, once for each digit of a search, once at the end.

The number of blocks changes no token: all sums are of integers, all else are maxima. No float64: logits
and weights are rounded where the cpu kernel rounds them, masses are integers, and finishing times pairs of float32.

The order of the arguments, addresses but for the last two:

    logits [rows, vocab] f32; temperature f32, top_k i32, top_p f32, min_p f32, repetition f32, presence f32,
    frequency f32, seed u64, choice i32, position i32 [rows each]; prompt_ids i32 [any], prompt_start i32,
    prompt_end i32 [rows each]; output_ids i32 [any], output_start i32, output_end i32 [rows each]; bias_ids i32,
    bias_values f32 [any], bias_start i32, bias_end i32 [rows each];
    allowed u32 [rows, mask_words] or 0; work, `Plan.work_bytes`, or 0; counts i32 [rows, vocab], or 0 where no row has
    a penalty; token_ids i32 [rows]; status i32 [rows]; id_flag i32 [1], flag_copy i32 [1]: the first is copied to the
    second; vocab u32; mask_words u32

A row's token is -1 unless its status is OK.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda, types

from numba_kernels.cuda.intrinsics import memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.convert import bits_from_f32, f32_from_bits
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, maximum_nan, minimum_u32
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
from numba_kernels.cuda.intrinsics.warp import maximum_f32, maximum_u32_of_warp
from numba_kernels.cuda.row_blocks import ENTRIES_BYTES, THREADS, exchange, row_blocks
from numba_kernels.cuda.selection import (
    INFINITY,
    LOWEST_FINITE,
    MAX_CANDIDATES,
    MAX_VOCAB,
    NO_TOKEN,
    SEARCH_BYTES,
    TOO_MANY,
    candidate_at,
    clear_search,
    gather_candidates,
    load_quad,
    of_rising,
    rank_of,
    rising,
    searcher,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation
from numba_kernels.sampler_chain import GREEDY_BELOW

float32, int32, uint32, uint64 = types.float32, types.int32, types.uint32, types.uint64

OK = 0
NOTHING_TO_DRAW = 1  # NaN or +inf among the row's logits, or -inf alone
BAD_ID = 2  # an id outside the vocabulary among bias or penalty ids
_IN_PROMPT = 1 << 31  # of a count: the token is in the prompt
HAS_LOGITS, IS_SPOILT, HAS_BAD_ID, IS_SPOILT_BY_LISTS = 1, 2, 4, 8  # what a row's threads find
_LISTED_AT_ONCE = 4
_ALL_BITS = 0xFFFFFFFF
_SEARCH_AT = 2 * ENTRIES_BYTES  # in shared memory, after the entries of the first and the last exchange
_PART_AT = _SEARCH_AT + SEARCH_BYTES  # the block's part of the row
_LEAST_SHARED = 99 << 10
_MEETING, _ALONE = 16_000, 6_000
"""Tokens that a block could read while it waits for others, or in a lone block's overhead."""
_FAR = 2
"""Relative time of a token in device memory. All are estimates."""

_count = instruction("red.global.add.u32 [$0], $1;", "", "l r")
_mark = instruction("red.global.or.b32 [$0], $1;", "", "l r")
_take = instruction("atom.global.exch.b32 $0, [$1], $2;", "r", "l r")
load = instruction("ld.f32 $0, [$1];", "f", "l")  # of a row's part: device or shared memory
store = instruction("st.f32 [$0], $1;", "", "l f")
store_4 = instruction("st.v4.f32 [$0], {$1,$2,$3,$4};", "", "l ffff")


@device_function
def _fetch(part, raw, num_quads, num_tokens):
    """Brings a block's part of a row to shared memory, each thread its own part; -inf up to a whole quad."""
    is_aligned = uint32(raw) & uint32(15) == uint32(0)
    quad = uint32(cuda.threadIdx.x)
    while quad < num_quads:
        place = uint32(part + quad * uint32(16))
        if is_aligned and uint32(uint32(quad * uint32(4)) + uint32(3)) < num_tokens:
            memory.copy_async_whole_16(place, raw + uint64(quad) * uint64(16))
        else:
            memory.shared_store_4xf32(place, load_quad(raw, quad, num_tokens))
        quad = uint32(quad + uint32(THREADS))
    memory.copy_async_commit()
    _wait_for_copies()


_wait_for_copies = memory.copy_async_wait(0)


@device_function
def _repeat(logit, penalty):
    return divide(logit, penalty) if logit > float32(0.0) else multiply(logit, penalty)


@device_function
def add_bias(part, first_token, num_tokens, vocab, ids, values, count):
    """Adds a list's biases to a part; those of one token in their order, by the thread that has the first. Flags."""
    flags = uint32(0)
    i = uint32(cuda.threadIdx.x)
    while i < count:
        token = memory.load_b32(ids + uint64(i) * uint64(4))
        if token >= vocab:
            flags = uint32(HAS_BAD_ID)
        elif uint32(token - first_token) < num_tokens:  # else it wraps around
            is_first = True
            j = uint32(0)
            while j < i and is_first:
                is_first = memory.load_b32(ids + uint64(j) * uint64(4)) != token
                j = uint32(j + uint32(1))
            if is_first:
                place = part + uint64(uint32(token - first_token)) * uint64(4)
                logit = load(place)
                j = i
                while j < count:
                    if memory.load_b32(ids + uint64(j) * uint64(4)) == token:
                        logit = add(logit, memory.load_f32(values + uint64(j) * uint64(4)))
                    j = uint32(j + uint32(1))
                store(place, logit)
        i = uint32(i + uint32(THREADS))
    return flags


@device_function
def _penalised(logit, count, repetition, presence, frequency):
    """Repetition over prompt and output, frequency and presence over the output."""
    logit = _repeat(logit, repetition)
    times = count & uint32(_IN_PROMPT - 1)
    if times > uint32(0):
        logit = subtract(subtract(logit, multiply(frequency, f32_from_u32(times))), presence)
    return logit


@device_function
def go_through(step, row, ids, count, is_prompt, penalties):
    """Step 0 clears the counts of a list's tokens, step 1 counts them or marks them as the prompt's, and in step 2 the
    thread that takes a token's count penalises it. Flags. `row` is (the block's part, its first token, how many, the
    vocabulary's size, the row's counts)."""
    part, first_token, num_tokens, vocab, counts = row
    flags = uint32(0)
    i = uint32(cuda.threadIdx.x)
    while i < count:
        last = uint32(count - uint32(1))
        tokens = (
            memory.load_b32(ids + uint64(i) * uint64(4)),
            memory.load_b32(ids + uint64(minimum_u32(uint32(i + uint32(THREADS)), last)) * uint64(4)),
            memory.load_b32(ids + uint64(minimum_u32(uint32(i + uint32(2 * THREADS)), last)) * uint64(4)),
            memory.load_b32(ids + uint64(minimum_u32(uint32(i + uint32(3 * THREADS)), last)) * uint64(4)),
        )
        for e in range(_LISTED_AT_ONCE):
            if uint32(i + uint32(e * THREADS)) < count:
                place = counts + uint64(tokens[e]) * uint64(4)
                if tokens[e] >= vocab:
                    flags = uint32(HAS_BAD_ID)
                elif uint32(tokens[e] - first_token) < num_tokens:
                    if step == uint32(0):
                        memory.store_b32(place, uint32(0))
                    elif step == uint32(1):
                        if is_prompt:
                            _mark(place, uint32(_IN_PROMPT))
                        else:
                            _count(place, uint32(1))
                    else:
                        times = _take(place, uint32(0))
                        if times != uint32(0):
                            logit_place = part + uint64(uint32(tokens[e] - first_token)) * uint64(4)
                            logit = _penalised(load(logit_place), times, penalties[0], penalties[1], penalties[2])
                            store(logit_place, logit)
        i = uint32(i + uint32(_LISTED_AT_ONCE * THREADS))
    return flags


@device_function
def penalise(row, prompt, output, penalties):
    """`go_through` in three steps, of the lists of the prompt and of the output, (address, count). Flags."""
    flags, step = uint32(0), uint32(0)
    while step < uint32(3):
        sync_block()
        flags |= go_through(step, row, prompt[0], prompt[1], True, penalties)
        flags |= go_through(step, row, output[0], output[1], False, penalties)
        step = uint32(step + uint32(1))
    return flags


@device_function
def pick(items, index):
    """One of a tuple of four."""
    low = items[0] if index == uint32(0) else items[1]
    high = items[2] if index == uint32(2) else items[3]
    return low if index < uint32(2) else high


@device_function
def no_later_than(word):
    """A bound above -ln(1 - u), u = (word + 0.5) / 2^32: it is convex, and 1 - u is at least 2^-(s + 1)."""
    steps = f32_from_u32(count_leading_zeros(word ^ uint32(0xFFFFFFFF)) + uint32(1))
    chord = f32_from_u32(word) * float32(1.387 * 2.0**-32) + float32(2.0**-32)
    return steps * float32(0.6932) if word >> uint32(31) != uint32(0) else chord


@device_function
def could_win(logit, word, largest, bound):
    """Whether a token could be no later than `bound`: its time is at least uniform / weight, which are off by less than
    1e-5 here."""
    weight = exp2(subtract(logit, largest) * float32(1.44269504))
    return f32_from_u32(word) * float32(2.0**-32) <= bound * weight * float32(1.001)


@device_function
def race(logit, word, token, largest, lowest, bound, first):
    """The time of the first to finish of the thread's tokens, as a pair, and that token, when another one runs. Tokens
    later than `bound` cannot win."""
    time, time_low, winner = first
    weight = exp(subtract(logit, largest))  # no word makes a weight of 2^-40 win
    uniform = multiply(f32_from_u32(word), float32(2.0**-32))
    may_win = uniform <= bound * weight * float32(1.000001) and weight > float32(2.0**-40)
    if may_win and rank_of(logit, token) >= lowest:
        own, own_low = pair_quotient(exponential_of_word(word), (weight, float32(0.0)))
        if own < time or (own == time and (own_low < time_low or (own_low == time_low and token < winner))):
            time, time_low, winner = own, own_low, token
    return time, time_low, winner


@device_function
def soonest_of_warp(time):
    """The least of the lanes' positive float32."""
    flipped = maximum_u32_of_warp(bits_from_f32(time) ^ uint32(_ALL_BITS))
    return f32_from_bits(flipped ^ uint32(_ALL_BITS))


@device_function
def _run_race(own_part, seed, draw, token, largest, lowest, num_candidates, search_memory):
    """A thread's winner, (time, its lower part, token), of the race of its block's tokens, or candidates.

    `token` is one of the largest. It is of weight 1 and runs first: those that cannot be faster need no logarithm."""
    (part, first_quad, num_quads, num_tokens), (choice, position) = own_part, draw
    key_low, key_high = uint32(seed), uint32(seed >> uint64(32))
    words = philox(token >> uint32(2), choice, position, uint32(0), key_low, key_high)
    first = no_later_than(pick(words, token & uint32(3))), float32(0.0), uint32(NO_TOKEN)
    lane, first_of_warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) & uint32(0xFFFFFFE0)
    if num_candidates > uint32(MAX_CANDIDATES):
        while first_of_warp < num_quads:
            quad = uint32(first_of_warp + lane)
            quad_logits = load_quad(part, quad, num_tokens)
            at, bound = uint32(first_quad + quad), soonest_of_warp(first[0])
            words = philox(at, choice, position, uint32(0), key_low, key_high)
            may_win = False
            for e in range(4):
                may_win |= could_win(quad_logits[e], words[e], largest, bound)
            e = uint32(0)
            while may_win and e < uint32(4):
                token = uint32(uint32(at * uint32(4)) + e)
                first = race(pick(quad_logits, e), pick(words, e), token, largest, lowest, bound, first)
                e = uint32(e + uint32(1))
            first_of_warp = uint32(first_of_warp + uint32(THREADS))
    else:
        while first_of_warp < num_candidates:
            bound = soonest_of_warp(first[0])
            if uint32(first_of_warp + lane) < num_candidates:
                logit, token = candidate_at(search_memory, uint32(first_of_warp + lane))
                words = philox(token >> uint32(2), choice, position, uint32(0), key_low, key_high)
                word = pick(words, token & uint32(3))
                if could_win(logit, word, largest, bound):
                    first = race(logit, word, token, largest, lowest, bound, first)
            first_of_warp = uint32(first_of_warp + uint32(THREADS))
    return first


@functools.cache
def _kernel(is_cluster: bool) -> Specialisation:
    rank_in_row, num_blocks, _, leave, _, _ = row_blocks(is_cluster)
    exchanged, search = exchange(is_cluster), searcher(is_cluster)
    load_f32, load_b32, load_b64 = memory.load_f32, memory.load_b32, memory.load_b64

    def sampling(
        logits, temperatures, top_ks, top_ps, min_ps, repetitions, presences, frequencies, seeds, choices, positions,
        prompt_ids, prompt_start, prompt_end, output_ids, output_start, output_end, bias_ids, bias_values, bias_start,
        bias_end, allowed, work, all_counts, token_ids, statuses, id_flag, flag_copy, vocab, mask_words,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        thread = uint32(cuda.threadIdx.x)
        shared = uint32(uint32(memory.shared_address(cuda.shared.array(0, uint32)) + uint32(15)) & uint32(0xFFFFFFF0))
        search_memory = uint32(shared + uint32(_SEARCH_AT))
        row = divide_u32(uint32(cuda.blockIdx.x), num_blocks())
        of_row = uint64(row) * uint64(4)
        temperature = load_f32(temperatures + of_row)
        repetition = load_f32(repetitions + of_row)
        presence = load_f32(presences + of_row)
        frequency = load_f32(frequencies + of_row)
        min_p = load_f32(min_ps + of_row)
        first_bias = load_b32(bias_start + of_row)
        num_bias = uint32(load_b32(bias_end + of_row) - first_bias)
        is_penalised = repetition != float32(1.0) or presence != float32(0.0) or frequency != float32(0.0)
        is_greedy = temperature < float32(GREEDY_BELOW)
        is_listed = num_bias > uint32(0) or is_penalised
        is_changed = (
            is_listed
            or allowed != uint64(0)
            or not (is_greedy or (temperature == float32(1.0) and min_p == float32(0.0)))
        )

        # The block's part of the row.
        num_quads = uint32(uint32(vocab + uint32(3)) >> uint32(2))
        quads_each = divide_u32(uint32(num_quads + uint32(num_blocks() - uint32(1))), num_blocks())
        first_quad = minimum_u32(uint32(rank_in_row() * quads_each), num_quads)
        num_quads = minimum_u32(uint32(num_quads - first_quad), quads_each)
        first_token = uint32(first_quad * uint32(4))
        num_tokens = minimum_u32(uint32(vocab - first_token), uint32(num_quads * uint32(4)))
        row_bytes = uint64(vocab) * uint64(4)
        raw = logits + uint64(row) * row_bytes + uint64(first_token) * uint64(4)
        counts = all_counts + uint64(row) * row_bytes
        mask = allowed + uint64(row) * uint64(mask_words) * uint64(4)
        part = raw
        if work == uint64(0):
            _fetch(uint32(shared + uint32(_PART_AT)), raw, num_quads, num_tokens)
            part = raw = memory.generic_address(uint32(shared + uint32(_PART_AT)))
        elif is_changed:
            width = uint64(uint32(vocab + uint32(3)) & uint32(0xFFFFFFFC))
            part = work + (uint64(row) * width + uint64(first_token)) * uint64(4)

        # Tokens not allowed are masked, and a row without lists is scaled at once. NaN or +inf spoils it.
        flags, passes = uint32(0), uint32(0)
        is_going_on = True
        while is_going_on:
            if passes > uint32(0):
                sync_block()
                place = uint64(first_bias) * uint64(4)
                flags |= add_bias(
                    part, first_token, num_tokens, vocab, bias_ids + place, bias_values + place, num_bias
                )  # fmt: skip
                if is_penalised:
                    prompt = load_b32(prompt_start + of_row)
                    num_prompt = uint32(load_b32(prompt_end + of_row) - prompt)
                    output = load_b32(output_start + of_row)
                    num_output = uint32(load_b32(output_end + of_row) - output)
                    own_row = part, first_token, num_tokens, vocab, counts
                    prompts = prompt_ids + uint64(prompt) * uint64(4), num_prompt
                    outputs = output_ids + uint64(output) * uint64(4), num_output
                    flags |= penalise(own_row, prompts, outputs, (repetition, presence, frequency))
                sync_block()
            is_going_on = is_listed and passes == uint32(0)
            is_scaled = not (is_going_on or is_greedy) and temperature != float32(1.0)
            is_masked = allowed != uint64(0) and passes == uint32(0)
            read_largest, largest, best_quad = float32(-INFINITY), float32(-INFINITY), uint32(NO_TOKEN)
            quad = thread
            while quad < num_quads:
                a, b, c, d = load_quad(raw, quad, num_tokens)
                read_largest = maximum_nan(read_largest, maximum_nan(maximum_nan(a, b), maximum_nan(c, d)))
                if is_masked:
                    at = uint32(first_quad + quad)
                    allowed_bits = load_b32(mask + uint64(at >> uint32(3)) * uint64(4)) >> (
                        (at & uint32(7)) << uint32(2)
                    )
                    a = a if allowed_bits & uint32(1) != uint32(0) else float32(-INFINITY)
                    b = b if allowed_bits & uint32(2) != uint32(0) else float32(-INFINITY)
                    c = c if allowed_bits & uint32(4) != uint32(0) else float32(-INFINITY)
                    d = d if allowed_bits & uint32(8) != uint32(0) else float32(-INFINITY)
                if is_scaled:
                    a, b, c, d = (
                        divide(a, temperature), divide(b, temperature), divide(c, temperature), divide(d, temperature)
                    )  # fmt: skip
                if is_changed:
                    store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
                largest_of_quad = maximum_f32(maximum_f32(a, b), maximum_f32(c, d))
                if largest_of_quad > largest:
                    largest, best_quad = largest_of_quad, quad
                quad = uint32(quad + uint32(THREADS))
            if not read_largest < float32(INFINITY):
                flags |= uint32(IS_SPOILT) if passes == uint32(0) else uint32(IS_SPOILT_BY_LISTS)
            elif read_largest > float32(-INFINITY) and passes == uint32(0):
                flags |= uint32(HAS_LOGITS)
            raw = part
            passes = uint32(passes + uint32(1))
        token = uint32(NO_TOKEN)
        if best_quad != uint32(NO_TOKEN):
            a, b, c, _ = load_quad(part, best_quad, num_tokens)
            e = uint32(0) if a == largest else uint32(1) if b == largest else uint32(2) if c == largest else uint32(3)
            token = uint32(uint32(uint32(first_quad + best_quad) * uint32(4)) + e)

        if not is_greedy:
            clear_search(search_memory)
        best, best_token, _, flags = exchanged(shared, rising(largest), token ^ uint32(NO_TOKEN), uint32(0), flags)
        largest, token = of_rising(best), best_token ^ uint32(NO_TOKEN)
        status = int32(OK)
        if flags & uint32(IS_SPOILT) != uint32(0) or flags & uint32(HAS_LOGITS) == uint32(0):
            status = int32(NOTHING_TO_DRAW)
        elif flags & uint32(HAS_BAD_ID) != uint32(0):
            status = int32(BAD_ID)
        elif (
            flags & uint32(IS_SPOILT_BY_LISTS) != uint32(0)
            or largest == float32(INFINITY)
            or largest == float32(-INFINITY)
        ):
            status = int32(NOTHING_TO_DRAW)

        if status == int32(OK) and not is_greedy:
            if min_p > float32(0.0):
                quad = thread
                while quad < num_quads:
                    a, b, c, d = load_quad(part, quad, num_tokens)
                    a = a if exp(subtract(a, largest)) >= min_p else float32(-INFINITY)
                    b = b if exp(subtract(b, largest)) >= min_p else float32(-INFINITY)
                    c = c if exp(subtract(c, largest)) >= min_p else float32(-INFINITY)
                    d = d if exp(subtract(d, largest)) >= min_p else float32(-INFINITY)
                    store_4(part + uint64(quad) * uint64(16), (a, b, c, d))
                    quad = uint32(quad + uint32(THREADS))

            # The lowest rank that is kept: at first all but -inf, then top-k with its ties, then top-p.
            top_k = load_b32(top_ks + of_row)
            top_p = load_f32(top_ps + of_row)
            lowest, num_candidates, turn = uint64(LOWEST_FINITE), uint32(TOO_MANY), uint32(0)
            own_part = part, first_quad, num_quads, num_tokens
            are_few = allowed != uint64(0) or min_p > float32(0.0)
            searches = uint32(0)
            while searches < uint32(2):
                is_mass = searches == uint32(1)
                if top_p < float32(1.0) if is_mass else int32(top_k) > int32(0) and top_k < vocab:
                    kind, progress = (is_mass, not is_mass, are_few), (num_candidates, turn)
                    share = top_p if is_mass else float32(1.0)
                    lowest, num_candidates, turn = search(
                        own_part, largest, lowest, uint64(top_k), share, kind, progress, search_memory
                    )
                searches = uint32(searches + uint32(1))

            seed, draw = (
                load_b64(seeds + of_row * uint64(2)),
                (load_b32(choices + of_row), load_b32(positions + of_row)),
            )
            if num_candidates > uint32(MAX_CANDIDATES) and (are_few or lowest > uint64(LOWEST_FINITE)):
                num_candidates = gather_candidates(own_part, lowest, search_memory, turn)
            first = _run_race(own_part, seed, draw, token, largest, lowest, num_candidates, search_memory)
            _, _, best_token, _ = exchanged(
                uint32(shared + uint32(ENTRIES_BYTES)), bits_from_f32(first[0]) ^ uint32(_ALL_BITS),
                rising(first[1]) ^ uint32(_ALL_BITS), first[2] ^ uint32(NO_TOKEN), uint32(0),
            )  # fmt: skip
            token = best_token ^ uint32(NO_TOKEN)

        if thread == uint32(0) and rank_in_row() == uint32(0):
            memory.store_b32(token_ids + of_row, token if status == int32(OK) else uint32(NO_TOKEN))
            memory.store_b32(statuses + of_row, uint32(status))
            if row == uint32(0):
                memory.store_b32(flag_copy, load_b32(id_flag))
        leave()

    return Specialisation(
        name=f"sampling_{'cluster' if is_cluster else 'block'}",
        kernel=cuda.jit(sampling),
        argument_types=(uint64,) * (len(inspect.signature(sampling).parameters) - 2) + (uint32,) * 2,
        max_threads=THREADS,
        min_capability=90 if is_cluster else 80,
        constants={"is_cluster": is_cluster},
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, and the bytes of device memory that the kernel needs as `work`, or 0."""

    launch: Launch
    work_bytes: int


def shared_bytes(vocab: int, num_blocks: int, *, is_resident: bool = True) -> int:
    """Shared memory of one of a row's blocks, with its part of the row or without."""
    num_quads = -(-vocab // 4)
    return 16 + _PART_AT + (16 * -(-num_quads // num_blocks) if is_resident else 0)


def plan(
    num_rows: int, vocab: int, *, max_clusters: tuple[tuple[int, int], ...] = (), num_sms: int = 1, max_shared: int = 0
) -> Plan | None:
    """The plan for ``logits [num_rows, vocab]``; None where there are no rows.

    Args:
        max_clusters: (blocks a cluster, clusters that run at once where a multiprocessor holds one block); none on a
            device without clusters.
        num_sms: multiprocessors of the device.
        max_shared: bytes of shared memory that a block may have; 0 for the amount of every device.

    Raises ValueError for a vocabulary of no token, or of more than `MAX_VOCAB`.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"sampling: vocab is {vocab}, must be 1 to {MAX_VOCAB}")
    if num_rows == 0:
        return None
    is_cluster = bool(max_clusters)
    max_shared = max_shared or _LEAST_SHARED
    found = []
    for size, at_once in ((1, num_sms), *max_clusters):
        is_resident = shared_bytes(vocab, size) <= max_shared
        needed = shared_bytes(vocab, size, is_resident=is_resident)
        tokens = -(-vocab // size) * (1 if is_resident else _FAR)
        cost = -(-num_rows // at_once) * (tokens + (_MEETING if size > 1 else _ALONE))
        found.append((cost, size, needed, is_resident))
    _, size, needed, is_resident = min(found)
    work_bytes = 0 if is_resident else num_rows * -(-vocab // 4) * 16
    launch = Launch(
        _kernel(is_cluster), (num_rows * size, 1, 1), (THREADS, 1, 1), needed, cluster=(size, 1, 1)
    )  # fmt: skip
    return Plan(launch, work_bytes)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for is_cluster in (True, False):
        yield _kernel(is_cluster)
