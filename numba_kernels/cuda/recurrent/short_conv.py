"""The gated short convolution of LFM2: y = C conv(B x), of rows [B | C | x].

Nothing but the last few products B x outlives a token, so all tokens are computed in parallel: a thread has `width`
neighbouring channels of `TOKENS` tokens, and keeps the products that their filters share in registers. A product is
rounded to the activations' type, as the page keeps it. The first tokens' threads also write what the next chunk needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, int32, types, uint32, uint64

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer, floats_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import fma
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.recurrent.chunk import covered, find_chunk
from numba_kernels.cuda.specialisation import Launch, Specialisation, access_width

TOKENS = 16  # of a block
THREADS = 64


@functools.cache
def _short_conv(dtype: str, width: int, taps: int) -> Specialisation:
    """Arguments: see `plan`."""
    load, store, item_bytes = elements_loader(dtype, width), elements_storer(dtype, width), uint64(ITEM_BYTES[dtype])
    load_f32, kept_taps, floats = memory.load_f32, taps - 1, 4 if width * taps % 4 == 0 and width > 1 else 1
    load_floats = floats_loader(floats)
    if dtype == "f32":
        rounded = device_function(lambda value: value)
    else:
        narrow = {"f16": convert.f16_from_f32, "bf16": convert.bf16_from_f32}[dtype]
        widen = {"f16": convert.f32_from_f16, "bf16": convert.f32_from_bf16}[dtype]
        rounded = device_function(lambda value: widen(narrow(value)))

    @device_function
    def load_product(x, given, start, before, length, channels, token, product):
        """B x of a token, 0 before the sequence's start; x and given are addresses of the thread's channels."""
        if token >= before:
            row = x + uint64(uint32(start + token - before)) * uint64(channels) * uint64(3) * item_bytes
            factors = load(row)
            others = load(row + uint64(channels) * uint64(2) * item_bytes)
            for i in range(width):
                product[i] = rounded(factors[i] * others[i])
        elif before > int32(0):
            kept = load(given + uint64(uint32(int32(kept_taps) + token - length)) * uint64(channels) * item_bytes)
            for i in range(width):
                product[i] = kept[i]
        else:
            for i in range(width):
                product[i] = float32(0)

    @cuda.jit
    def short_conv(
        x, conv, bias, out, query_start, seq_lens, table, lengths, inputs, table_width, channels, pending
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        thread = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        channel = uint32(thread * uint32(width))
        if channel >= channels:
            return
        start, count, before, read, written, length = find_chunk(
            query_start, seq_lens, table, table_width, lengths, uint32(cuda.blockIdx.z)
        )
        first = int32(uint32(cuda.blockIdx.y) * uint32(TOKENS))
        stop = min(int32(first + int32(TOKENS)), count)
        channel_bytes = uint64(channel) * item_bytes
        row_bytes = uint64(channels) * item_bytes
        products = cuda.local.array((taps, width), float32)
        filters = cuda.local.array((taps, width), float32)
        sums = cuda.local.array(width, float32)
        biases = cuda.local.array(width, float32)
        out += channel_bytes + uint64(uint32(start + first)) * row_bytes
        if before < int32(0):
            for i in range(width):
                sums[i] = float32(0)
            while first < stop:
                store(out, sums)
                out += row_bytes
                first = int32(first + int32(1))
            return
        if first >= count:  # another sequence is longer
            return
        x += channel_bytes
        page_bytes = uint64(uint32(uint32(kept_taps) + pending)) * row_bytes
        given = inputs + uint64(uint32(read)) * page_bytes + channel_bytes
        for i in range(width):
            biases[i] = float32(0)
            if bias != uint64(0):
                biases[i] = load_f32(bias + (uint64(channel) + uint64(i)) * uint64(4))
        own_filters = conv + uint64(channel) * uint64(4 * taps)
        for piece in range(width * taps // floats):
            loaded = load_floats(own_filters + uint64(4 * floats * piece))
            for j in range(floats):
                filters[(piece * floats + j) % taps, (piece * floats + j) // taps] = loaded[j]
        token = int32(before + first)
        for tap in range(kept_taps):
            at = int32(token - int32(kept_taps) + int32(tap))
            load_product(x, given, start, before, length, channels, at, products[tap])
        while first < stop:
            load_product(x, given, start, before, length, channels, token, products[kept_taps])
            gate = load(x + (uint64(uint32(start + first)) * uint64(3) + uint64(1)) * row_bytes)
            for i in range(width):
                sums[i] = biases[i]
                for tap in range(taps):
                    sums[i] = fma(products[tap, i], filters[tap, i], sums[i])
                sums[i] = sums[i] * gate[i]
                for tap in range(kept_taps):
                    products[tap, i] = products[tap + 1, i]
            store(out, sums)
            out += row_bytes
            first = int32(first + int32(1))
            token = int32(token + int32(1))
        if uint32(cuda.blockIdx.y) == uint32(0):
            now = covered(count, before, pending)
            target = inputs + uint64(uint32(written)) * page_bytes + channel_bytes
            at = int32(now - int32(kept_taps))
            end = int32(before + count)
            while at < end:
                load_product(x, given, start, before, length, channels, at, sums)
                store(target, sums)
                target += row_bytes
                at = int32(at + int32(1))
            if channel == uint32(0):
                memory.store_b32(lengths + uint64(uint32(written)) * uint64(4), uint32(now))

    name = f"short_conv_{dtype}_t{taps}_x{width}"
    constants = {"dtype": dtype, "taps": taps, "width": width}
    argument_types = (types.uint64,) * 9 + (types.uint32,) * 3
    return Specialisation(name, short_conv, argument_types, THREADS, constants=constants)


def plan(max_query_len: int, num_seqs: int, channels: int, taps: int, dtype: str, *, alignment: int = 16) -> Launch:
    """Chunks of up to ``max_query_len`` tokens, so many of them, padding included; ``alignment`` in bytes divides x,
    the result and the pages.

    Arguments: addresses of x ``[T, 3 channels]``, the weights ``[channels, taps]``, the bias (0 without), the result,
    query_start, seq_lens, the block table, the pages' lengths and inputs; the table's width, channels, pending rows.
    """
    width = access_width(dtype, channels, alignment)
    grid = -(-channels // (THREADS * width)), -(-max_query_len // TOKENS), num_seqs
    return Launch(_short_conv(dtype, width, taps), grid, (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """LFM2's filters of 3 taps."""
    for dtype in DTYPES:
        yield _short_conv(dtype, VECTOR_WIDTH[dtype], 3)
