"""The steps of a fleet's engines in virtual time, compiled: a hundred thousand a second, for searches over many loads.

An engine decides here as `Scheduler` does with its default batching and policy: all decodes, then chunks of prompts in
the order of arrival up to a budget, blocks of all known tokens at the start and one more when the last is full, the
latest request preempted when none is free (a test compares the times of both). Beyond it, a budget may be a step's
time instead of its tokens, and a sequence may come with its prompt computed elsewhere.

`advance` runs the earliest step until a time, or until requests have their first token and somebody must say which
engine goes on with them. Arguments are named as in `fleet_pages`.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit_borrowing
from runtime.bench.scheduling.fleet_pages import found_blocks, make_room, place_pages, publish, release
from runtime.bench.scheduling.fleet_state import GAP_BINS, GAP_RATIO, LEAST_GAP_S, NONE
from runtime.engine.scheduling.step_limit import MOST_WITHOUT
from runtime.engine.scheduling.step_model import BEYOND, KNEES


@njit_borrowing
def step_seconds(coefficients, tokens, sequences, pairs, context):  # type: ignore[no-untyped-def]
    """`ServedModel.seconds`."""
    total = coefficients[0] + coefficients[1] * sequences + coefficients[2] * tokens
    place = 3
    for knee in KNEES:
        total += coefficients[place] * min(tokens, knee)
        place += 1
    for knee in BEYOND:
        total += coefficients[place] * max(tokens - knee, 0)
        place += 1
    total += coefficients[place] * pairs + coefficients[place + 1] * context
    return max(total, coefficients[place + 2]) if pairs > 0.0 else total


@njit_borrowing
def _pairs(window, start, count):  # type: ignore[no-untyped-def]
    """Query-key pairs of a chunk, the mean over the layers, as `features_of` counts them."""
    full = count * start + count * (count + 1) / 2.0
    size, share = window[0], window[1]
    furthest = start + count - size
    if share > 0.0 and furthest > 0.0:
        nearest = max(start + 1.0 - size, 1.0)
        full -= share * ((nearest + furthest) * (furthest - nearest + 1.0) / 2.0)
    return full


@njit_borrowing
def _context(window, context, num_decodes):  # type: ignore[no-untyped-def]
    """Tokens that decodes attend to; with a window all are taken to exceed it."""
    share = window[1]
    return (1.0 - share) * context + share * min(float(context), window[0] * num_decodes)


@njit_borrowing
def _sift_in(heap, count, until, r):  # type: ignore[no-untyped-def]
    place = count
    while place:
        parent = (place - 1) // 2
        if heap[parent, 0] <= until:
            break
        heap[place, 0], heap[place, 1] = heap[parent, 0], heap[parent, 1]
        place = parent
    heap[place, 0], heap[place, 1] = until, r


@njit_borrowing
def _take_out(heap, count, place):  # type: ignore[no-untyped-def]
    """Remove an entry of a heap with this many."""
    until, r = heap[count - 1, 0], heap[count - 1, 1]
    count -= 1
    if place == count:
        return
    while True:  # downwards
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and heap[child + 1, 0] < heap[child, 0]:
            child += 1
        if heap[child, 0] >= until:
            break
        heap[place, 0], heap[place, 1] = heap[child, 0], heap[child, 1]
        place = child
    heap[place, 0], heap[place, 1] = until, r
    while place:  # upwards
        parent = (place - 1) // 2
        if heap[parent, 0] <= heap[place, 0]:
            break
        for side in range(2):
            heap[place, side], heap[parent, side] = heap[parent, side], heap[place, side]
        place = parent


@njit_borrowing
def _join_decodes(s, e, r):  # type: ignore[no-untyped-def]
    """A request whose known tokens but the last are computed decodes from the next step on."""
    request, engine = s.requests[r], s.engines[e]
    request.until = engine.num_decode_steps + request.num_output - request.produced
    _sift_in(s.heap[e], engine.num_decodes, request.until, r)
    engine.num_decodes += 1
    engine.context += request.computed + 1
    page = s.sizes[0]
    s.phases[e, (request.computed - engine.num_decode_steps) % page] += 1


@njit_borrowing
def _leave_decodes(s, e, place):  # type: ignore[no-untyped-def]
    """The request at this place of the heap decodes no longer; its counts are brought up to date."""
    engine = s.engines[e]
    r = s.heap[e, place, 1]
    request = s.requests[r]
    request.produced = request.num_output - (request.until - engine.num_decode_steps)
    request.computed = request.num_prompt + request.produced - 1
    _take_out(s.heap[e], engine.num_decodes, place)
    engine.num_decodes -= 1
    engine.context -= request.computed + 1
    s.phases[e, (request.computed - engine.num_decode_steps) % s.sizes[0]] -= 1
    request.num_pages += -(-request.computed // s.sizes[0]) - -(-request.known // s.sizes[0])
    return r


@njit_borrowing
def _queue(s, e, r):  # type: ignore[no-untyped-def]
    """Put a request into its engine's queue, in the order of arrival."""
    engine = s.engines[e]
    engine.num_waiting += 1
    before, at = NONE, engine.first_waiting
    while at != NONE and at < r:
        before, at = at, s.requests[at].next
    s.requests[r].next = at
    if before == NONE:
        engine.first_waiting = r
    else:
        s.requests[before].next = r


