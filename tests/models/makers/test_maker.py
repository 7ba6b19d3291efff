"""Makers: loading holds the source of one linear map at a time, and what is declared is what is loaded."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models.demo
import models.demo_moe
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.safetensors_file import SafetensorsFile
from models.checkpoints.stored_tensor import StoredTensor
from models.checkpoints.weight_files import open_checkpoint
from models.errors import ModelLoadError
from models.families import known_architectures
from models.makers.declaring_maker import DeclaringMaker
from models.makers.loading_maker import LoadingMaker
from models.registry import declare_model, load_config, load_model, tensor_layout
from runtime.dtype import DType, bfloat16, float32
from runtime.linear.format import quantized_format
from runtime.linear.options import LoadOptions, LoadSettings
from runtime.tensor.tensor import Tensor
from tests.models.driver import Array, logits_of, relative_error
from tests.models.folders import golden_tensors, load_golden, write_model, write_safetensors


class WatchedSource(Checkpoint):
    """A checkpoint that notes which tensors were looked at and not released yet."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source.place, source.label, {})
        self.tensors = {name: _WatchedTensor(self, name, stored) for name, stored in source.tensors.items()}
        self.held: set[str] = set()
        self.most_held: set[str] = set()
        self.seen: set[str] = set()


class _WatchedTensor(StoredTensor):
    def __init__(self, source: WatchedSource, name: str, stored: StoredTensor) -> None:
        self.source, self.name, self.stored = source, name, stored
        self.shape, self.dtype, self.block_format = stored.shape, stored.dtype, stored.block_format

    def array(self) -> np.ndarray[Any, Any]:
        source = self.source
        source.held.add(self.name)
        source.seen.add(self.name)
        if len(source.held) > len(source.most_held):
            source.most_held = set(source.held)
        return self.stored.array()

    def release(self) -> None:
        self.source.held.discard(self.name)
        self.stored.release()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [None, bfloat16], ids=str)
@pytest.mark.parametrize("case", ["gpt2_gelu_erf", "qwen2_tied"])
def test_the_source_is_released_map_by_map(tmp_path: Path, case: str, dtype: DType | None, quantization: str) -> None:
    folder = write_model(tmp_path, load_golden(case))
    config = load_config(folder)
    layout = tensor_layout(config)
    checkpoint = open_checkpoint(folder)
    checkpoint.fit(layout)
    source = WatchedSource(checkpoint)
    options = LoadOptions(dtype=dtype, format=quantized_format(quantization))
    known_architectures()[config.architecture].model_class(config, LoadingMaker(options, 64, source))
    assert source.seen == set(layout.shapes)
    assert source.held == set()
    joined = {name.rsplit(".", 2)[0] for name in source.most_held}
    assert len(joined) == 1, source.most_held  # query, key and value with their biases at most
    assert len(source.most_held) <= 6


def test_a_tied_copy_that_was_compared_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden("gpt2_gelu_new")
    folder = write_model(tmp_path, golden)
    tensors = golden_tensors(golden)
    write_safetensors(folder / "model.safetensors", {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]})
    released: list[str] = []
    monkeypatch.setattr(SafetensorsFile, "release", lambda self, name: released.append(name))
    config = load_config(folder)
    open_checkpoint(folder).fit(tensor_layout(config))
    assert sorted(released) == ["lm_head.weight", "transformer.wte.weight"]


# ---------------------------------------------------------------- what is declared is what is loaded


@pytest.mark.parametrize("case", ["gpt2_gelu_new", "llama_default", "qwen2_tied", "qwen3_tied_gqa4"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"device": "emulated:sm_80", "dtype": "float16"},
        {"device": "emulated:sm_80", "dtype": "bfloat16", "quantization": "int8"},
    ],
    ids=str,
)
def test_a_declared_model_knows_its_bytes_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, settings: LoadSettings
) -> None:
    folder = write_model(tmp_path, load_golden(case), "BF16")
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "array", lambda self, name: pytest.fail(f"{name} was read"))
        declared = declare_model(folder, **settings)
    loaded = load_model(folder, **settings)
    assert declared.weight_bytes == loaded.weight_bytes
    for name in ("dtype", "quantization", "device", "max_positions"):
        assert getattr(declared, name) == getattr(loaded, name)
    assert declared.kv_cache_spec(16) == loaded.kv_cache_spec(16)
    assert (declared.lm_head.shape, declared.lm_head.format) == (loaded.lm_head.shape, loaded.lm_head.format)


