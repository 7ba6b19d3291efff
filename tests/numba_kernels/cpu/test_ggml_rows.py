"""Rows of tables in ggml's blocks beside the `gguf` package's dequantisation, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from numba_kernels.ggml_blocks import ROW_BLOCKS
from runtime import ops
from runtime.errors import InvalidArgumentError
from runtime.linear.stored_table import StoredTable
from runtime.tensor.tensor import Tensor
from tests.models.gguf.files import random_blocks


@pytest.mark.parametrize("blocks", ROW_BLOCKS)
def test_rows_are_those_of_the_package(blocks: str) -> None:
    elements, block_bytes = ROW_BLOCKS[blocks]
    ids = np.array([2, 0, 6, 2], np.int32)
    stored = random_blocks(np.random.default_rng(elements), Ggml[blocks], (7, 3 * elements))
    assert stored.shape == (7, 3 * block_bytes)
    expected = gguf.dequantize(stored, Ggml[blocks])[ids]
    table = StoredTable.of(stored, blocks, 3 * elements)
    np.testing.assert_array_equal(ops.embedding(Tensor.from_numpy(ids), table).array, expected)
    scaled = ops.embedding(Tensor.from_numpy(ids), table, scale=3.0).array
    np.testing.assert_array_equal(scaled, expected * np.float32(3.0))
    with pytest.raises(InvalidArgumentError, match="token_ids holds 7 to 7, must lie in 0 to 6"):
        ops.embedding(Tensor.from_numpy(np.array([7], np.int32)), table)