@njit_borrowing
def _preempt(s, e):  # type: ignore[no-untyped-def]
    """The latest running request gives up its pages and waits again; False if there is only one."""
    engine = s.engines[e]
    if engine.num_running < 2:
        return False
    place, latest = NONE, engine.partial
    for index in range(engine.num_decodes):
        if s.heap[e, index, 1] > latest:
            place, latest = index, s.heap[e, index, 1]
    if place == NONE:
        engine.partial = NONE
    else:
        _leave_decodes(s, e, place)
    request = s.requests[latest]
    release(s, e, latest)
    request.known = request.num_prompt + request.produced
    request.computed = 0
    request.num_preemptions += 1
    engine.num_running -= 1
    s.counts[2] += 1
    _queue(s, e, latest)
    return True


@njit_borrowing
def _grow(s, e):  # type: ignore[no-untyped-def]
    """Pages for decodes whose next token begins one. True if a request was preempted for them."""
    engine = s.engines[e]
    has_preempted = False
    while True:
        phase = (-engine.num_decode_steps) % s.sizes[0]
        needed = s.phases[e, phase]
        if not needed or make_room(s, e, needed):
            engine.num_private += needed
            return has_preempted
        has_preempted = True
        if not _preempt(s, e):
            return has_preempted


@njit_borrowing
def _chunk(s, e, r, tokens, sequences, pairs, context):  # type: ignore[no-untyped-def]
    """How many of a prompt's tokens fit into the step beside these."""
    engine, request = s.engines[e], s.requests[r]
    count = min(request.known - request.computed, engine.budget - tokens)
    if engine.step_s == 0.0 or engine.num_decodes == 0 or count <= 0 or engine.num_without >= MOST_WITHOUT:
        return count
    if request.known - request.computed == 1:
        return count  # as a decode
    low, high = 0, count  # the most tokens within the time
    limit_s = engine.step_s + max(engine.saved_s, 0.0)
    while low < high:
        middle = (low + high + 1) // 2
        added = _pairs(s.window, request.computed, middle)
        if step_seconds(s.coefficients, tokens + middle, sequences + 1, pairs + added, context) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low if 2 * low >= count or engine.saved_s >= engine.most_saved_s else 0