class ArrayTensor(StoredTensor):
    """A tensor in memory."""

    def __init__(self, name: str, values: Array) -> None:
        self.name, self.values, self.shape, self.dtype = name, values, values.shape, float32

    def array(self) -> Array:
        return self.values


def of_arrays(tensors: dict[str, Array]) -> Checkpoint:
    """A checkpoint of a dict's tensors, in float32."""
    return Checkpoint(Path("memory"), "memory", {name: ArrayTensor(name, each) for name, each in tensors.items()})


def test_maps_stored_fused_are_those_stored_apart() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (12, 4, 4))
    biases = [rng.standard_normal(len(part)).astype(np.float32) for part in (q, k, v)]
    tensors = {"a.qkv.weight": np.concatenate([q, k, v]), "a.qkv.bias": np.concatenate(biases)}
    for name, part, bias in zip("qkv", (q, k, v), biases, strict=True):
        tensors |= {f"a.{name}.weight": part, f"a.{name}.bias": bias}
    maker = LoadingMaker(LoadOptions(), 1, of_arrays(tensors)).under("a")
    shape: dict[str, Any] = {"outputs": (12, 4, 4), "inputs": 8, "has_bias": True}
    x = Tensor.from_numpy(rng.standard_normal((3, 8)).astype(np.float32))
    apart = maker.linear(("q", "k", "v"), **shape)(x).numpy()
    np.testing.assert_array_equal(maker.linear("qkv", **shape)(x).numpy(), apart)
    np.testing.assert_allclose(apart[:, 12:16], x.numpy() @ k.T + biases[1], rtol=1e-5, atol=1e-5)

    declaring = DeclaringMaker(LoadOptions(), 1)
    declaring.under("a").linear("qkv", **shape)
    assert declaring.layout("", re.compile("")).shapes == {"a.qkv.weight": (20, 8), "a.qkv.bias": (20,)}
    declaring.under("b").linear(("q", "k"), outputs=(12, 4), inputs=8)
    assert list(declaring.layout("", re.compile("")).shapes)[2:] == ["b.q.weight", "b.k.weight"]


def test_a_number_is_added_in_float32_after_rounding() -> None:
    stored = np.array([2.0**-9, 1.0, -3.0], np.float32)
    maker = LoadingMaker(LoadOptions(dtype=bfloat16), 1, of_arrays({"norm.weight": stored}))
    np.testing.assert_array_equal(maker.vector("norm.weight", 3, add=1.0).numpy(), stored + np.float32(1.0))
    assert maker.size_bytes == 12


# ---------------------------------------------------------------- split over ranks


