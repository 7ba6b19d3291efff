"""Routing: a warp takes a token's logits, one expert or a few a lane.

    scores  = softmax(logits) or sigmoid(logits)                    over all experts
    ids     = the top_k largest of scores + bias, largest first; of equals the lower one
    weights = scores[ids], over their sum if configured, times a scale, and times the expert's factor if it has one

or one after another by their logits, as SparseMixer does, as described in `numba_kernels.cpu.experts`. With groups only
the experts of the best ones are candidates, as there. Comparisons are of integers that rise with the float32 numbers,
so that `redux` finds the largest of a warp in one instruction. A row with NaN gets valid experts, and NaN as weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics.convert import bits_from_f32
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import absolute, divide, divide_u32, exp, sigmoid
from numba_kernels.cuda.intrinsics.memory import load_f32, store_b32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import (
    ballot,
    lane_index,
    maximum_u32_of_warp,
    shuffle_index_f32,
    warp_max,
    warp_sum,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

WARPS = 4  # tokens of a block
PER_LANE = (1, 2, 4, 8, 16)  # experts of a lane
MAX_EXPERTS, MAX_GROUPS = 32 * PER_LANE[-1], 32
_TOP = 0xFFFFFFFF
_MINUS_INFINITY = float("-inf")


@device_function
def _rising(value):
    """uint32 that rise with float32 numbers; above 0, which means an expert that cannot be chosen."""
    bits = bits_from_f32(value)
    return uint32(~bits) if bits & uint32(0x80000000) else uint32(bits | uint32(0x80000000))


@device_function
def _lowest(number, is_candidate):
    """The lowest number of the warp's candidates; all ones where there is none."""
    return uint32(~maximum_u32_of_warp(uint32(~number) if is_candidate else uint32(0)))


@functools.cache
def chooser(per_lane: int, scores: str, has_groups: bool) -> Any:
    """A device function ``(row, lane, num_experts, top_k, (num_groups, top_groups, adds_two), (normalises, scale,
    sum_eps))`` for a whole warp and a row: a tuple of the addresses of its logits, of the scores' bias and the weights'
    factors (or 0), of its ids and weights. SparseMixer's threshold takes the place of `sum_eps`."""
    is_softmax, is_sparse = scores == "softmax", scores == "sparsemixer"

    @device_function
    def leave_groups(choice, lane, num_experts, num_groups, top_groups, adds_two):
        """Makes the choice of experts outside the best groups -inf."""
        size = divide_u32(num_experts, num_groups)
        own_rank = uint32(0)
        group = uint32(0)
        while group < num_groups:
            first = float32(_MINUS_INFINITY)
            second = float32(_MINUS_INFINITY)
            for i in range(per_lane):
                expert = uint32(lane + uint32(32 * i))
                if expert < num_experts and divide_u32(expert, size) == group:
                    value = choice[i]
                    if value > first:
                        second = first
                        first = value
                    elif value > second:
                        second = value
            best = warp_max(first)
            rank = best
            if adds_two != uint32(0):
                owner = _lowest(lane, first == best)
                rank = best + warp_max(second if lane == owner else first)
            if lane == group:
                own_rank = _rising(rank)
            group = uint32(group + uint32(1))
        kept = uint32(0)
        turn = uint32(0)
        while turn < top_groups:
            owner = _lowest(lane, own_rank == maximum_u32_of_warp(own_rank))
            kept = uint32(kept | uint32(uint32(1) << owner))
            if lane == owner:
                own_rank = uint32(0)
            turn = uint32(turn + uint32(1))
        for i in range(per_lane):
            group = divide_u32(uint32(lane + uint32(32 * i)), size)
            if uint32(kept >> group) & uint32(1) == uint32(0):
                choice[i] = float32(_MINUS_INFINITY)

    @device_function
    def choose(row, lane, num_experts, top_k, groups, ends):
        (logits, bias, factors, ids, weights), (normalises, scale, sum_eps) = row, ends
        num_groups, top_groups, adds_two = groups
        found = cuda.local.array(per_lane, float32)  # the experts' scores
        choice = cuda.local.array(per_lane, float32)
        keys = cuda.local.array(per_lane, uint32)
        ranks = cuda.local.array(per_lane, uint32)
        mixed = cuda.local.array(per_lane, float32)  # weights of SparseMixer
        peak = float32(_MINUS_INFINITY)
        for i in range(per_lane):
            expert = uint32(lane + uint32(32 * i))
            found[i] = float32(_MINUS_INFINITY)
            if expert < num_experts:
                found[i] = load_f32(logits + uint64(expert) * uint64(4))
            if found[i] > peak:
                peak = found[i]
        if is_softmax:
            peak = warp_max(peak)
            total = float32(0.0)
            for i in range(per_lane):
                if uint32(lane + uint32(32 * i)) < num_experts:
                    found[i] = exp(found[i] - peak)
                    total += found[i]
            total = warp_sum(total)
            for i in range(per_lane):
                found[i] = divide(found[i], total)
        elif not is_sparse:
            for i in range(per_lane):
                found[i] = sigmoid(found[i])
        has_nan = uint32(0)
        for i in range(per_lane):
            if uint32(lane + uint32(32 * i)) < num_experts and found[i] != found[i]:
                has_nan = uint32(1)
        is_nan = ballot(has_nan) != uint32(0)
        for i in range(per_lane):
            expert = uint32(lane + uint32(32 * i))
            choice[i] = found[i]
            if bias != uint64(0) and expert < num_experts:
                choice[i] += load_f32(bias + uint64(expert) * uint64(4))
            if is_nan:
                choice[i] = float32(0.0)
        if has_groups:
            leave_groups(choice, lane, num_experts, num_groups, top_groups, adds_two)
        for i in range(per_lane):
            ranks[i] = uint32(_TOP)
            keys[i] = uint32(0)
            if uint32(lane + uint32(32 * i)) < num_experts:
                keys[i] = _rising(choice[i])
        total = float32(0.0)
        rank = uint32(0)
        while rank < top_k:
            own_best = uint32(0)
            own_expert = uint32(_TOP)
            for i in range(per_lane):
                if keys[i] > own_best:  # of equals the first, which is the lower expert
                    own_best = keys[i]
                    own_expert = uint32(lane + uint32(32 * i))
            best = _lowest(own_expert, own_best == maximum_u32_of_warp(own_best))
            score = float32(0.0)
            for i in range(per_lane):
                if uint32(lane + uint32(32 * i)) == best:
                    keys[i] = uint32(0)
                    ranks[i] = rank
                    score = found[i]
            score = shuffle_index_f32(score, uint32(best & uint32(31)))
            total += score
            if is_sparse:
                others = float32(0.0)
                for i in range(per_lane):
                    bound = absolute(found[i])
                    if bound < score:
                        bound = score
                    is_far = score - found[i] > sum_eps * bound
                    if keys[i] != uint32(0) and not is_far:
                        others += exp(found[i] - score)
                weight = divide(float32(1.0), warp_sum(others) + float32(1.0))
                for i in range(per_lane):
                    if uint32(lane + uint32(32 * i)) == best:
                        mixed[i] = weight
            rank = uint32(rank + uint32(1))
        for i in range(per_lane):
            if ranks[i] != uint32(_TOP):
                value = found[i]
                if is_sparse:
                    value = mixed[i]
                if normalises != uint32(0):
                    value = divide(value, total + sum_eps)
                value = value * scale
                if factors != uint64(0):
                    value = value * load_f32(factors + uint64(uint32(lane + uint32(32 * i))) * uint64(4))
                if is_nan:
                    value = found[i] - found[i] + float32(float("nan"))
                place = uint64(ranks[i]) * uint64(4)
                store_b32(ids + place, uint32(lane + uint32(32 * i)))
                store_f32(weights + place, value)

    return choose