@njit_borrowing
def _admit_coming(s, e):  # type: ignore[no-untyped-def]
    """Sequences whose prompt was computed elsewhere decode from this step on, if they have come and there is room."""
    engine = s.engines[e]
    while engine.first_coming != NONE and engine.num_running < s.sizes[2]:
        r = engine.first_coming
        request = s.requests[r]
        if request.ready > engine.clock or not place_pages(s, e, r, engine.num_running):
            return
        engine.first_coming = request.next
        engine.num_running += 1
        request.computed = request.num_prompt
        publish(s, e, r)
        _join_decodes(s, e, r)


@njit_borrowing
def _step(s, e, stops):  # type: ignore[no-untyped-def]
    """Run a step; False if the engine has nothing to do now. With ``stops`` first tokens wait in ``fresh``."""
    engine = s.engines[e]
    _admit_coming(s, e)
    has_preempted = _grow(s, e)
    num_decodes = engine.num_decodes
    tokens, sequences, pairs = num_decodes, num_decodes, 0.0
    context = _context(s.window, engine.context, num_decodes)
    begun = engine.clock
    num_done = 0  # prompts that this step completes, listed in fresh
    while tokens < engine.budget:
        r = engine.partial
        if r == NONE:
            r = engine.first_waiting
            if r == NONE or has_preempted or engine.num_running >= s.sizes[2]:
                break
            if not place_pages(s, e, r, engine.num_running):
                break
            s.requests[r].computed = s.requests[r].num_published * s.sizes[1]
            if _chunk(s, e, r, tokens, sequences, pairs, context) <= 0:
                release(s, e, r)
                s.requests[r].computed = 0
                break
            engine.first_waiting = s.requests[r].next
            engine.num_waiting -= 1
            engine.num_running += 1
            engine.partial = r
            s.requests[r].num_hit += s.requests[r].computed
            if s.requests[r].begun < 0.0:
                s.requests[r].begun = begun
        request = s.requests[r]
        count = _chunk(s, e, r, tokens, sequences, pairs, context)
        if count <= 0:
            break
        if count == 1:
            context += request.computed + 1
        else:
            pairs += _pairs(s.window, request.computed, count)
        request.computed += count
        request.num_computed += count
        tokens += count
        sequences += 1
        if request.computed < request.known:
            break
        engine.partial = NONE
        s.fresh[e, num_done] = r
        num_done += 1
    if tokens == 0:
        return False
    has_prompts = engine.partial != NONE or engine.first_waiting != NONE
    engine.num_without = engine.num_without + 1 if has_prompts and sequences == num_decodes else 0
    seconds = step_seconds(s.coefficients, float(tokens), float(sequences), pairs, context)
    engine.clock += seconds
    engine.busy += seconds
    engine.num_steps += 1
    engine.num_tokens += tokens
    if num_decodes:
        bin_number = int(np.log(max(seconds, LEAST_GAP_S) / LEAST_GAP_S) / np.log(GAP_RATIO))
        s.gaps[min(bin_number, GAP_BINS - 1)] += num_decodes
        engine.decode_tokens += num_decodes
        engine.num_decode_steps += 1
        engine.context += num_decodes
        saved_s = engine.saved_s + engine.step_s - seconds
        engine.saved_s = max(min(saved_s, engine.most_saved_s), -engine.most_saved_s)
        while engine.num_decodes and s.heap[e, 0, 0] <= engine.num_decode_steps:
            r = _leave_decodes(s, e, 0)
            _end(s, e, r)
    num_kept = 0
    for index in range(num_done):
        r = s.fresh[e, index]
        request = s.requests[r]
        publish(s, e, r)
        request.produced += 1
        is_first = request.produced == 1
        if is_first:
            request.first = engine.clock
            _log(s, r, 0)
        if request.produced == request.num_output:
            _end(s, e, r)
        elif stops and is_first:
            s.fresh[e, num_kept] = r
            num_kept += 1
        else:
            _join_decodes(s, e, r)
    engine.num_fresh = num_kept
    if engine.partial != NONE:
        publish(s, e, engine.partial)
    return True