class ThreadCommunicator:
    """Ranks in threads of one process: each waits for all, then adds what they have, in the order of ranks."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.num_ranks = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Communicator`."""
        self._shared[self.rank] = tensor.numpy().copy()
        self._barrier.wait(60)
        tensor.array[...] = sum(self._shared)
        self._barrier.wait(60)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        self._shared[self.rank] = tensor.numpy().copy()
        self._barrier.wait(60)
        gathered = Tensor.from_numpy(np.stack(self._shared))
        self._barrier.wait(60)
        return gathered

    def all_gather_columns(self, tensor: Tensor, shard: int, columns: int) -> Tensor:
        """See `Communicator`."""
        self._shared[self.rank] = tensor.numpy().copy()
        self._barrier.wait(60)
        gathered = Tensor.from_numpy(np.concatenate(self._shared, axis=1))
        self._barrier.wait(60)
        assert gathered.shape == (tensor.shape[0], columns)
        assert tensor.shape[1] == min(shard, columns - self.rank * shard)
        return gathered

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> None:
        """See `Communicator`."""


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("llama_default", 3), ("qwen2_tied", 2), ("qwen3_layer_types", 2), ("gpt2_gelu_erf", 5),
        ("llama_llama3_gqa4", 4),  # one KV head for all
        ("qwen2_window", 4),  # two for four ranks
        ("phi3_longrope", 3),  # queries, keys and values in one tensor, one KV head
        ("mixtral_odd", 5),  # widths that cannot be divided
        ("gpt_oss_odd", 2),  # biases and sinks
        ("qwen2_moe_shared", 2), ("glm4_moe_groups", 2), ("olmo3_windows", 2), ("gemma2_odd", 5),
    ],
)  # fmt: skip
def test_ranks_together_are_the_model(tmp_path: Path, case: str, num_ranks: int) -> None:
    golden = load_golden(case)
    folder = write_model(tmp_path, golden)
    whole = load_model(folder)
    shared: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)

    def run(rank: int) -> tuple[Array, int]:
        communicator = ThreadCommunicator(rank, shared, barrier)
        model = load_model(folder, communicator=communicator)
        assert declare_model(folder, communicator=communicator).weight_bytes == model.weight_bytes
        kv_heads = whole.kv_cache_spec(16).of_layer(0).form.num_kv_heads
        assert model.kv_cache_spec(16).of_layer(0).form.num_kv_heads == max(1, kv_heads // num_ranks)
        return logits_of(model, golden.prompt_ids), model.weight_bytes

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(run, range(num_ranks)))
    expected = logits_of(whole, golden.prompt_ids)
    for logits, weight_bytes in found:
        assert relative_error(logits, expected) <= 1e-5
        assert weight_bytes < whole.weight_bytes


WIDE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 72, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 100,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
"""Eight ranks can share its heads, each a step of int8's segments."""


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("auto", "none"), ("auto", "int8")])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_exact_ranks_together_have_the_model_s_bits(
    tmp_path: Path, num_ranks: int, dtype: str, quantization: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 100, 40)]
    options: LoadSettings = {"dtype": dtype, "quantization": quantization, "exact": True}
    expected = logits_of(load_model(tmp_path, load_format="dummy", **options), ids)
    shared: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)

    def run(rank: int) -> Array:
        communicator = ThreadCommunicator(rank, shared, barrier)
        model = load_model(tmp_path, load_format="dummy", communicator=communicator, **options)
        return logits_of(model, ids)

    with ThreadPoolExecutor(num_ranks) as pool:
        for logits in pool.map(run, range(num_ranks)):
            np.testing.assert_array_equal(logits, expected)


def test_ranks_without_whole_segments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**WIDE, "head_dim": 8}))
    for num_ranks, words in (
        (8, "o_proj: a rank would have 8 inputs, but float32 is cut at multiples of 16 in exact mode"),
        (4, None),
    ):
        communicator = ThreadCommunicator(0, [None] * num_ranks, threading.Barrier(num_ranks))
        settings: LoadSettings = {"dtype": "float32", "communicator": communicator}
        with nullcontext() if words is None else pytest.raises(ModelLoadError, match=words):
            load_model(tmp_path, load_format="dummy", exact=True, **settings)
        load_model(tmp_path, load_format="dummy", **settings)


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("llama_default"))
    for num_ranks, settings, words in (
        (2, {}, "num_heads = 3 cannot be split over 2 ranks"),
        (3, {"quantization": "int8"}, "o_proj: a rank would have 16 inputs, but int8 is cut at multiples of 64"),
    ):
        communicator = ThreadCommunicator(0, [None] * num_ranks, threading.Barrier(num_ranks))
        with pytest.raises(ModelLoadError, match=words):
            load_model(folder, communicator=communicator, **settings)  # type: ignore[arg-type]


def test_what_exact_mode_cannot_share_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("qwen2_moe_shared"))
    communicator = ThreadCommunicator(0, [None] * 2, threading.Barrier(2))
    with pytest.raises(ModelLoadError, match="expert_size = 21 cannot be split over 2 ranks in exact mode"):
        load_model(folder, communicator=communicator, exact=True)


