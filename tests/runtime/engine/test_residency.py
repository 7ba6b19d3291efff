"""Each kernel of a decode step leaves half of every multiprocessor, so the next one asks for its weights meanwhile."""

from __future__ import annotations

import pytest

from numba_kernels.cuda.specialisation import Launch
from runtime.device.kernel_cache import KernelCache
from runtime.emulator.driver.architectures import H200
from tests.runtime.engine.noted_launches import launches_of_a_decode_layer
from tools.gpu.serving.models import IN_SHORT, MODELS, quick_weights_of
from tools.kernel_costs.residency import Residency, residency

pytestmark = pytest.mark.emulator

exhaustive = pytest.mark.exhaustive


def residencies(model: str, num_seqs: int, *, has_adapters: bool) -> list[Residency]:
    """Those of a layer's launches, for contexts of up to 2,048 tokens; the next layer's follow."""
    config = (MODELS | IN_SHORT)[model] | {"num_hidden_layers": 4, "vocab_size": 512}
    weights = quick_weights_of(model)
    launches = launches_of_a_decode_layer(config, num_seqs=num_seqs, has_adapters=has_adapters, weights=weights)
    cache = KernelCache()
    assert all(isinstance(each, Launch) for each in launches), "a copy stands between two kernels"
    return [residency(each, H200, cache) for each in launches if isinstance(each, Launch)]


@pytest.mark.parametrize(
    ("model", "num_seqs", "has_adapters"),
    [
        ("qwen3-8b", 1, False), ("qwen3-8b int4", 1, False), ("gpt-oss-20b", 1, False),
        *(pytest.param(*each, marks=exhaustive) for each in (
            ("qwen3-8b", 2, False), ("qwen3-8b int4", 2, False), ("qwen3-8b fp8", 1, False), ("qwen3-8b fp8", 2, False),
            ("gpt-oss-20b", 2, False), ("qwen3-0.6b", 1, False), ("qwen3-0.6b", 2, False), ("qwen3-8b", 1, True),
            ("qwen3-8b int4", 1, True), ("qwen3-8b fp8", 1, True), ("qwen3-8b int4", 2, True),
        )),
    ],
)  # fmt: skip
def test_neighbours_fit_on_a_multiprocessor(model: str, num_seqs: int, has_adapters: bool) -> None:
    found = residencies(model, num_seqs, has_adapters=has_adapters)
    assert [each for each in found if not each.takes_half(H200)] == []
    for each, successor in zip(found, [*found[1:], found[0]], strict=True):
        assert each.leaves_room_for(successor, H200), f"{successor} beside {each}"
        assert each.waves == 1


@pytest.mark.parametrize(
    ("model", "num_seqs"),
    [
        ("qwen3-8b", 32), ("gpt-oss-20b", 32), ("qwen3-8b", 8), ("qwen3-8b int4", 32),
        *(pytest.param(*each, marks=exhaustive) for each in (
            ("gpt-oss-20b", 8), ("qwen3-8b int4", 8), ("qwen3-8b fp8", 8), ("qwen3-8b fp8", 32),
        )),
    ],
)  # fmt: skip
def test_more_sequences_leave_half_too(model: str, num_seqs: int) -> None:
    found = residencies(model, num_seqs, has_adapters=False)
    weight = {"int4": "u4_g128_", "fp8": "e4m3_g128_"}.get(model.partition(" ")[2], "")
    assert {each.kernel.rsplit("_", 1)[0] for each in found} >= {f"gemm_hopper_few_{weight}bf16_bf16"}
    for each in found:
        assert each.takes_half(H200), each
        assert each.waves == 1
        assert all(each.leaves_room_for(other, H200) for other in found)
