"""New weights for each kind of model and engine: families, formats, drafters, adapters, images, stored prefixes, ranks
and processes. Each answers as an engine that was started with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.given_weights import shared_path, shared_weights
from models.checkpoints.safetensors_file import SafetensorsFile, write_tensors
from models.errors import ConfigError, WeightsError
from runtime.dtype import float32
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.make_client import start_client
from runtime.engine.messages import AdapterRef
from runtime.engine.process.client import EngineClient
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.weights.commands import (
    EngineCondition,
    FolderWeights,
    GivenArrays,
    SharedWeights,
    Sleep,
    WakeUp,
)
from tests.models.adapter_cases import load_adapter_golden, write_adapter
from tests.models.drafters.mtp_cases import write_with_prediction
from tests.models.folders import write_model
from tests.models.quantized.test_fixtures import FIXTURES, twin
from tests.models.quantized.test_fixtures import IDS as FIXTURE_IDS
from tests.runtime.engine.weights.two_models import TIMEOUT_S, USUAL, Asked, opened, prompt_of, write_pair
from tests.waiting import wait_until

DEMO = Path("models/demo").resolve()
IDS = [5, 9, 2, 44, 17, 8, 8, 3, 1, 4, 1, 5]


def changed(folder: Path, target: Path, factor: float = 1.05) -> Path:
    """A copy of a folder, in which all floats of matrices and scales are multiplied."""
    shutil.copytree(folder, target)
    for path in sorted(target.glob("*.safetensors")):
        file = SafetensorsFile(path)
        arrays = {}
        for name in file.tensors:
            array = np.array(file.array(name))
            is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
            scales = array.ndim > 1 and is_float
            arrays[name] = (array.astype(np.float32) * factor).astype(array.dtype) if scales else array
        write_tensors(path, [(name, each.dtype, each.shape) for name, each in arrays.items()], arrays.values())
    return target


def tensors_of(folder: Path) -> dict[str, Any]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: np.array(file.array(name)) for name in file.tensors}


def check_update(old: Path, new: Path, ids: list[int] = IDS, *, arrays: bool = False, **settings: Any) -> None:
    """From the folder, by arrays and after a sleep, an engine of `old` answers as one of `new`, and back again."""
    fresh, client = opened(new, **settings), opened(old, **settings)
    try:
        before = Asked(client, "before", ids).answer().tokens
        wanted = Asked(fresh, "wanted", ids).answer().tokens
        logits = fresh.logits(ids)
        assert before != wanted
        client.update_weights(FolderWeights(str(new)), "new")
        assert np.array_equal(client.logits(ids), logits)
        assert Asked(client, "after", ids).answer().tokens == wanted
        assert Asked(client, "again", ids).answer().tokens == wanted  # from the cache, perhaps by a graph
        client.update_weights(FolderWeights(str(old)), "old")
        assert Asked(client, "back", ids).answer().tokens == before
        if arrays:
            given = tensors_of(new)
            client.update_weights(GivenArrays(given), "given")
            for each in given.values():
                each[...] = 1
            assert Asked(client, "given", ids).answer().tokens == wanted
            client.update_weights(FolderWeights(str(new)), "new")
        for level in (1, 2):
            client.order(Sleep(level)).result(TIMEOUT_S)
            client.order(WakeUp()).result(TIMEOUT_S)
            found = Asked(client, f"awake {level}", ids).answer()
            assert found.tokens == (wanted if arrays else before)
    finally:
        client.close()
        fresh.close()
    client._engine.check_invariants()


FAMILIES = ["qwen3_5_odd", "gemma4_inputs_odd", "mixtral_odd", "deepseek_v3_odd", "gpt2_gelu_new"]


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str, tmp_path: Path) -> None:
    """Hybrid states, tables that stay in files, experts, latent attention, tied heads."""
    check_update(*write_pair(tmp_path, case), prompt_of(case), arrays=True)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_that_are_rounded_when_loaded(quantization: str, tmp_path: Path) -> None:
    check_update(*write_pair(tmp_path, "qwen3_odd", "BF16"), arrays=True, quantization=quantization)


@pytest.mark.parametrize("settings", [{"speculation": "mtp"}, {"speculation": "draft"}, {"speculation": "eagle3"}])
def test_drafters_stay(settings: dict[str, Any], tmp_path: Path) -> None:
    """A drafter proposes on, and answers are those without it."""
    if settings["speculation"] == "mtp":
        old = write_with_prediction(tmp_path / "old", "qwen3_5_odd")
    else:
        old = DEMO
    if settings["speculation"] == "draft":
        settings = {"speculation": f"draft:{old}"}
    new = changed(old, tmp_path / "new")
    given = {**settings, "num_speculative_tokens": 3, "max_model_len": 96}
    check_update(old, new, **given)
    client, plain = opened(old, **given), opened(new, max_model_len=96)
    client.update_weights(FolderWeights(str(new)), "new")
    engine = client._engine
    assert engine.speculator is not None
    counted = engine.speculator.counters.num_drafts
    engine.speculator.tries_all()
    engine.speculator._hang_s = 1000.0  # the machine may be busy
    ids = [*IDS, *IDS]
    assert (
        Asked(client, "fast", ids, max_tokens=60).answer().tokens
        == Asked(plain, "slow", ids, max_tokens=60).answer().tokens
    )
    assert engine.speculator.counters.num_drafts > counted
    client.close()
    plain.close()


def test_adapters_stay(tmp_path: Path) -> None:
    """An adapter is added to the new weights, also for a request that waited, and that began again."""
    golden = load_adapter_golden("llama").golden
    old = write_model(tmp_path / "old", golden)
    new = changed(old, tmp_path / "new")
    write_adapter(tmp_path / "adapter", "llama")
    settings = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}
    client, fresh = opened(old, **settings), opened(new, **settings)
    refs = []
    for each in (client, fresh):
        digest = each.load_adapter("adapter", str(tmp_path / "adapter")).result(TIMEOUT_S)
        refs.append(AdapterRef.of("adapter", str(tmp_path / "adapter"), digest.tolist()))
    wanted = Asked(fresh, "wanted", IDS, adapter=refs[1]).answer().tokens
    plain = Asked(fresh, "plain", IDS).answer().tokens
    assert wanted != plain
    old_answer = Asked(client, "old", IDS, adapter=refs[0]).answer().tokens
    for mode in ("restart", "abort", "wait"):
        begun = Asked(client, f"{mode} begun", IDS, adapter=refs[0])
        begun.wait_for_output()
        client.update_weights(FolderWeights(str(new)), f"{mode}", mode)  # type: ignore[arg-type]
        found = begun.answer()
        assert found.tokens == (wanted if found.weight_version == mode else old_answer[: len(found.tokens)])
        assert Asked(client, f"{mode} after", IDS, adapter=refs[0]).answer().tokens == wanted
        assert Asked(client, f"{mode} plain", IDS).answer().tokens == plain
        client.update_weights(FolderWeights(str(old)), "0")
        for level in (1, 2):
            kept = Asked(client, f"{mode} {level} kept", IDS, adapter=refs[0])
            kept.wait_for_output()
            client.order(Sleep(level, "keep")).result(TIMEOUT_S)
            client.order(WakeUp()).result(TIMEOUT_S)
            assert kept.answer().tokens == old_answer
    client.close()
    fresh.close()
    client._engine.check_invariants()


@pytest.mark.parametrize("form", ["ct_fp8_channel", "ct_w4_group", "ct_int8_channel"])
def test_quantised_checkpoints(form: str, tmp_path: Path) -> None:
    """A quantised folder takes one that is quantised alike; floats for it are refused by name."""
    old = Path(shutil.copytree(FIXTURES / form, tmp_path / "old"))
    check_update(old, changed(old, tmp_path / "new"), FIXTURE_IDS[:8], arrays=True, max_model_len=32)
    client = opened(old, max_model_len=32)
    floats = tensors_of(twin(form, tmp_path / "floats", float32))
    with pytest.raises(ConfigError, match="stored otherwise than the engine's"):
        client.update_weights(GivenArrays(floats), "floats")
    client.close()


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    old, new = write_pair(tmp_path, "qwen3_odd")
    client = opened(old)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a folder, and so must"):
        client.update_weights(FolderWeights(str(gguf)), "new")
    other, _ = write_pair(tmp_path / "other", "llama_tied_gqa4")
    with pytest.raises(ConfigError, match="another model's"):
        client.update_weights(FolderWeights(str(other)), "new")
    (new / "config.json").unlink()  # weights alone are enough
    client.update_weights(FolderWeights(str(new)), "new")
    client.close()


def test_stored_prefixes_are_those_of_their_weights(tmp_path: Path) -> None:
    """Pages of old weights are not found with new ones; those that a fresh engine of the new ones has stored are."""
    old, new = write_pair(tmp_path, "qwen3_odd")
    settings = {"prefix_cache_dir": str(tmp_path / "pages"), "max_model_len": 64}
    ids = (IDS * 4)[:40]
    fresh = opened(new, **settings)
    wanted = Asked(fresh, "wanted", ids).answer().tokens
    fresh.close()
    client = opened(old, **settings)
    before = Asked(client, "before", ids).answer().tokens
    assert before != wanted
    wait_until(lambda: not client._engine.wants_rest)
    client.update_weights(FolderWeights(str(new)), "new")
    assert Asked(client, "after", ids).answer().tokens == wanted
    assert client.stats().prefix_cache_restored >= 32
    client.update_weights(GivenArrays(tensors_of(old)), "given")
    restored = client.stats().prefix_cache_restored
    assert Asked(client, "given", ids).answer().tokens == before
    assert client.stats().prefix_cache_restored == restored, "whose numbers these are is not known"
    client.order(Sleep(1)).result(TIMEOUT_S)
    client.order(WakeUp()).result(TIMEOUT_S)
    assert Asked(client, "awake", ids).answer().tokens == before
    client.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), "qwen3_odd")


def check_client(make: Callable[[Path], EngineClient], pair: tuple[Path, Path]) -> EngineClient:
    """The client, open, on the new weights, after all that a client can be told."""
    old, new = pair
    fresh = make(new)
    wanted = Asked(fresh, "wanted", IDS).answer().tokens
    fresh.close()
    client = make(old)
    before = Asked(client, "before", IDS).answer()
    assert before.weight_version == "0"
    begun = Asked(client, "begun", IDS)
    begun.wait_for_output()
    client.update_weights(FolderWeights(str(new)), "new", "restart")
    answer = begun.answer()
    assert answer.tokens == (wanted if answer.weight_version == "new" else before.tokens)
    assert Asked(client, "after", IDS).answer().tokens == wanted
    assert client.weight_version == "new"
    spoilt = tensors_of(old)
    next(iter(spoilt.values())).reshape(-1)[0] = np.nan
    with shared_weights(spoilt) as name, pytest.raises(WeightsError, match="NaN"):
        client.update_weights(SharedWeights(str(shared_path(name))), "bad")
    with shared_weights(tensors_of(old)) as name:
        client.update_weights(SharedWeights(str(shared_path(name))), "old")
    assert Asked(client, "old", IDS).answer()[:3] == (before.tokens, "length", "old")
    with pytest.raises(RequestError, match="share them"):
        client.update_weights(GivenArrays(tensors_of(old)), "given")
    client.update_weights(FolderWeights(str(new)), "new")
    for level in (1, 2):
        kept = Asked(client, f"kept {level}", IDS)
        kept.wait_for_output()
        assert EngineCondition.of(client.order(Sleep(level, "keep")).result(TIMEOUT_S)).sleep_level == level
        assert client.condition().is_sleeping
        assert EngineCondition.of(client.order(WakeUp()).result(TIMEOUT_S)) == EngineCondition(False, 0, True, True)
        assert kept.answer().tokens == wanted
    return client


def process(folder: Path, **settings: Any) -> ProcessEngineClient:
    return ProcessEngineClient(str(folder), **{**USUAL, **settings})


def test_engine_in_a_process(pair: tuple[Path, Path]) -> None:
    """One that dies is started again with the folder that it served; after weights from memory with its own."""
    client = check_client(process, pair)
    assert isinstance(client, ProcessEngineClient)
    wanted = Asked(client, "wanted", IDS).answer().tokens

    def kill() -> None:
        running = client._supervisor.process
        assert running is not None
        running.kill()
        wait_until(lambda: client.state != "ready")
        wait_until(lambda: client.state == "ready")

    kill()
    assert Asked(client, "new", IDS).answer() == (wanted, "length", "new", 0)
    with shared_weights(tensors_of(pair[1])) as name:
        client.update_weights(SharedWeights(str(shared_path(name))), "shared")
    kill()
    assert client.weight_version == "0"
    assert Asked(client, "own", IDS).answer().weight_version == "0"
    client.close()


def test_several_engines(pair: tuple[Path, Path]) -> None:
    def make(folder: Path) -> EngineClient:
        return start_client(str(folder), **{**USUAL, "data_parallel_size": 2})

    client = check_client(make, pair)
    assert {engine.weight_version for engine in client.engines} == {"new"}
    engines = client.engines
    assert isinstance(engines[1], ProcessEngineClient)
    running = engines[1]._supervisor.process
    assert running is not None
    running.kill()
    wait_until(lambda: engines[1].state != "ready")
    with pytest.raises(EngineDeadError, match="not all engines"):
        client.update_weights(FolderWeights(str(pair[0])), "old")
    client.close()


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks(split: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "qwen3_layer_types")
    settings = {split: 2}

    def make(folder: Path) -> EngineClient:
        return opened(folder, **settings)

    client = check_client(make, pair)
    client.close()


@pytest.mark.exhaustive
@pytest.mark.emulator
@pytest.mark.parametrize("case", ["qwen3_odd", "mixtral_odd", "qwen3_5_odd"])
def test_captured_graphs(case: str, tmp_path: Path) -> None:
    """On an emulated GPU, which checks every access to memory: no recording of old weights or pages is launched."""
    old, new = write_pair(tmp_path, case)
    check_update(old, new, prompt_of(case), arrays=True, device="emulated:sm_90a", exact=True)