@functools.cache
def _kernel(per_lane: int, scores: str, has_groups: bool) -> Specialisation:
    """Arguments: logits [T, E] float32, bias and factors [E] float32 or 0, ids [T, k] int32, weights [T, k] float32
    addresses; T, E, k; groups, groups kept, whether a group's two best are added; whether weights are normalised;
    scale, the addend of the sum."""
    choose = chooser(per_lane, scores, has_groups)

    def route(
        logits, bias, factors, ids, weights, num_rows, num_experts, top_k, num_groups, top_groups, adds_two,
        normalises, scale, sum_eps,
    ):  # fmt: skip
        row = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + (uint32(cuda.threadIdx.x) >> uint32(5)))
        wait_for_previous_grid()
        launch_dependents()
        if row < num_rows:
            at = uint64(row) * uint64(top_k) * uint64(4)
            of_row = logits + uint64(row) * uint64(num_experts) * uint64(4), bias, factors, ids + at, weights + at
            groups, ends = (num_groups, top_groups, adds_two), (normalises, scale, sum_eps)
            choose(of_row, lane_index(), num_experts, top_k, groups, ends)

    return Specialisation(
        name=f"route_{scores}_x{per_lane}{'_groups' if has_groups else ''}",
        kernel=cuda.jit(route),
        argument_types=(types.uint64,) * 5 + (types.uint32,) * 7 + (types.float32,) * 2,
        max_threads=WARPS * 32,
        constants={"per_lane": per_lane, "scores": scores, "has_groups": has_groups},
    )


def why_not(num_experts: int, num_groups: int) -> str:
    """Why no kernel chooses among so many experts and groups; "" if one does."""
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts, at most {MAX_EXPERTS}"
    return f"{num_groups} groups of experts, at most {MAX_GROUPS}" if num_groups > MAX_GROUPS else ""


def lane_experts(num_experts: int) -> int:
    """How many experts a lane has."""
    return next(each for each in PER_LANE if 32 * each >= num_experts)


def plan(num_rows: int, num_experts: int, scores: str, num_groups: int) -> Launch:
    """The launch for at least one row, if `why_not` is ""."""
    kernel = _kernel(lane_experts(num_experts), scores, num_groups > 1)
    return Launch(kernel, (-(-num_rows // WARPS), 1, 1), (WARPS * 32, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for per_lane in PER_LANE:
        for scores in ("softmax", "sigmoid"):
            for has_groups in (False, True):
                yield _kernel(per_lane, scores, has_groups)
        yield _kernel(per_lane, "sparsemixer", False)
