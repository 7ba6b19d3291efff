"""How many kernels a model launches: counted on a device that does nothing, for layers of Qwen3-8B's sizes and for
layers with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as bindings

import models.checkpoints.dummy
from models.families.llama import LlamaModel
from numba_kernels.cuda.gemm.split_k import most_rows
from numba_kernels.split_k import SEGMENTS
from runtime.batch import Batch
from runtime.device import gpu as gpu_module
from runtime.device.driver import Driver
from runtime.device.gpu import Device, Gpu
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.engine.make_engine import build_engine
from tests.models.published_configs import PUBLISHED
from tests.runtime.engine.fakes import request
from tests.runtime.engine.noted_launches import kernels_of_a_decode_layer

pytestmark = pytest.mark.emulator

NUM_LAYERS = 36
MOST_LAUNCHES_A_LAYER, MOST_NODES = 5, 186  # of a step of decodes
LAUNCHES_OF_A_PROMPT = 6  # a layer; as of an exact decode, in which attention does not prepare its heads either
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 128, "vocab_size": 512, "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LAUNCHES_WITH_EXPERTS = 6, 8  # of a few sequences, which go straight over their experts, and of more
QWEN3_MOE = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 128, "num_experts_per_tok": 8, "num_attention_heads": 4, "num_key_value_heads": 1,
    "norm_topk_prob": True,
}  # fmt: skip


GPT_OSS = PUBLISHED["gpt-oss-20b"] | {
    "hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
    "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "max_position_embeddings": 4096,
}  # fmt: skip


class CountingDriver(DryDriver):
    """Notes the kernels that are launched, and what is recorded into graphs.

    Attributes:
        launched: names of kernels.
        recordings: for each one the names of its kernels, and "copy" or "fill" for the rest.
    """

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self._names: dict[int, str] = {}
        self._recorded: list[str] | None = None
        self.launched: list[str] = []
        self.recordings: list[list[str]] = []

    def _note(self, name: str) -> tuple[Any]:
        (self.launched if self._recorded is None else self._recorded).append(name)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, int]:  # type: ignore[override]
        status, function = self._new()
        self._names[function] = name.decode()
        return status, function

    def cuLaunchKernelEx(self, config: Any, function: Any, *_: Any) -> tuple[Any]:  # type: ignore[override]
        return self._note(self._names[int(function)])

    def _copy(self, *_: Any) -> tuple[Any]:
        return (bindings.CUresult.CUDA_SUCCESS,) if self._recorded is None else self._note("copy")

    cuMemcpyHtoDAsync = cuMemcpyDtoDAsync = cuMemcpyBatchAsync = cuMemsetD8Async = _copy  # type: ignore[assignment]

    def cuStreamBeginCapture(self, *arguments: Any) -> Any:  # type: ignore[override]
        self._recorded = []
        return super().cuStreamBeginCapture(*arguments)

    def cuStreamEndCapture(self, *arguments: Any) -> Any:  # type: ignore[override]
        assert self._recorded is not None
        self.recordings.append(self._recorded)
        self._recorded = None
        return super().cuStreamEndCapture(*arguments)


class Counted:
    """What a model of so many layers launches.

    Attributes:
        prompts: kernels of forward passes, by (sequences, tokens).
        graphs: those of steps of decodes, recorded, and whatever else their graphs do.
        is_exact: whether it is in exact mode.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, *, exact: bool,
        fields: dict[str, Any] = QWEN3_8B,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(gpu_module, "_opened", {})
        monkeypatch.setattr(models.checkpoints.dummy.DummyTensor, "array", _zeros)
        (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": num_layers}))
        driver = CountingDriver("sm_90a")
        opened = Driver(driver, bindings, arch="sm_90a")
        opened.call("cuInit", 0)
        Gpu(Device("emulated:sm_90a"), opened, kernel_cache=KernelList()).install()
        self.is_exact = exact
        self.prompts: dict[tuple[int, int], list[str]] = {}
        self.graphs = driver.recordings
        forward = LlamaModel.forward

        def counted(model: LlamaModel, batch: Batch, kv_cache: Any) -> Any:
            before = len(driver.launched)
            result = forward(model, batch, kv_cache)
            if len(driver.launched) > before:  # else it was recorded
                self.prompts[batch.num_seqs, batch.token_ids.shape[0]] = driver.launched[before:]
            return result

        monkeypatch.setattr(LlamaModel, "forward", counted)
        engine = build_engine(
            folder, device="emulated:sm_90a", load_format="dummy", max_model_len=4096, kv_cache_bytes=1 << 32,
            max_num_seqs=256, exact=exact,
        )  # fmt: skip
        for count, length in ((1, 10), (1, 2000), (2, 200), (5, 8), (40, 8), (256, 8)):
            for number in range(count):
                engine.add(request(f"{length}-{number}", [1] * length, max_tokens=4, ignore_eos=True))
            while engine.has_work:
                engine.step()
        engine.close()
        monkeypatch.undo()


def _zeros(tensor: models.checkpoints.dummy.DummyTensor) -> np.ndarray:
    return np.zeros(tensor.shape, tensor._dtype.numpy)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["fast", "exact"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Counted, Counted]:
    """The model with one layer and with two."""
    folder = tmp_path_factory.mktemp("qwen3")
    with pytest.MonkeyPatch.context() as monkeypatch:
        one, two = (Counted(folder, monkeypatch, count, exact=request.param) for count in (1, 2))
    return one, two


def kernels_of_a_layer(one: list[str], two: list[str]) -> list[str]:
    """Those that a second layer adds, which stand behind the first one's."""
    added = len(two) - len(one)
    behind = next(place for place, name in enumerate(two) if place >= len(one) or name != one[place])
    layer = two[behind : behind + added]
    assert one[:behind] + layer + one[behind:] == two
    return layer


def test_decode_steps(pair: tuple[Counted, Counted]) -> None:
    """Graphs of batches from one sequence to 256. In exact mode the two maps that are split over their inputs are two
    launches each."""
    one, two = pair
    assert len(one.graphs) == len(two.graphs) > 4
    for fewer, more in zip(one.graphs, two.graphs, strict=True):
        layer = kernels_of_a_layer(fewer, more)
        assert len(layer) == (LAUNCHES_OF_A_PROMPT + 2 if one.is_exact else MOST_LAUNCHES_A_LAYER), layer
        num_nodes = len(fewer) + (NUM_LAYERS - 1) * len(layer)
        assert one.is_exact or num_nodes <= MOST_NODES, f"{num_nodes} nodes: {fewer}"


def test_prompts(pair: tuple[Counted, Counted]) -> None:
    one, two = pair
    assert one.prompts.keys() == two.prompts.keys()
    assert max(num_tokens for _, num_tokens in one.prompts) > 1000
    for batch, fewer in one.prompts.items():
        if one.is_exact and batch[1] > most_rows(SEGMENTS, 4096):
            continue  # sums of segments of so many rows come one after another
        layer = kernels_of_a_layer(fewer, two.prompts[batch])
        are_decodes = batch[0] == batch[1] and not one.is_exact
        wanted = MOST_LAUNCHES_A_LAYER if are_decodes else LAUNCHES_OF_A_PROMPT + 2 * one.is_exact
        assert len(layer) == wanted, layer
        assert sum("qkv_prepare" in name for name in layer) == (not are_decodes)
        assert sum("attention" in name for name in layer) == 1


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["fast", "exact"])
def test_decode_steps_with_experts(tmp_path: Path, exact: bool) -> None:
    """As many launches whatever the number of experts."""
    found = []
    for num_experts in (8, 64):
        fields = QWEN3_MOE | {"num_experts": num_experts}
        with pytest.MonkeyPatch.context() as monkeypatch:
            one, two = (Counted(tmp_path, monkeypatch, count, exact=exact, fields=fields) for count in (1, 2))
        assert len(one.graphs) == len(two.graphs) > 4
        layers = [kernels_of_a_layer(*pair) for pair in zip(one.graphs, two.graphs, strict=True)]
        found.append([len(layer) for layer in layers])
        assert set(found[-1]) == ({max(LAUNCHES_WITH_EXPERTS) + 4} if exact else set(LAUNCHES_WITH_EXPERTS)), layers
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("num_seqs", "most", "tiers"),
    [
        (1, LAUNCHES_WITH_EXPERTS[0], {8: "experts_packed_gather_e2m1", 64: "experts_packed_gather_e2m1"}),
        (40, LAUNCHES_WITH_EXPERTS[1], {8: "experts_hopper_e2m1", 64: "experts_packed_rows_e2m1"}),
    ],
)
def test_decode_steps_with_quantised_experts(num_seqs: int, most: int, tiers: dict[int, str]) -> None:
    """gpt-oss, whose experts stay in MXFP4: as many launches as with those of 16 bits, by the tier for as many rows as
    each has."""
    found = []
    for num_experts, tier in tiers.items():
        names = kernels_of_a_decode_layer(GPT_OSS | {"num_local_experts": num_experts}, num_seqs=num_seqs)
        assert sum(name.startswith(tier) for name in names) == 2, names
        assert len(names) == most, names
        found.append(len(names))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("num_seqs", "query_rank", "before"),
    [
        (8, None, []), pytest.param(1, None, [], marks=pytest.mark.exhaustive),
        pytest.param(1, 1536, ["deferred_norm", "gemv"], marks=pytest.mark.exhaustive),
        pytest.param(8, 1536, ["elementwise_copy", "deferred_norm", "gemm"], marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_decode_layer_of_latent_attention(num_seqs: int, query_rank: int | None, before: list[str]) -> None:
    """Five launches: queries and latent rows after the norm in one product, the keys' maps with rotation and rows,
    attention, the values' maps, o. A second product of queries has a norm, which sees rows of their own."""
    config = PUBLISHED["DeepSeek-V2-Lite"] | {
        "num_hidden_layers": 3, "first_k_dense_replace": 0, "n_routed_experts": 8, "vocab_size": 512,
        "moe_intermediate_size": 256, "intermediate_size": 512, "q_lora_rank": query_rank,
    }  # fmt: skip
    launched = kernels_of_a_decode_layer(config, num_seqs=num_seqs)
    product = "gemv" if num_seqs == 1 else "gemm"
    wanted = [product, *before, "latent_absorb", "latent_attention", "latent_values", product, "route_normed"]
    assert [name[: len(start)] for name, start in zip(launched, wanted, strict=False)] == wanted


def test_adapters_of_one_sequence_take_no_launch() -> None:
    """They ride on the products' launches, those of gate and up before the gate."""
    config = PUBLISHED["Qwen3-0.6B"] | {"num_hidden_layers": 3, "vocab_size": 512, "head_dim": 64}
    plain = kernels_of_a_decode_layer(config, num_seqs=1)
    adapted = kernels_of_a_decode_layer(config, num_seqs=1, has_adapters=True)
    assert len(adapted) == len(plain) == MOST_LAUNCHES_A_LAYER, adapted
    assert sum(name.endswith("_adapted") for name in adapted) == 4, adapted


_SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("quantization", "num_seqs"),
    [
        ("int4", 1), ("fp8", 4), ("int4", 32), ("none", 8), pytest.param("none", 3, marks=_SLOW),
        pytest.param("none", 32, marks=_SLOW), pytest.param("int4", 4, marks=_SLOW),
        pytest.param("int4", 8, marks=_SLOW), pytest.param("fp8", 1, marks=_SLOW), pytest.param("fp8", 8, marks=_SLOW),
        pytest.param("fp8", 32, marks=_SLOW), pytest.param("int8", 16, marks=_SLOW),
        pytest.param("mxfp4", 1, marks=_SLOW), pytest.param("mxfp4", 16, marks=_SLOW),
    ],
)  # fmt: skip
def test_adapters_of_batches_take_no_launch(quantization: str, num_seqs: int) -> None:
    """Steps of up to 32 sequences, whose products `quantised_gemv` and `skinny` compute."""
    config = PUBLISHED["Qwen3-0.6B"] | {"num_hidden_layers": 3, "vocab_size": 512, "head_dim": 64}
    plain = kernels_of_a_decode_layer(config, num_seqs=num_seqs, quantization=quantization)
    adapted = kernels_of_a_decode_layer(config, num_seqs=num_seqs, has_adapters=True, quantization=quantization)
    assert len(adapted) == len(plain), (plain, adapted)
    if quantization != "none" and num_seqs <= 4:
        assert len(plain) == MOST_LAUNCHES_A_LAYER, plain  # `quantised_gemv` applies the norms
    assert sum(name.endswith("_adapted") for name in adapted) == 4, adapted


@pytest.mark.parametrize("num_seqs", [40])
def test_adapters_take_a_launch_a_map(num_seqs: int) -> None:
    """And one more for the gate, which is applied after the adapters of gate and up; no norm is a launch of its own."""
    config = PUBLISHED["Qwen3-0.6B"] | {"num_hidden_layers": 3, "vocab_size": 512, "head_dim": 64}
    plain = kernels_of_a_decode_layer(config, num_seqs=num_seqs)
    adapted = kernels_of_a_decode_layer(config, num_seqs=num_seqs, has_adapters=True)
    more = [name.split("_bf16")[0] for name in adapted if name.startswith(("low_rank", "glu"))]
    assert sorted(more) == ["glu_silu", *["low_rank"] * 4]
    assert len(adapted) == len(plain) + len(more)
