"""Each head's map of its own numbers, for all heads in one launch: queries times the keys' maps before latent attention
(`absorb`), results times the values' maps after it (`values`).

    absorb    q[t, h] = [rotated part | W_h part] * q_scale;  blocks of their own write the tokens' latent rows
    values    out[t, h] = W_h x[t, h]

A block has a head, some columns of its map, all K, and 16 or 64 tokens: its part of the weight is on its way before the
previous launch has ended, and x is read once for its columns. A row's sum runs over K in steps of 16, whatever the
number of tokens, so bits depend on the token alone. Other types and sizes (`plain`) have a warp for each column, whose
lanes go along K.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_16,
    copy_async_commit,
    copy_async_wait,
    load_f32,
    shared_address,
    shared_load_4xb32,
    shared_store_b32,
    store_4xb32,
)
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, product_adder
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.latent.prepare import query_rotator, row_writer
from numba_kernels.cuda.specialisation import Specialisation

WARPS = 4
THREADS = 32 * WARPS
ROWS = (16, 64)  # of a block
_PLAIN_ROWS, _PLAIN_COLUMNS = 8, 32
_MOST_WEIGHT_BYTES = 36 << 10  # of a block: several are on a multiprocessor
_wait_for_copies = copy_async_wait(0)


@dataclass(frozen=True, slots=True)
class HeadMap:
    """The sizes of one map a head.

    Attributes:
        depth, width: K, and columns.
        x_head: numbers from one head's x to the next one's, in a token's.
        out_head, out_first: the same of results, and before a head's first column.
        is_aligned: whether all arrays and rows begin at 16-byte bounds, if the sizes let them.
    """

    dtype: str
    depth: int
    width: int
    x_head: int
    out_head: int
    out_first: int
    is_aligned: bool

    @property
    def is_vector(self) -> bool:
        """Whether all rows are whole 16-byte pieces for the tensor cores."""
        sizes = self.depth, self.width, self.x_head, self.out_head, self.out_first
        return self.dtype != "f32" and self.is_aligned and not any(size % 8 for size in sizes)

    @property
    def steps(self) -> int:
        """Steps of 32 numbers of K."""
        return -(-self.depth // 32)

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next in shared memory: neighbours' pieces lie in different banks."""
        return (4 * self.steps + 1) * 16

    @property
    def columns(self) -> int:
        """The columns of a block."""
        if not self.is_vector:
            return _PLAIN_COLUMNS
        return next((each for each in (128, 64) if each * self.pitch <= _MOST_WEIGHT_BYTES), 32)

    @property
    def column_tiles(self) -> int:
        return -(-self.width // self.columns)

    @property
    def out_pitch(self) -> int:
        """Bytes of a row of results in shared memory, whose 16-byte pieces are swizzled."""
        return self.columns * 2

    def shared_bytes(self, rows: int) -> int:
        """Dynamic shared memory of a block: its part of the weight, and x or its results."""
        return self.columns * self.pitch + rows * max(self.pitch, self.out_pitch) if self.is_vector else 0


@dataclass(frozen=True, slots=True)
class Absorption:
    """The sizes of latent rows, `width` numbers with a rotated part of `rotary`; `pages` as in `row_writer`."""

    width: int
    rotary: int
    interleaved: bool
    pages: str = ""


def rows_of(head_map: HeadMap, num_tokens: int) -> int:
    """Tokens of a block."""
    if not head_map.is_vector:
        return _PLAIN_ROWS
    return ROWS[num_tokens > ROWS[0]]


Spot = namedtuple("Spot", "head first_column first_token num_heads num_tokens")
"""A block's head, and its first column and token, of so many heads and tokens."""


@functools.cache
def _tile_product(head_map: HeadMap, rows: int, scale_of: Any) -> tuple[Any, Any, Any]:
    """Device functions of a block on tensor cores: ``bring(weight, spot, thread) -> shared``, the weight on its way;
    ``ask(shared, x, x_pitch, spot, thread)``, x on its way; and ``multiply(shared, x, weight, out, x_pitch, scales,
    spot, thread)``, whose results, times ``scale_of(scales, token, num_tokens)``, are stored."""
    dtype, depth, width, pitch = head_map.dtype, head_map.depth, head_map.width, head_map.pitch
    columns, steps, pieces, stored = head_map.columns, head_map.steps, 4 * head_map.steps, head_map.depth // 8
    row_tiles, own_tiles, own_columns = rows // 16, columns // (8 * WARPS), columns // WARPS
    x_head, out_head, out_first = head_map.x_head, head_map.out_head, head_map.out_first
    out_pitch, x_at = head_map.out_pitch, columns * pitch
    flip_shift, flips = (1, 3) if columns == 32 else (0, 7)  # two rows, or a part of one, are 128 bytes
    add_product, pack = product_adder(dtype), pack_bf16 if dtype == "bf16" else pack_f16

    @device_function
    def bring(weight, spot, thread):
        shared = shared_address(cuda.shared.array(0, float32))
        index = thread
        while index < uint32(columns * pieces):
            row = uint32(index // uint32(pieces))
            piece = uint32(index - row * uint32(pieces))
            column = uint32(spot.first_column + row)
            size = uint32(0)
            source = weight
            if column < uint32(width) and piece < uint32(stored):
                size = uint32(16)
                own = uint64(spot.head) * uint64(width) + uint64(column)
                source = weight + own * uint64(2 * depth) + uint64(uint32(piece * uint32(16)))
            copy_async_16(uint32(shared + row * uint32(pitch) + piece * uint32(16)), source, size)
            index = uint32(index + uint32(THREADS))
        return shared

    @device_function
    def ask(shared, x, x_pitch, spot, thread):
        index = thread
        while index < uint32(rows * pieces):
            row = uint32(index // uint32(pieces))
            piece = uint32(index - row * uint32(pieces))
            token = uint32(spot.first_token + row)
            size = uint32(0)
            source = x
            if token < spot.num_tokens and piece < uint32(stored):
                size = uint32(16)
                first = uint64(token) * uint64(x_pitch) + uint64(uint32(spot.head * uint32(x_head)))
                source = x + (first + uint64(uint32(piece * uint32(8)))) * uint64(2)
            copy_async_16(uint32(shared + uint32(x_at) + row * uint32(pitch) + piece * uint32(16)), source, size)
            index = uint32(index + uint32(THREADS))
        copy_async_commit()

    @device_function
    def multiply(shared, x, weight, out, x_pitch, scales, spot, thread):
        lane, warp = lane_index(), uint32(thread >> uint32(5))
        factors = cuda.local.array((row_tiles, 2), float32)
        for i in range(row_tiles):
            for j in range(2):
                token = uint32(spot.first_token + (lane >> uint32(2)) + uint32(16 * i + 8 * j))
                factors[i, j] = scale_of(scales, token, spot.num_tokens)
        _wait_for_copies()
        sync_block()
        sums = cuda.local.array((row_tiles, own_tiles, 4), float32)
        for i in range(row_tiles):
            for k in range(own_tiles):
                for j in range(4):
                    sums[i, k, j] = float32(0)
        x_place = uint32(shared + uint32(x_at) + (lane & uint32(15)) * uint32(pitch) + (lane >> uint32(4)) * uint32(16))
        own_row = uint32(warp * uint32(own_columns) + (lane & uint32(7)))
        weight_place = uint32(shared + own_row * uint32(pitch) + (lane >> uint32(3)) * uint32(16))
        step = uint32(0)
        while step < uint32(steps):
            for i in range(row_tiles):
                a = load_matrix_x4(uint32(x_place + uint32(16 * i * pitch)))
                b = load_matrix_x4(uint32(x_place + uint32(16 * i * pitch + 32)))
                for k in range(own_tiles):
                    w = load_matrix_x4(uint32(weight_place + uint32(8 * k * pitch)))
                    add_product(sums[i, k], a, (w[0], w[1]))
                    add_product(sums[i, k], b, (w[2], w[3]))
            x_place = uint32(x_place + uint32(64))
            weight_place = uint32(weight_place + uint32(64))
            step = uint32(step + uint32(1))
        sync_block()  # results take x's place
        above, pair = uint32(lane >> uint32(2)), uint32((lane & uint32(3)) * uint32(2))
        results = uint32(shared + uint32(x_at))
        for i in range(row_tiles):
            for j in range(2):
                row = uint32(above + uint32(16 * i + 8 * j))
                place = uint32(results + row * uint32(out_pitch) + pair * uint32(2))
                flip = uint32((row >> uint32(flip_shift)) & uint32(flips))
                for k in range(own_tiles):
                    piece = uint32(warp * uint32(own_tiles) + uint32(k))
                    two = pack(sums[i, k, 2 * j] * factors[i, j], sums[i, k, 2 * j + 1] * factors[i, j])
                    shared_store_b32(uint32(place + (piece ^ flip) * uint32(16)), two)
        sync_block()
        index = thread
        while index < uint32(rows * columns // 8):
            row = uint32(index // uint32(columns // 8))
            piece = uint32(index - row * uint32(columns // 8))
            token = uint32(spot.first_token + row)
            column = uint32(spot.first_column + piece * uint32(8))
            if token < spot.num_tokens and column < uint32(width):
                flip = uint32((row >> uint32(flip_shift)) & uint32(flips))
                values = shared_load_4xb32(uint32(results + row * uint32(out_pitch) + (piece ^ flip) * uint32(16)))
                first = (uint64(token) * uint64(spot.num_heads) + uint64(spot.head)) * uint64(out_head) + uint64(
                    out_first
                )
                store_4xb32(out + (first + uint64(column)) * uint64(2), values)
            index = uint32(index + uint32(THREADS))

    return bring, ask, multiply


@functools.cache
def _plain_product(head_map: HeadMap, scale_of: Any) -> tuple[Any, Any, Any]:
    """The same of a block without tensor cores, which brings nothing: `_PLAIN_ROWS` and `_PLAIN_COLUMNS`."""
    dtype, depth, width, columns = head_map.dtype, head_map.depth, head_map.width, head_map.columns
    x_head, out_head, out_first = head_map.x_head, head_map.out_head, head_map.out_first
    load, store, item = element_loader(dtype), element_storer(dtype), uint64(ITEM_BYTES[dtype])
    rows = _PLAIN_ROWS

    @device_function
    def multiply(shared, x, weight, out, x_pitch, scales, spot, thread):
        lane, factors = lane_index(), cuda.local.array(rows, float32)
        for r in range(rows):
            factors[r] = scale_of(scales, uint32(spot.first_token + uint32(r)), spot.num_tokens)
        sums = cuda.local.array(rows, float32)
        column = uint32(spot.first_column + (thread >> uint32(5)))
        last = minimum_u32(uint32(spot.first_column + uint32(columns)), uint32(width))
        while column < last:
            for r in range(rows):
                sums[r] = float32(0)
            row = weight + (uint64(spot.head) * uint64(width) + uint64(column)) * uint64(depth) * item
            k = lane
            while k < uint32(depth):
                number = load(row + uint64(k) * item)
                for r in range(rows):
                    token = uint32(spot.first_token + uint32(r))
                    if token < spot.num_tokens:
                        first = uint64(token) * uint64(x_pitch) + uint64(uint32(spot.head * uint32(x_head) + k))
                        sums[r] += number * load(x + first * item)
                k = uint32(k + uint32(32))
            for r in range(rows):
                token = uint32(spot.first_token + uint32(r))
                total = warp_sum(sums[r])
                if lane == uint32(0) and token < spot.num_tokens:
                    first = uint64(token) * uint64(spot.num_heads) + uint64(spot.head)
                    first = first * uint64(out_head) + uint64(out_first)
                    store(out + (first + uint64(column)) * item, total * factors[r])
            column = uint32(column + uint32(WARPS))

    bring = device_function(lambda weight, spot, thread: uint32(0))
    return bring, device_function(lambda shared, x, x_pitch, spot, thread: None), multiply


def _products(head_map: HeadMap, rows: int, scale_of: Any) -> tuple[Any, Any, Any]:
    return _tile_product(head_map, rows, scale_of) if head_map.is_vector else _plain_product(head_map, scale_of)


@functools.cache
def _block_placer(head_map: HeadMap, rows: int) -> Any:
    """A device function ``(index, num_heads, num_tokens)``: a block's `Spot`."""
    columns, column_tiles = head_map.columns, head_map.column_tiles

    @device_function
    def place_of(index, num_heads, num_tokens):
        tile = uint32(index // uint32(column_tiles))
        first_column = uint32((index - tile * uint32(column_tiles)) * uint32(columns))
        token_tile = uint32(tile // num_heads)
        head = uint32(tile - token_tile * num_heads)
        return Spot(head, first_column, uint32(token_tile * uint32(rows)), num_heads, num_tokens)

    return place_of


@device_function
def _scale_of(scales, token, num_tokens):
    q_scales, positions = scales
    factor = float32(1)
    if q_scales != uint64(0) and token < num_tokens:
        factor = load_f32(q_scales + uint64(uint32(positions[token])) * uint64(4))
    return factor


_unscaled = device_function(lambda scales, token, num_tokens: float32(1))


@functools.cache
def absorb(head_map: HeadMap, absorption: Absorption, rows: int) -> Specialisation:
    """Grid: a block for four tokens' latent rows each, then column tiles x heads x tokens by `rows`. Arguments: see
    `planning.plan_absorb`."""
    is_vector = head_map.is_vector
    dtype, width, rotary, interleaved = head_map.dtype, absorption.width, absorption.rotary, absorption.interleaved
    rotate = query_rotator(dtype, rotary, interleaved, is_vector)
    write_row = row_writer(dtype, width, rotary, interleaved, is_vector, absorption.pages)
    x_head, depth = head_map.x_head, head_map.depth
    half, item = rotary // 2, uint64(ITEM_BYTES[dtype])
    bring, ask, multiply = _products(head_map, rows, _scale_of)
    place_of = _block_placer(head_map, rows)

    @cuda.jit
    def kernel(
        x, weight, out, latent, positions, cos, sin, q_scales, norm, slot_mapping, pages, x_pitch, latent_pitch,
        num_heads, num_tokens, eps,
    ):  # fmt: skip
        thread = uint32(cuda.threadIdx.x)
        block = uint32(cuda.blockIdx.x)
        num_row_blocks = uint32((num_tokens + uint32(WARPS - 1)) // uint32(WARPS))
        if block < num_row_blocks:
            wait_for_previous_grid()
            launch_dependents()
            token = uint32(block * uint32(WARPS) + (thread >> uint32(5)))
            if token < num_tokens:
                place = uint64(uint32(positions[token])) * uint64(4 * half)
                source = latent + uint64(token) * uint64(latent_pitch) * item
                write_row(source, cos + place, sin + place, norm, slot_mapping[token], pages, eps)
            return
        spot, scales = place_of(uint32(block - num_row_blocks), num_heads, num_tokens), (q_scales, positions)
        shared = bring(weight, spot, thread)
        wait_for_previous_grid()  # the weight is immutable
        launch_dependents()
        ask(shared, x, x_pitch, spot, thread)
        if spot.first_column == uint32(0):
            place = thread
            while place < uint32(rows * half):
                row = uint32(place // uint32(half))
                token = uint32(spot.first_token + row)
                if token < num_tokens:
                    at = uint64(uint32(positions[token])) * uint64(4 * half)
                    first = uint64(token) * uint64(x_pitch) + uint64(uint32(spot.head * uint32(x_head) + uint32(depth)))
                    target = (uint64(token) * uint64(num_heads) + uint64(spot.head)) * uint64(width)
                    factor = _scale_of(scales, token, num_tokens)
                    pair = uint32(place - row * uint32(half))
                    rotate(x + first * item, out + target * item, pair, cos + at, sin + at, factor)
                place = uint32(place + uint32(THREADS))
        multiply(shared, x, weight, out, x_pitch, scales, spot, thread)

    kind = f"{rows}" if is_vector else "plain"
    name = f"latent_absorb_{dtype}_k{depth}_w{width}_r{rotary}{'_interleaved' if interleaved else ''}_{kind}"
    name += f"_{absorption.pages}" if absorption.pages else ""
    argument_types = (
        *(types.uint64,) * 4, types.CPointer(types.int32), *(types.uint64,) * 4, types.CPointer(types.int64),
        types.uint64, *(types.uint32,) * 4, types.float32,
    )  # fmt: skip
    constants = {
        "dtype": dtype, "depth": depth, "width": width, "rotary": rotary, "interleaved": interleaved, "rows": rows,
        "pages": absorption.pages,
        "columns": head_map.columns, "shared_bytes": head_map.shared_bytes(rows),
    }  # fmt: skip
    return Specialisation(name, kernel, argument_types, THREADS, constants=constants)


@functools.cache
def values(head_map: HeadMap, rows: int) -> Specialisation:
    """Grid: column tiles x heads x tokens by `rows`. Arguments: see `planning.plan_values`."""
    dtype, depth, width = head_map.dtype, head_map.depth, head_map.width
    bring, ask, multiply = _products(head_map, rows, _unscaled)
    place_of = _block_placer(head_map, rows)

    @cuda.jit
    def kernel(x, weight, out, num_heads, num_tokens):
        thread, x_pitch = uint32(cuda.threadIdx.x), uint32(num_heads * uint32(depth))
        spot = place_of(uint32(cuda.blockIdx.x), num_heads, num_tokens)
        shared = bring(weight, spot, thread)
        wait_for_previous_grid()  # the weight is immutable
        launch_dependents()
        ask(shared, x, x_pitch, spot, thread)
        multiply(shared, x, weight, out, x_pitch, uint32(0), spot, thread)

    name = f"latent_values_{dtype}_k{depth}_v{width}_{rows if head_map.is_vector else 'plain'}"
    argument_types = (*(types.uint64,) * 3, types.uint32, types.uint32)
    constants = {
        "dtype": dtype, "depth": depth, "width": width, "rows": rows, "columns": head_map.columns,
        "shared_bytes": head_map.shared_bytes(rows),
    }  # fmt: skip
    return Specialisation(name, kernel, argument_types, THREADS, constants=constants)
