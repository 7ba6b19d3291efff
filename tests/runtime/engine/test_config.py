"""Sizing of the KV cache, and the refusals with numbers."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from models.checkpoints.safetensors_file import SafetensorsFile
from runtime.device.device import Device
from runtime.emulator.driver.emulated_driver import DEFAULT_MEMORY_BYTES
from runtime.engine.admission import prepare
from runtime.engine.config import EngineConfig, Quantization, SchedulingConfig
from runtime.engine.errors import RequestError
from runtime.engine.limits import available_memory_bytes, resolve
from runtime.engine.make_engine import build_engine, describe_engine, free_memory_bytes
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.kv.kinds import FULL, AnyKind, State, Window
from runtime.linear.format import QUANTIZATIONS
from tests.models.folders import write_tiny_qwen3
from tests.runtime.engine.fakes import said_by_engine

GIB = 1 << 30


def sized(
    positions: int = 4096,
    bytes_per_block: int = 1 << 20,
    available: int = 64 * GIB,
    cache_kinds: tuple[AnyKind, ...] = (FULL,),
    is_gpu: bool = False,
    **config: Any,
):
    return resolve(
        EngineConfig(**config),
        max_position_embeddings=positions,
        bytes_per_block=bytes_per_block,
        available_bytes=available,
        is_gpu=is_gpu,
        cache_kinds=cache_kinds,
    )


def test_default_is_bounded_by_memory_by_need_and_by_the_cap() -> None:
    assert sized(available=8 * GIB).num_blocks == 2 * GIB >> 20  # a quarter of what is free
    assert sized(available=1024 * GIB).num_blocks == 4 * GIB >> 20  # the cap
    assert sized(positions=100, max_num_seqs=3).num_blocks == 3 * 7  # all that three sequences can use


def test_explicit_sizes() -> None:
    assert sized(num_blocks=300).num_blocks == 300
    assert sized(kv_cache_bytes=300 << 20).num_blocks == 300
    with pytest.raises(RequestError, match="not both"):
        sized(num_blocks=1, kv_cache_bytes=1)


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 8193), ("kv_cache_bytes", 8193 << 20)])
def test_more_than_is_free_is_refused(name: str, value: int) -> None:
    sized(available=8 * GIB, **{name: value - 1 if name == "num_blocks" else value - (1 << 20)})
    with pytest.raises(
        RequestError, match=r"8193 blocks takes 8,590,983,168 bytes, but only 8,589,934,592 are free"
    ) as caught:
        sized(available=8 * GIB, **{name: value})
    assert caught.value.param == name.replace("kv_cache_bytes", "kv_cache_memory_bytes")


@pytest.mark.emulator
def test_an_emulated_device_has_its_own_memory_within_the_hosts() -> None:
    """Where nobody names a size, the KV cache takes a quarter of it."""
    free = free_memory_bytes(Device("emulated:sm_80"))
    assert 0 < free <= min(DEFAULT_MEMORY_BYTES, available_memory_bytes() + GIB)
    assert sized(available=DEFAULT_MEMORY_BYTES).num_blocks == DEFAULT_MEMORY_BYTES // 4 >> 20


def test_the_context_is_cut_to_the_pool_only_when_nobody_asked_for_it() -> None:
    assert sized(num_blocks=10).max_model_len == 160
    assert sized(num_blocks=10, max_model_len=160).max_model_len == 160
    with pytest.raises(RequestError, match=r"11 KV blocks.*has 10") as caught:
        sized(num_blocks=10, max_model_len=161)
    assert caught.value.param == "kv_cache_memory_bytes"


def test_no_block_at_all_is_refused() -> None:
    with pytest.raises(RequestError, match="KV cache has 0"):
        sized(kv_cache_bytes=1000)
    with pytest.raises(RequestError, match="KV cache has 0"):
        sized(available=1 << 20)


def test_more_than_the_models_positions_is_refused() -> None:
    with pytest.raises(RequestError, match=r"4097.*4096") as caught:
        sized(max_model_len=4097)
    assert caught.value.param == "max_model_len"


def test_every_sequence_can_decode_in_each_step() -> None:
    assert sized(max_num_seqs=256, max_num_batched_tokens=16).max_num_seqs == 16
    assert sized(max_num_seqs=1000).max_num_seqs == 1000


def test_a_cpu_takes_fewer_tokens_in_a_step() -> None:
    assert sized().max_num_batched_tokens == 512
    assert sized(is_gpu=True).max_num_batched_tokens == 2048
    assert sized(max_num_seqs=1000).max_num_batched_tokens == 1000
    assert sized(max_num_batched_tokens=4096).max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_blocks",
        "kv_cache_bytes",
        "max_waiting",
        "prefill_chunk",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, math.nan, "1"])
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name.replace("kv_cache_bytes", "kv_cache_memory_bytes")):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["scheduling_policy", "batching", "preemption", "victim", "overlap"])
@pytest.mark.parametrize("value", ["", "FCFS", None, 1])
def test_unknown_choices_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must be one of .*, got {value!r}") as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["ageing_s", "ttft_target_s", "tpot_target_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", None])
def test_bad_seconds_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a positive number of seconds"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"swap_space_bytes": -1}, "swap_space_bytes must be an integer, at least 0, got -1"),
        ({"swap_space_bytes": 1.5}, "swap_space_bytes must be an integer, at least 0, got 1.5"),
        ({"preemption": "swap"}, "preemption='swap' needs swap_space_bytes"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, got 1"),
        ({"decode": "megakernel"}, "decode is 'megakernel', which was removed: it took 1.42 ms"),
        ({"exact": "yes"}, "exact must be True or False, got 'yes'"),
        ({"prefill_chunk": 8, "prefill_chunk_stages": (64, 32, 2, 99)}, "not both"),
        ({"prefill_chunk": 8, "batching": "static"}, "prefill_chunk cuts prompts, which batching='static'"),
        ({"prefill_chunk_stages": (64, 32, 2)}, "must be (high, low, stages, over_tokens), got (64, 32, 2)"),
        ({"prefill_chunk_stages": [64, 32, 2, 99]}, "must be (high, low, stages, over_tokens)"),
        ({"prefill_chunk_stages": (64, 32, 0, 99)}, "prefill_chunk_stages must be a positive integer, got 0"),
        ({"prefill_chunk_stages": (64, 33, 2, 99)}, "low=33 must be multiples of 32"),
        ({"prefill_chunk_stages": (32, 64, 2, 99)}, "high=32 and low=64"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        EngineConfig(**settings)


def test_the_limits_carry_the_scheduling() -> None:
    limits = sized(
        scheduling_policy="fcfs",
        batching="orca",
        victim="shortest-remaining",
        swap_space_bytes=(10 << 20) + 1,
        enable_prefix_caching=False,
        exact=True,
        overlap="on",
    )
    assert limits.scheduling == SchedulingConfig(scheduling_policy="fcfs", batching="orca", victim="shortest-remaining")
    assert (limits.num_host_blocks, limits.enable_prefix_caching, limits.exact, limits.overlap) == (
        10, False, True, "on",
    )  # fmt: skip


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


def test_available_memory_is_what_the_cgroup_leaves_and_files_that_were_read_do_not_count(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (group, tmp_path / "proc"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory_bytes(tmp_path) == 8000 << 10
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{3000 << 10}\n")
    assert available_memory_bytes(tmp_path) == 8000 << 10
    (group / "memory.max").write_text(f"{5000 << 10}\n")
    assert available_memory_bytes(tmp_path) == 2000 << 10
    (group / "memory.stat").write_text(f"anon {1}\nactive_file 9\ninactive_file {500 << 10}\n")
    assert available_memory_bytes(tmp_path) == 2500 << 10
    (group / "memory.max").write_text(f"{1000 << 10}\n")
    assert available_memory_bytes(tmp_path) == 0


def test_a_quantization_that_there_is_not_is_refused_by_name() -> None:
    assert (EngineConfig().quantization, EngineConfig(quantization="int8").quantization) == ("none", "int8")
    with pytest.raises(RequestError, match="int3") as caught:
        EngineConfig(quantization="int3")  # type: ignore[arg-type]
    assert caught.value.param == "quantization"


def test_windows_bound_what_a_sequence_needs() -> None:
    """Pages of 16: 256 of a group that sees all, at most 3 of one that sees 24 tokens."""
    limits = sized(positions=4096, cache_kinds=(FULL, Window(24), Window(24)), num_blocks=262)
    assert (limits.max_model_len, limits.cache_kinds) == (4096, (FULL, Window(24), Window(24)))
    assert sized(positions=4096, cache_kinds=(FULL, Window(24), Window(24)), num_blocks=261).max_model_len == 255 * 16
    assert sized(positions=10**9, cache_kinds=(Window(24),), num_blocks=3).max_model_len == 10**9
    kinds = (FULL, Window(24))
    most = sized(positions=4096, cache_kinds=kinds, max_num_seqs=2, available=1024 * GIB, bytes_per_block=1)
    assert most.num_blocks == 2 * (256 + 3) + 2 * 512 // 16, "two sequences, and the chunks of two steps"
    with pytest.raises(RequestError, match=r"4096 tokens needs 262 KV blocks .*, but the KV cache has 261"):
        sized(positions=4096, cache_kinds=(FULL, Window(24), Window(24)), num_blocks=261, max_model_len=4096)


def test_prompts_that_are_not_cut_need_all_their_pages() -> None:
    kinds = (FULL, Window(24))
    assert sized(positions=4096, cache_kinds=kinds, num_blocks=512, batching="orca").max_model_len == 4096
    assert sized(positions=4096, cache_kinds=kinds, num_blocks=511, batching="orca").max_model_len == 255 * 16


def test_the_command_line_names_every_weight_format() -> None:
    assert get_args(Quantization) == QUANTIZATIONS


def test_an_end_of_text_outside_of_the_vocabulary_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=64, eos_token_id=50256, max_position_embeddings=64)
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        engine = build_engine(tmp_path, device="cpu", load_format="dummy", num_blocks=8)
    assert engine.info.eos_token_ids == ()
    assert said_by_engine(caplog) == [
        f"eos_token_id [50256] of {tmp_path}: not in the vocabulary of 64 tokens, left out"
    ]
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(),
        eos_token_ids=engine.info.eos_token_ids,  # as the server and LLM give them
    )
    assert prepare(request, engine.info).eos_token_ids == ()


def test_position_tables_are_as_long_as_what_is_served(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=64, eos_token_id=1, max_position_embeddings=10**9)
    engine = build_engine(tmp_path, device="cpu", load_format="dummy", num_blocks=8)
    assert engine.info.max_model_len == 8 * engine.info.block_size


@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 64}, {"num_blocks": 64, "quantization": "int8", "max_model_len": 128},
     {"device": "emulated:sm_80", "kv_cache_bytes": 1 << 20, "dtype": "float16"}],
    ids=str,
)  # fmt: skip
def test_an_engine_is_described_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    settings = {"device": "cpu", **settings}
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "array", lambda self, name: pytest.fail(f"{name} was read"))
        described = describe_engine(None, EngineConfig(**settings))
    assert described == build_engine(**settings).info


def test_states_have_a_fifth_of_the_bytes() -> None:
    """States of 154 MB beside pages of 1 MiB."""
    sizes = 1 << 20, 154_000_000
    for num_bytes in (20 << 30, 100 << 30):
        limits = resolve(
            EngineConfig(kv_cache_bytes=num_bytes, max_model_len=32_768), max_position_embeddings=262_144,
            bytes_per_block=sizes, available_bytes=200 << 30, cache_kinds=(FULL, State()), cache_pools=(0, 1),
        )  # fmt: skip
        assert 0.15 < limits.pool_sizes[1] * sizes[1] / num_bytes <= 0.25


def test_a_prefix_cache_has_room_for_a_state() -> None:
    """Beside the two of the longest sequence. The context shrinks for it, unless its length was given."""

    def kept(num_blocks: int, **config: Any) -> tuple[int, tuple[int, ...]]:
        limits = resolve(
            EngineConfig(num_blocks=num_blocks, block_size=16, **config), max_position_embeddings=4096,
            bytes_per_block=(1000, 5000), available_bytes=GIB, cache_kinds=(FULL, State()), cache_pools=(0, 1),
        )  # fmt: skip
        return limits.max_model_len, limits.pool_sizes

    assert kept(10) == (7 * 16, (7, 3))
    assert kept(10, enable_prefix_caching=False) == (8 * 16, (8, 2))
    assert kept(10, enable_prefix_caching=False, max_model_len=8 * 16) == (8 * 16, (8, 2))
    problem = (
        "enable_prefix_caching=True keeps a state beside a request of 128 tokens, 11 KV blocks (23,000 bytes) in all, "
        "but the KV cache has 10: lower max_model_len, raise kv_cache_memory_bytes or set enable_prefix_caching=False"
    )
    with pytest.raises(RequestError, match=f"^{re.escape(problem)}$"):
        kept(10, max_model_len=8 * 16)
    with pytest.raises(RequestError, match="request of 16 tokens, 4 KV blocks"):
        kept(3)
    with pytest.raises(RequestError, match="a request of 16 tokens needs 3 KV blocks"):
        kept(2)
