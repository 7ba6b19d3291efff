"""Products with weights in ggml's blocks, against float64; numbers of the blocks by the `gguf` package.

`test_tiles` runs this file under each kind of tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Ggml

from models.gguf.formats import FORMATS as TYPES
from numba_kernels.blocks import BLOCKS
from runtime import ops
from runtime.errors import InvalidArgumentError
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS
from runtime.linear.options import LoadOptions
from runtime.linear.weight import BlockRows, JoinedWeight, KeptRows, packed_bytes
from tests.models.gguf.files import random_blocks
from tests.models.gguf.test_formats import dequantised
from tests.numba_kernels.cpu.cases import normal, tensor
from tests.oracles import int8

KEPT = {each.name: each for each in TYPES.values() if each.kept in GGML_FORMATS}
RARELY = {"Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_S", "TQ1_0", "TQ2_0"}
RARELY |= {"Q3_K", "IQ4_XS", "IQ3_XXS"}
"""Their kernels take seconds to compile; others have their planes."""
NAMES = [pytest.param(each, marks=[pytest.mark.exhaustive] * (each in RARELY)) for each in KEPT]
SHAPES = [(1, 50, 256), (2, 17, 512), (3, 48, 256), (4, 5, 1024), (5, 100, 768), (6, 16, 256), (7, 200, 256)]
SHAPES += [(13, 70, 768), (33, 49, 512), (130, 33, 512), (0, 10, 256)]
HALVES = [(1, 50, 352), (3, 48, 32), (9, 49, 96), (33, 49, 352)]
"""Half of the last block of panels is padding."""


def has_powers(name: str) -> bool:
    """Whether scales of x beside ggml's type are powers of two: those of 256 elements."""
    return GGML_QUANT_SIZES[Ggml[name]][0] == 256


def blocks(rng: np.random.Generator, name: str, width: int, depth: int) -> tuple[BlockRows, np.ndarray]:
    """A weight, and the floats that it stands for."""
    return kept(name, random_blocks(rng, Ggml[name], (width, depth), scale=0.05), depth)


def kept(name: str, raw: np.ndarray, depth: int) -> tuple[BlockRows, np.ndarray]:
    """The same of a file's rows of bytes."""
    rows = BlockRows(KEPT[name].kept_blocks(raw), GGML_FORMATS[KEPT[name].kept], depth)
    return rows, dequantised(raw, Ggml[name])


