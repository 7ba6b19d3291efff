"""Weights in blocks of small numbers, as products on the cpu read them: the file's numbers and scales, unchanged.

A format is data. Its integers lie in planes of bits, each of them as ggml cuts bytes: every `run` bytes hold, low bits
first, 8 / bits runs of elements. An element is `scale * (integer - zero) - minimum`, or `scale * table[integer]`; a
group of elements has one scale (and minimum). e4m3 has no integers: its elements are `scale * number`.

Panels hold words of 32 bits. The words of one of our blocks, which is one or two of ggml's, follow each other: scales
first, then the planes (`Block.places`). They come vector by vector, so that each register of columns is one stream:
`[panel, block, vector, word, lane]`. `block_panels` arranges them, `block_tile` and `e4m3_tile` multiply what
`block_numbers` reads, `block_rows` reads rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

X_GROUP = 32  # elements of x that share a scale

ScaleKind = Literal["half", "bfloat", "float", "six_bits", "byte", "e8m0", "planes"]


@dataclass(frozen=True)
class Plane:
    """Some bits of each integer; the planes' bits follow each other from the lowest on.

    Attributes:
        field: of the block.
        bits: 1, 2, 4 or 8 of each element.
        run: neighbouring bytes that hold neighbouring elements.
    """

    field: str
    bits: int
    run: int

    @property
    def period(self) -> int:
        """Elements that a run of bytes holds."""
        return self.run * 8 // self.bits

    def place(self, element: int) -> tuple[int, int]:
        """The byte in the plane, and the lowest of the element's bits in it."""
        within = element % self.period
        return element // self.period * self.run + within % self.run, within // self.run * self.bits


@dataclass(frozen=True)
class ScalePlanes:
    """Groups' scales as integers in planes of bits: ``d`` times ``step * integer + start``.

    Minima, where there are any, are ``dmin`` times the integers after those of the scales.
    """

    planes: tuple[Plane, ...]
    step: int = 1
    start: int = 0