@njit_borrowing
def _log(s, r, kind):  # type: ignore[no-untyped-def]
    number = s.counts[0]
    s.log[number, 0], s.log[number, 1] = r, kind
    s.counts[0] = number + 1


@njit_borrowing
def _end(s, e, r):  # type: ignore[no-untyped-def]
    request = s.requests[r]
    request.last = s.engines[e].clock
    release(s, e, r)
    s.engines[e].num_running -= 1
    _log(s, r, 1)


@njit_borrowing
def _has_work(s, e):  # type: ignore[no-untyped-def]
    engine = s.engines[e]
    return engine.num_fresh or engine.num_decodes or engine.partial != NONE or engine.first_waiting != NONE


@njit_borrowing
def _start_of(s, e):  # type: ignore[no-untyped-def]
    """The time at which an engine can step next; infinite if it has no work."""
    engine = s.engines[e]
    if _has_work(s, e):
        return engine.clock
    if engine.first_coming != NONE:
        return max(engine.clock, s.requests[engine.first_coming].ready)
    return np.inf


@njit_borrowing
def advance(s, until, stops):  # type: ignore[no-untyped-def]
    """Run every step that starts before a time. Returns the engine whose fresh requests wait for a decision, -1 at the
    time, -2 if the log must be read, -3 if an engine has work and can do nothing."""
    room = s.sizes[3]
    while True:
        earliest, e = np.inf, NONE
        for each in range(len(s.engines)):
            start = _start_of(s, each)
            if start < earliest:
                earliest, e = start, each
        if e == NONE or earliest >= until:
            return -1
        if s.engines[e].num_fresh:
            return e
        if s.counts[0] + s.sizes[2] >= len(s.log) or s.counts[1] + room >= len(s.changes):
            return -2
        s.engines[e].clock = earliest
        if not _step(s, e, stops):
            coming = s.engines[e].first_coming
            if coming == NONE or s.requests[coming].ready <= earliest:
                return -3
            s.engines[e].clock = s.requests[coming].ready


@njit_borrowing
def arrive(s, r, e, now):  # type: ignore[no-untyped-def]
    """A request comes to an engine."""
    engine, request = s.engines[e], s.requests[r]
    if not _has_work(s, e):
        engine.clock = max(engine.clock, now)
    request.engine = e
    request.known = request.num_prompt
    _queue(s, e, r)


@njit_borrowing
def go_on(s, e, targets, link, is_layerwise):  # type: ignore[no-untyped-def]
    """The fresh requests of an engine go on here or on other engines, in their order.

    link  latency in seconds, bytes a second, bytes of a token, bytes of a sequence beside its tokens, layers
    """
    engine = s.engines[e]
    now = engine.clock
    for index in range(engine.num_fresh):
        r = s.fresh[e, index]
        target = targets[index]
        request = s.requests[r]
        if target == e:
            _join_decodes(s, e, r)
            continue
        release(s, e, r)
        engine.num_running -= 1
        other = s.engines[target]
        moved = request.num_prompt - found_blocks(s, target, r, request.num_prompt - 1) * s.sizes[1]
        request.num_moved += moved
        sent = moved * link[2] + link[3]
        begin = request.begun if is_layerwise else now
        begin = max(begin, max(engine.link_free, other.link_free))
        least = sent / link[4] if is_layerwise else 0.0  # the last layer's part
        ended = max(begin + sent / link[1], now + least / link[1])
        engine.link_free = other.link_free = begin + sent / link[1]
        request.ready = ended + link[0]
        request.engine = target
        request.known = request.num_prompt
        before, at = NONE, other.first_coming
        while at != NONE and s.requests[at].ready <= request.ready:
            before, at = at, s.requests[at].next
        request.next = at
        if before == NONE:
            other.first_coming = r
        else:
            s.requests[before].next = r
    engine.num_fresh = 0