class AllBytes(np.random.Generator):
    """Draws this byte wherever any byte may be drawn, and other numbers at random."""

    def __init__(self, byte: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.byte = byte

    def integers(self, low: int, high: int, size: Any, dtype: Any) -> Any:  # type: ignore[override]
        if (low, high) == (0, 256):
            return np.full(size, self.byte, dtype)
        return super().integers(low, high, size, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.exhaustive_cases("Q5_K")
def test_products_rows_and_tables(name: str) -> None:
    """A row has the same bits alone; a row of a table is what the package makes of it."""
    for rows, width, depth in SHAPES + HALVES * (GGML_QUANT_SIZES[Ggml[name]][0] == 32):
        rng = np.random.default_rng([rows, width, depth])
        weight, floats = blocks(rng, name, width, depth)
        x, bias, residual = normal(rng, (rows, depth)), normal(rng, width), normal(rng, (rows, width))
        x[:, : depth // 2] *= np.float32(0)
        x[rows // 2 :] *= np.float32(1e4)
        x[: rows // 4] *= np.float32(1e-12)
        packed = ops.prepare_linear([weight], [tensor(bias)])
        assert (packed.shape, packed.format) == ((width, depth), weight.format)
        out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
        expected = int8.linear_of_blocks(x, floats, bias, residual, has_powers=has_powers(name))
        size = np.abs(expected).max(1, keepdims=True, initial=1.0)
        assert (np.abs(out - expected) <= 2e-6 * size).all(), (rows, width, depth)
        for row in {0, rows // 2, rows - 1} if rows else ():
            one = slice(row, row + 1)
            alone = ops.linear(tensor(x[one]), packed, residual=tensor(residual[one])).numpy()
            np.testing.assert_array_equal(alone, out[one])
        ids = np.arange(0, width, 7, dtype=np.int32)
        np.testing.assert_array_equal(ops.embedding(tensor(ids), packed).numpy(), floats[ids])


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_integers_do_not_overflow(name: str) -> None:
    """Every byte of a file's blocks but those of float16 scales is the same one; by the tiles of few and of many
    rows."""
    for byte in (0xFF, 0x80, 0x7F):
        weight, floats = kept(name, random_blocks(AllBytes(byte), Ggml[name], (16, 512), scale=0.05), 512)
        x = np.full((40, 512), 127 / 64, np.float32)  # 127 with any scale
        x[3:] *= -1
        packed = ops.prepare_linear([weight])
        expected = int8.linear_of_blocks(x, floats, has_powers=has_powers(name))
        terms = np.abs(x) @ np.abs(floats).T  # may cancel each other
        for rows in (6, 40):
            out = ops.linear(tensor(x[:rows]), packed).numpy()
            bound = 2e-6 * np.abs(expected).max() + 1e-7 * terms.max()
            assert (np.abs(out - expected[:rows]) <= bound).all(), (byte, rows)


def test_gated_products_are_those_of_two_launches() -> None:
    rng = np.random.default_rng(6)
    for name, rows, half in (("Q4_K", 9, 30), ("Q4_K", 37, 72), ("Q8_0", 130, 100), ("Q4_0", 20, 96)):
        weight, x = blocks(rng, name, 2 * half, 768)[0], tensor(normal(rng, (rows, 768)))
        packed = ops.prepare_linear([weight])
        expected = ops.glu(ops.linear(x, packed), "silu").numpy()
        np.testing.assert_array_equal(ops.linear_glu(x, packed, "silu").numpy(), expected)


def test_parts_of_different_formats_beside_floats() -> None:
    rng = np.random.default_rng(5)
    names, widths = ("Q4_K", "Q4_K", "Q6_K", "Q8_0"), (40, 9, 33, 64)
    parts = [blocks(rng, name, width, 512) for name, width in zip(names, widths, strict=True)]
    plain = normal(rng, (20, 512))
    packed = ops.prepare_linear([*(weight for weight, _ in parts), tensor(plain)])
    assert isinstance(packed, JoinedWeight)
    assert [part.shape[0] for part in packed.parts] == [49, 33, 64, 20]
    x = normal(rng, (5, 512))
    out = ops.linear(tensor(x), packed).numpy()
    expected = [
        int8.linear_of_blocks(x, floats, has_powers=has_powers(name))
        for name, (_, floats) in zip(names, parts, strict=True)
    ] + [x.astype(np.float64) @ plain.T]
    assert np.abs(out - np.concatenate(expected, 1)).max() <= 1e-5 * np.abs(np.concatenate(expected, 1)).max()
    formats = (49, GGML_FORMATS["Q4_K"]), (33, GGML_FORMATS["Q6_K"]), (64, GGML_FORMATS["Q8_0"])
    kept = [KeptRows(*each) for each in formats]
    size = packed_bytes(kept, 512, packed.device, has_bias=False)
    assert size == sum(part.size_bytes for part in packed.parts[:3])


@pytest.mark.parametrize("name", NAMES)
def test_exact_mode_cuts_k_into_segments(name: str) -> None:
    rng = np.random.default_rng(6)
    weight, floats = blocks(rng, name, 40, 2560)
    packed = ops.prepare_linear([weight], options=LoadOptions(exact=True), split="inputs")
    assert packed.num_segments == 8
    x = normal(rng, (9, 2560))
    out = ops.linear(tensor(x), packed).numpy()
    expected = int8.linear_of_blocks(x, floats, has_powers=has_powers(name))
    assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(ops.linear(tensor(x[4:5]), packed).numpy(), out[4:5])


@pytest.mark.parametrize(("rows", "value"), [(3, np.nan), (35, np.nan), (35, -np.inf), (3, 1e34), (35, 1e34)])
def test_activations_that_are_not_finite_stay_in_their_rows(rows: int, value: float) -> None:
    weight, floats = blocks(np.random.default_rng(7), "Q4_K", 20, 256)
    x = normal(np.random.default_rng(8), (rows, 256))
    x[1, 7] = value
    out = ops.linear(tensor(x), ops.prepare_linear([weight])).numpy()
    assert not np.isfinite(out[1]).any()
    np.testing.assert_allclose(out[::2], int8.linear_of_blocks(x[::2], floats, has_powers=True), rtol=1e-4, atol=1e-4)


def test_scales_of_x_that_are_powers_of_two() -> None:
    """At the edges between powers, and where magnitudes are too small to count; by tiles of few and of many rows."""
    above = np.nextafter(np.float32(127), np.float32(128))
    edges = np.array([127, above, 128, 64, 2.0**110, 2.0**-94, 2.0**-95, 2.0**-140, 0], np.float32)
    weight, floats = blocks(np.random.default_rng(9), "Q4_K", 20, 256)
    largest = np.resize(edges, (35, 1))
    x = (normal(np.random.default_rng(10), (35, 256)).clip(-1, 1) * largest).astype(np.float32)
    x[:, ::32] = largest
    packed = ops.prepare_linear([weight])
    out = ops.linear(tensor(x), packed).numpy()
    counts = largest >= np.float32(2.0**-94)
    expected = int8.linear_of_blocks(np.where(counts, x, np.float32(0)), floats, has_powers=True)
    assert (np.abs(out - expected) <= 2e-6 * np.abs(expected).max(1, keepdims=True)).all()
    assert (out[~counts[:, 0]] == 0).all()
    assert out[counts[:, 0]].any(1).all()
    for row in range(len(edges)):
        np.testing.assert_array_equal(ops.linear(tensor(x[row : row + 1]), packed).numpy(), out[row : row + 1])


def test_sizes_that_formats_tell() -> None:
    for format in (GGML_FORMATS | GROUP_FORMATS).values():
        block = BLOCKS[format.name]
        assert format.multiple == block.elements // block.pairs
        assert (format.split, format.size_bytes(1, block.elements)) == (block.elements, block.words * 4)


def test_what_cannot_keep_blocks() -> None:
    weight, _ = blocks(np.random.default_rng(9), "Q4_K", 4, 256)
    for options in (LoadOptions.parse(dtype="float32"), LoadOptions.parse(quantization="int8")):
        with pytest.raises(InvalidArgumentError, match=r"weight 0 is Q4_K \(4, 256\), which cpu cannot keep so"):
            ops.prepare_linear([weight], options=options)
    with pytest.raises(InvalidArgumentError, match=r"weight 1 is Q4_K \(4, 256\), which"):
        ops.prepare_linear([tensor(np.zeros((2, 512), np.float32)), weight])