@dataclass(frozen=True)
class Block:
    """One format.

    Attributes:
        name: ggml's, or ours.
        elements: of a row in a block of panels.
        group: elements that share a scale, 16 or 32.
        planes: where the integers' bits lie.
        zero: the integer that stands for 0 (of a table: the offset of its stored values).
        scale: how groups' scales are kept: "half", "bfloat" and "float", `d` for each; "six_bits", `d` times six bits,
            and `dmin` times six bits the minima; "byte", `d` times int8; "e8m0", a power of two, halved; "planes", as
            `scale_planes` say.
        minimum: the field of the minima, or None. `m` is a float16 that is added; `z` a byte, the
            integer that stands for 0 in the group.
        table: the integers' values, as unsigned bytes, plus `zero`; None without a table.
        is_e4m3: whether the bytes are such numbers and no integers.
        fields: ggml's block, of which `pairs` make one here.
        pairs: 2 where two of ggml's blocks are joined, else 1.
        scale_planes: of scales that are kept so.
    """

    name: str
    elements: int
    group: int
    planes: tuple[Plane, ...]
    zero: int
    scale: ScaleKind
    fields: np.dtype[Any]
    pairs: int
    minimum: str | None = None
    table: tuple[int, ...] | None = None
    is_e4m3: bool = False
    scale_planes: ScalePlanes = ScalePlanes(())

    @cached_property
    def places(self) -> dict[str, int]:
        """The first byte of each field in a column of a block."""
        return self._layout[0]

    @cached_property
    def words(self) -> int:
        """Words of a column of a block."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[dict[str, int], int]:
        places: dict[str, int] = {}
        at = 0
        for name in _ORDER:
            if name in (self.fields.names or ()):
                size = self.fields[name].itemsize * self.pairs
                align = min(4, size)
                places[name] = at = -(-at // align) * align
                at += size
        return places, -(-at // 4)

    @cached_property
    def copies(self) -> tuple[tuple[str, int, int, int], ...]:
        """Field, first byte in the file, first byte here and size of each part of a block."""
        found = []
        for name, place in self.places.items():
            assert self.fields.fields is not None
            kind, offset = self.fields.fields[name][:2]
            for pair in range(self.pairs):
                source = pair * self.fields.itemsize + offset
                found.append((name, source, place + pair * kind.itemsize, kind.itemsize))
        return tuple(found)

    @property
    def source_bytes(self) -> int:
        """Bytes of a block in the file."""
        return self.fields.itemsize * self.pairs

    @property
    def num_groups(self) -> int:
        """Scales in a block."""
        return self.elements // self.group

    @property
    def unit(self) -> int:
        """Elements after which the lowest bits' places repeat, moved on; at least a group of x."""
        return max(X_GROUP, self.planes[0].period)

    @property
    def is_bytes(self) -> bool:
        """Whether integers are int8 in panels, and `zero` above them in registers."""
        return self.planes[0].bits == 8

    @property
    def has_power_scales(self) -> bool:
        """Whether the cpu rounds x beside it with scales that are powers of two."""
        return self.elements == 256

    @property
    def largest(self) -> int:
        """The largest unsigned byte that is multiplied."""
        return max(self.table) if self.table else (1 << sum(plane.bits for plane in self.planes)) - 1

    def words_of(self, depth: int) -> int:
        """Words of a row of so many elements, the last block padded."""
        return -(-depth // self.elements) * self.words


_ORDER = ("d", "dmin", "m", "z", "exponent", "upper_scales", "scales", "signs", "high", "q")
_D, _M, _DMIN, _NIBBLES = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2"), ("q", "u1", 16)
_K_SCALES = ("scales", "u1", 12)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1's


def _of_32(name: str, planes: tuple[Plane, ...], zero: int, *fields: Any, **more: Any) -> Block:
    return Block(name, 64, 32, planes, zero, more.pop("scale", "half"), np.dtype(list(fields)), 2, **more)


def _of_256(name: str, group: int, planes: tuple[Plane, ...], zero: int, *fields: Any, **more: Any) -> Block:
    return Block(name, 256, group, planes, zero, more.pop("scale"), np.dtype(list(fields)), 1, **more)


def _of_codebook(name: str, group: int, numbers: tuple[int, ...], others: tuple[int, ...] = ()) -> Block:
    """``numbers`` in planes of the least bits for them, and a sign plane, or a sign as the fourth bit; a set sign gives
    ``others``, by default the negative ones. Scales are ``d`` times odd integers of 4 bits."""
    others = others or tuple(-number for number in numbers)
    largest, bits = max(*numbers, *others), (len(numbers) - 1).bit_length()
    halves = [(*each, *[0] * ((1 << bits) - len(each))) for each in (numbers, others)]
    table = _above((*halves[0], *halves[1]), largest)
    planes: tuple[Plane, ...] = (Plane("q", 4, 4),)
    if bits == 2:
        planes = Plane("q", 2, 4), Plane("signs", 1, 4)
    fields = [("d", "<f4"), ("scales", "u1", 128 // group), *((each.field, "u1", 32 * each.bits) for each in planes)]
    scales = ScalePlanes((Plane("scales", 4, 1),), step=2, start=1)
    return _of_256(name, group, planes, largest, *fields, scale="planes", scale_planes=scales, table=(table * 2)[:16])


def _groups(number: str, scale: ScaleKind, has_zeros: bool) -> Block:
    """Integers of a checkpoint in groups of 32 or more, halves in ggml's order."""
    is_int4, kind = number == "int4", "<f4" if scale == "float" else "<u2"
    fields: list[Any] = [("d", kind), ("z", "u1")] if has_zeros else [("d", kind)]
    fields.append(("q", "u1", 16 if is_int4 else 32))
    plane, zero = (Plane("q", 4, 16), 0 if has_zeros else 8) if is_int4 else (Plane("q", 8, 32), 128)
    name = f"{number}_{scale}" + "_zeros" * has_zeros
    minimum = "z" if has_zeros else None
    return Block(name, 64, 32, (plane,), zero, scale, np.dtype(fields), 2, minimum)


def _above(values: tuple[int, ...], zero: int) -> tuple[int, ...]:
    return tuple(value + zero for value in values)


_LOW, _FIFTH = Plane("q", 4, 16), Plane("high", 1, 4)
BLOCKS: dict[str, Block] = {
    block.name: block
    for block in (
        _of_32("Q8_0", (Plane("q", 8, 32),), 128, _D, ("q", "i1", 32)),
        _of_32("Q4_0", (_LOW,), 8, _D, _NIBBLES),
        _of_32("Q4_1", (_LOW,), 0, _D, _M, _NIBBLES, minimum="m"),
        _of_32("Q5_0", (_LOW, _FIFTH), 16, _D, ("high", "u1", 4), _NIBBLES),
        _of_32("Q5_1", (_LOW, _FIFTH), 0, _D, _M, ("high", "u1", 4), _NIBBLES, minimum="m"),
        _of_32("IQ4_NL", (_LOW,), 128, _D, _NIBBLES, table=_above(_IQ4_VALUES, 128)),
        _of_32("MXFP4", (_LOW,), 12, ("exponent", "u1"), _NIBBLES, scale="e8m0", table=_above(_FP4_VALUES, 12)),
        _of_256(
            "Q4_K", 32, (Plane("q", 4, 32),), 0, _D, _DMIN, _K_SCALES, ("q", "u1", 128), scale="six_bits",
            minimum="dmin",
        ),
        _of_256(
            "Q5_K", 32, (Plane("q", 4, 32), Plane("high", 1, 32)), 0, _D, _DMIN, _K_SCALES, ("high", "u1", 32),
            ("q", "u1", 128), scale="six_bits", minimum="dmin",
        ),
        _of_256(
            "Q6_K", 16, (Plane("q", 4, 64), Plane("high", 2, 32)), 32, ("q", "u1", 128), ("high", "u1", 64),
            ("scales", "i1", 16), _D, scale="byte",
        ),
        _of_256(
            "Q2_K", 16, (Plane("q", 2, 32),), 0, ("scales", "u1", 16), ("q", "u1", 64), _D, _DMIN, scale="planes",
            scale_planes=ScalePlanes((Plane("scales", 4, 16),)), minimum="dmin",
        ),
        _of_256(
            "Q3_K", 16, (Plane("q", 2, 32), Plane("high", 1, 32)), 4, ("high", "u1", 32), ("q", "u1", 64),
            ("scales", "u1", 8), ("upper_scales", "u1", 4), _D, scale="planes",
            scale_planes=ScalePlanes((Plane("scales", 4, 8), Plane("upper_scales", 2, 4)), start=-32),
        ),
        _of_256(
            "IQ4_XS", 32, (_LOW,), 128, _D, ("upper_scales", "u1", 2), ("scales", "u1", 4), ("q", "u1", 128),
            scale="planes", scale_planes=ScalePlanes((Plane("scales", 4, 1), Plane("upper_scales", 2, 1)), start=-32),
            table=_above(_IQ4_VALUES, 128),
        ),
        _of_codebook("IQ1", 16, (-7, 1, 9), (-9, -1, 7)),
        _of_codebook("IQ2", 16, (8, 25, 43)),
        _of_codebook("IQ3_XXS", 32, (4, 12, 20, 28, 36, 44, 52, 62)),
        _of_codebook("IQ3_S", 32, (1, 3, 5, 7, 9, 11, 13, 15)),
        *(
            _groups(number, scale, has_zeros)
            for number in ("int4", "int8") for scale in ("half", "bfloat", "float") for has_zeros in (False, True)
            if scale != "half" or has_zeros
        ),
        Block(
            "nvfp4", 64, 16, (Plane("q", 4, 8),), 12, "float", np.dtype([("d", "<f4", 4), ("q", "u1", 32)]), 1,
            table=_above(_FP4_VALUES, 12),
        ),
        Block(
            "fp8", 128, 128, (Plane("q", 8, 128),), 0, "float", np.dtype([("d", "<f4"), ("q", "u1", 128)]), 1,
            is_e4m3=True,
        ),
    )
}  # fmt: skip
"""By name. Integers of 8 bits are signed in rows of blocks and in panels; 5-bit integers' highest bits lie in panels as
in `_FIFTH`, in files one after another. IQ1 to IQ3_S have numbers instead of a codebook's lines
(`models.gguf.codebooks`). int4 and int8 with float16 scales and no zeros are Q4_0 and Q8_0. NVFP4's scales are already
divided by twice the matrix's divisor. fp8's codes are no NaN: a group that had one has such a scale."""
