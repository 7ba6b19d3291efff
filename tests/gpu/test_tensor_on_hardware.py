"""Tensors on the real device."""

from __future__ import annotations

import pytest

from tests.gpu.reuse import on_hardware
from tests.runtime.backends import test_cuda_tensor as tensor


@pytest.fixture(autouse=True)
def _device(hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "DEVICE", hardware)


test_casts_between_all_dtypes = on_hardware(tensor.test_casts_between_all_dtypes)
test_two_operands = on_hardware(tensor.test_two_operands)
test_floors_and_remainders = on_hardware(tensor.test_floors_and_remainders)
test_functions = on_hardware(tensor.test_functions)
test_powers_and_signs = on_hardware(tensor.test_powers_and_signs)
test_strides_broadcasting_and_scalars = on_hardware(tensor.test_strides_broadcasting_and_scalars)
test_writing = on_hardware(tensor.test_writing)
test_reductions = on_hardware(tensor.test_reductions)
test_matmul = on_hardware(tensor.test_matmul)
