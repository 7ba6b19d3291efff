"""Kernels around the products of experts: routing, grouping tokens by expert, and the weighted sum of a token's
experts.

    scores = softmax(logits) or sigmoid(logits)                    over all experts
    ids    = the top_k largest of scores + bias, largest first; of equals the lower one
    weights = scores[ids], over their sum if configured, times a scale, and times the expert's factor if it has one

or, as SparseMixer (2310.00811) chooses: one expert after another, the largest logit l that is left, weighed by a
softmax over those that are left and for which (l - logit) / max(|logit|, l) is not above a threshold.

With groups, experts lie in ``num_groups`` equal parts, and only those of the ``top_groups`` best parts are chosen from:
a part is as good as its best expert, or as its best two together. Sources: Mixtral (arXiv 2401.04088), DeepSeek-V2
(2405.04434) and V3 (2412.19437).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at

KINDS = ("softmax", "sigmoid", "sparsemixer")  # the argument is the place of one
SOFTMAX, SIGMOID, SPARSEMIXER = range(3)
_LOWEST = np.float32(-np.inf)


@njit(nogil=True)
def _scores_of(logits, scores, kind):
    """float32 in the order of experts; NaN in one logit makes a softmax's scores NaN."""
    count = logits.size
    if kind == SIGMOID:
        for i in range(count):
            scores[i] = np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-logits[i])))
        return
    peak = logits[0]
    for i in range(1, count):
        peak = max(peak, logits[i])
    total = np.float32(0.0)
    for i in range(count):
        scores[i] = np.float32(math.exp(logits[i] - peak))
        total += scores[i]
    for i in range(count):
        scores[i] /= total


@njit(nogil=True)
def _best(values):
    """The place of the largest, the lowest of equals; NaN is larger than all."""
    best = 0
    for i in range(1, values.size):
        if values[i] > values[best] or (values[i] != values[i] and values[best] == values[best]):
            best = i
    return best


@njit(nogil=True)
def _mix_sparsely(logits, left, ids, weights, threshold, scale):
    """``left`` is a copy of the logits, in which chosen ones become -inf."""
    for j in range(ids.size):
        best = _best(left)
        peak = left[best]
        total = np.float32(0.0)
        for i in range(left.size):
            bound = max(abs(logits[i]), peak)
            if left[i] > _LOWEST and not peak - logits[i] > threshold * bound:
                total += np.float32(math.exp(logits[i] - peak))
        left[best] = _LOWEST
        ids[j] = best
        weights[j] = scale / total


@njit(nogil=True)
def _leave_groups(choice, num_groups, top_groups, adds_two):
    """Makes the choice of experts outside the best groups -inf."""
    size = choice.size // num_groups
    ranks = np.empty(num_groups, np.float32)
    for group in range(num_groups):
        first = second = _LOWEST
        for i in range(group * size, (group + 1) * size):
            value = choice[i]
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        ranks[group] = first + second if adds_two else first
    kept = np.zeros(num_groups, np.uint8)
    for _ in range(top_groups):
        best = _best(ranks)
        kept[best] = 1
        ranks[best] = _LOWEST
    for group in range(num_groups):
        if kept[group] == 0:
            choice[group * size : (group + 1) * size] = _LOWEST


@functools.cache
def route_kernel() -> Kernel:
    """Writes ``ids [T, k]`` int32 and ``weights [T, k]`` float32 for ``logits [T, E]`` float32; a work item is some
    rows.

    ``bias [E]`` float32, if any, is added for the choice alone; ``factors [E]`` float32, if any, multiply weights of
    softmaxes and sigmoids. ``num_groups`` is 1 without groups. A row with NaN gets
    valid experts, and NaN as a weight.
    """

    def route(arguments, work_item):
        a = carray(arguments, 1)[0]
        count, top_k = a.num_experts, a.top_k
        scores, choice = np.empty(count, np.float32), np.empty(count, np.float32)
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            if a.kind == SPARSEMIXER:
                logits = float32_at(a.logits + row * count * 4, count)
                own = int32_at(a.ids + row * top_k * 4, top_k), float32_at(a.weights + row * top_k * 4, top_k)
                has_nan = (logits != logits).any()
                choice[:] = logits
                if has_nan:
                    choice[:] = np.float32(0.0)
                _mix_sparsely(logits, choice, own[0], own[1], np.float32(a.sum_eps), np.float32(a.scale))
                if has_nan:
                    own[1][:] = np.float32(np.nan)
                continue
            _scores_of(float32_at(a.logits + row * count * 4, count), scores, a.kind)
            is_nan = False
            for i in range(count):
                choice[i] = scores[i]
                is_nan |= scores[i] != scores[i]
            if a.bias != 0:
                bias = float32_at(a.bias, count)
                for i in range(count):
                    choice[i] += bias[i]
            if is_nan:
                choice[:] = np.float32(0.0)
            if a.num_groups > 1:
                _leave_groups(choice, a.num_groups, a.top_groups, a.adds_two != 0)
            ids = int32_at(a.ids + row * top_k * 4, top_k)
            weights = float32_at(a.weights + row * top_k * 4, top_k)
            total = np.float32(0.0)
            for j in range(top_k):
                best = _best(choice)
                choice[best] = _LOWEST
                ids[j] = best
                weights[j] = np.float32(np.nan) if is_nan else scores[best]
                total += weights[j]
            factor = np.float32(a.scale)
            for j in range(top_k):
                weights[j] = (weights[j] / (total + np.float32(a.sum_eps)) if a.normalises else weights[j]) * factor
                if a.factors != 0:
                    weights[j] *= float32_at(a.factors, count)[ids[j]]

    return Kernel(
        route,
        Fields(
            "*logits *bias *factors *ids *weights num_rows num_experts top_k kind num_groups top_groups adds_two "
            "normalises rows_a_work_item",
            "scale sum_eps",
        ),
    )