FIXTURES = Path(__file__).parents[1] / "quantized" / "fixtures"


@pytest.mark.parametrize(
    ("fixture", "formats"),
    [
        ("ct_w4_group", ("int4_bfloat", "bfloat16")), ("ct_mxfp4", ("MXFP4", "bfloat16")),
        ("gptq_w4_reordered", ("int4_half_zeros", "float16")), ("ct_int8_channel", ("int8", "float16")),
    ],
)  # fmt: skip
def test_quantised_matrices_are_kept_where_ranks_cut_them_between_groups(
    fixture: str, formats: tuple[str, str]
) -> None:
    """These models' widths are so small that the cut of inputs lies within a group."""
    for rank in range(2):
        communicator = ThreadCommunicator(rank, [None] * 2, threading.Barrier(2))
        mlp = load_model(FIXTURES / fixture, communicator=communicator).layers[0].mlp
        assert (mlp.gate_up_proj.format.name, mlp.down_proj.format.name) == formats


@pytest.mark.parametrize(
    "rounding", ["int4", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("fp8", "mxfp4"))]
)
def test_ranks_share_a_rounded_model(rounding: str) -> None:
    """Its groups are cut between ranks, so that the numbers are the whole model's."""
    ids = [5, 9, 2, 44, 17, 8]
    folder = Path(models.demo.__file__).parent
    expected = logits_of(load_model(folder, quantization=rounding), ids)
    shared: list[Any] = [None] * 2
    barrier = threading.Barrier(2)

    def run(rank: int) -> Array:
        model = load_model(folder, communicator=ThreadCommunicator(rank, shared, barrier), quantization=rounding)
        assert model.layers[0].mlp.down_proj.format.name not in ("bfloat16", "float32")
        return logits_of(model, ids)

    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, range(2)):
            assert relative_error(logits, expected) <= 2e-5


class Taken:
    """An array of a checkpoint that notes how much of it is taken."""

    def __init__(self, name: str, whole: Array, taken: dict[str, int]) -> None:
        self._name, self._whole, self._taken = name, whole, taken
        self.flags, self.dtype, self.shape = whole.flags, whole.dtype, whole.shape

    def __getitem__(self, index: Any) -> Array:
        part: Array = self._whole[index]
        self._taken[self._name] = self._taken.get(self._name, 0) + part.size
        return part


class TakenTensor(ArrayTensor):
    """A tensor whose array is such."""

    def __init__(self, stored: StoredTensor, taken: dict[str, int]) -> None:
        super().__init__(stored.name, stored.array())
        self.taken = taken

    def array(self) -> Any:
        return Taken(self.name, self.values, self.taken)


@pytest.mark.parametrize("case", ["qwen2_window", "gpt_oss_odd"])
def test_a_rank_reads_its_part_of_the_files(tmp_path: Path, case: str) -> None:
    """Of what is split, of which two ranks read all and nothing twice; the table is not."""
    folder = write_model(tmp_path, load_golden(case))
    config, files = load_config(folder), open_checkpoint(folder)
    model_class, taken = known_architectures()[config.architecture].model_class, []
    for rank in range(2):
        communicator = ThreadCommunicator(rank, [None] * 2, threading.Barrier(2))
        options = LoadOptions.parse(communicator=communicator)
        source, declared = open_checkpoint(folder), DeclaringMaker(options, 64)
        model_class(config.of_a_rank(rank, 2), declared)
        source.fit(declared.layout(model_class.prefix, model_class.harmless_tensors(config)))
        counts: dict[str, int] = {}
        source.tensors = {name: TakenTensor(stored, counts) for name, stored in source.tensors.items()}
        model_class(config.of_a_rank(rank, 2), LoadingMaker(options, 64, source))
        taken.append(counts)
    files.fit(declared.layout(model_class.prefix, model_class.harmless_tensors(config)))
    split = [name for name in taken[0] if name.endswith(("_proj.weight", "sinks"))]
    assert len(split) > 10
    for name in split:
        assert taken[0][name] + taken[1][name] == files[name].array().size, name