@functools.cache
def group_kernel() -> Kernel:
    """Puts the ``[T, k]`` draws of ``ids`` together by expert, in the order of tokens; one work item.

    Writes ``starts [E + 1]``, where each expert's rows begin; ``active [num_active]``, the experts that have rows, then
    -1; ``tokens [T k]``, each row's token; ``places [T, k]``, each draw's row. All are int32. A draw of -1 has no row:
    its place is -1, and the rows after the last expert's mean nothing.
    """

    def group(arguments, work_item):
        a = carray(arguments, 1)[0]
        count = a.num_rows * a.top_k
        ids, starts = int32_at(a.ids, count), int32_at(a.starts, a.num_experts + 1)
        active, tokens, places = int32_at(a.active, a.num_active), int32_at(a.tokens, count), int32_at(a.places, count)
        starts[:] = 0
        active[:] = -1
        tokens[:] = 0
        for draw in range(count):
            if ids[draw] >= 0:
                starts[ids[draw] + 1] += 1
        found = 0
        for expert in range(a.num_experts):
            if starts[expert + 1] > 0:
                active[found] = expert
                found += 1
            starts[expert + 1] += starts[expert]
        following = np.empty(a.num_experts, np.int32)
        following[:] = starts[: a.num_experts]
        for draw in range(count):
            expert = ids[draw]
            if expert < 0:
                places[draw] = -1
                continue
            places[draw] = following[expert]
            tokens[following[expert]] = draw // a.top_k
            following[expert] += 1

    return Kernel(group, Fields("*ids *starts *active *tokens *places num_rows top_k num_experts num_active"))


@functools.cache
def combine_kernel() -> Kernel:
    """``out [T, H] = residual + sum over j of weights[t, j] y[places[t, j]] + sigmoid(gate[t]) shared[t]``.

    The sum is in the order of the draws, so that it depends on no other token. ``weights``, ``residual``, ``shared``
    and ``gate [T, 1]`` may be 0; without ``weights`` each is 1, and ``shared`` without a gate is added as it is. A
    place of -1 adds nothing. A work item is some rows.
    """

    def combine(arguments, work_item):
        a = carray(arguments, 1)[0]
        width, top_k = a.width, a.top_k
        first = work_item * a.rows_a_work_item
        for row in range(first, min(a.num_rows, first + a.rows_a_work_item)):
            at = row * width * 4
            out = float32_at(a.out + at, width)
            places = int32_at(a.places + row * top_k * 4, top_k)
            for j in range(top_k):
                weight = np.float32(1.0)
                if a.weights != 0:
                    weight = float32_at(a.weights + row * top_k * 4, top_k)[j]
                if places[j] < 0:
                    if j == 0:
                        out[:] = np.float32(0.0)
                    continue
                y = float32_at(a.y + places[j] * width * 4, width)
                if j == 0:
                    for i in range(width):
                        out[i] = weight * y[i]
                else:
                    for i in range(width):
                        out[i] += weight * y[i]
            if a.shared != 0:
                shared, factor = float32_at(a.shared + at, width), np.float32(1.0)
                if a.gate != 0:
                    gate = float32_at(a.gate + row * 4, 1)[0]
                    factor = np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-gate)))
                for i in range(width):
                    out[i] += factor * shared[i]
            if a.residual != 0:
                residual = float32_at(a.residual + at, width)
                for i in range(width):
                    out[i] += residual[i]

    return Kernel(
        combine, Fields("*y *weights *places *shared *gate *residual *out num_rows top_k width rows_a_work_item")
    )
