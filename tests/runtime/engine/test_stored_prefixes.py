"""Prefixes on the disk change no bit of an answer: over restarts, kills, two engines on a folder, torn files, full
disks and folders of other models."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

import runtime.engine.process.thread_client as thread_client
import runtime.engine.scheduling.stored_prefixes as stored_prefixes
import runtime.kv.page_store as page_store
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.kv.kinds import State
from tests.models.drafters.assistant_cases import write_assistant_for
from tests.models.drafters.mtp_cases import write_with_prediction
from tests.models.folders import load_golden, write_model
from tests.models.vision.chat_model import write_chat_model
from tests.runtime.engine.fakes import Collected, collect, run_to_end, said_by_engine
from tests.runtime.engine.storing_engine import SETTINGS, VOCAB_SIZE, answers, make_requests
from tests.runtime.engine.test_picture_schedules import SETTINGS as PICTURE_SETTINGS
from tests.runtime.engine.test_picture_schedules import make_requests as make_picture_requests
from tests.runtime.engine.test_window_groups import MIXED
from tests.runtime.engine.test_window_groups import write_model as write_windows
from tests.waiting import wait_until

BYTES = 1 << 30
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"num_blocks": 200},
    {"num_blocks": 60, "preemption": "swap", "swap_space_bytes": 1 << 22, "max_num_batched_tokens": 13},
    {"num_blocks": 60, "overlap": "on", "preemption": "swap", "swap_space_bytes": 1 << 18},
    {"num_blocks": 60, "preemption": "recompute", "speculation": "suffix"},
)


def write_full(folder: Path) -> Path:
    """A Qwen3 of full attention, with dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_windows(folder, ("full_attention",) * 2)


@contextmanager
def engine_on(model: Path, folder: Path | None, **settings: Any) -> Iterator[Engine]:
    options = {**SETTINGS, "num_blocks": 200, "prefix_cache_disk_bytes": BYTES, **settings}
    engine = build_engine(model, prefix_cache_dir="" if folder is None else str(folder), **options)
    try:
        yield engine
    finally:
        engine.close()


def restored(engine: Engine) -> int:
    return engine.stats().prefix_cache_restored


def write_case(folder: Path, case: str) -> tuple[Path, dict[str, Any]]:
    """A model of this kind, and its options."""
    if case == "full":
        return write_full(folder), {}
    if case == "windows":
        folder.mkdir()
        return write_windows(folder, MIXED), {}
    return write_model(folder, load_golden("qwen3_5_odd")), {"load_format": "auto"}


@pytest.mark.parametrize("num_rounds", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_no_restart_changes_a_bit(case: str, num_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of several schedules, one after another, each with the prefixes of those before."""
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)  # more states than pages of tokens
    model, own = write_case(tmp_path / "model", case)
    lone = {**own, "max_num_seqs": 1, "enable_prefix_caching": False}
    found = 0
    with engine_on(model, None, **lone) as alone:
        for number in range(num_rounds):
            requests = make_requests(number // 3, 24, alone.info.vocab_size)
            known = answers(alone, requests)
            for settings in SCHEDULES:
                with engine_on(model, tmp_path / "prefixes", **{**own, **settings}) as engine:
                    assert answers(engine, requests) == known, (number, settings)
                    found += restored(engine)
    assert found > 100 * num_rounds


def test_a_prompt_is_read_back_up_to_its_last_page(tmp_path: Path) -> None:
    model = write_full(tmp_path / "model")
    prompt = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(90)]

    def ask(engine: Engine) -> tuple[int | None, Any]:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(request_id="x", prompt_token_ids=prompt, params=params))
        outputs = [output for _ in range(100) if engine.has_work for output in engine.step()]
        engine.rest()
        return outputs[0].num_cached_tokens, [output.new_token_ids for output in outputs]

    with engine_on(model, tmp_path / "prefixes") as first:
        assert (found := ask(first))[0] == 0
    with engine_on(model, tmp_path / "prefixes", num_blocks=40) as second:
        assert ask(second) == (88, found[1])
        assert restored(second) == 88
        assert ask(second) == (89, found[1])
        assert restored(second) == 88, "nothing is read twice"
    with engine_on(model, tmp_path / "prefixes", kv_cache_dtype="bfloat16") as other:
        assert ask(other)[0] == 0, "pages of another type"
    files = list((tmp_path / "prefixes").rglob("*"))
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "prefixes", *files))


def find_after_restarts(
    folder: Path, prefixes: Path, requests: list[EngineRequest], others: list[dict[str, Any]], **settings: Any
) -> int:
    """Engines of these settings, one after another, find what those before have stored, and answer as one that runs
    each request alone and uncached. Returns the tokens that the last one read back."""
    lone = {"max_num_seqs": 1, "enable_prefix_caching": False, "speculation": "off"}
    with engine_on(folder, None, **{**settings, **lone}) as alone:
        known = answers(alone, requests)
    for number, more in enumerate(others):
        with engine_on(folder, prefixes, **settings, **more) as engine:
            if engine.speculator is not None:
                engine.speculator.tries_all()
            assert answers(engine, requests) == known, (number, more)
            drafts, found = engine.stats().num_draft_tokens, restored(engine)
            assert (drafts > 0) == ("speculation" in more), more
        assert found > 0 or not number, more
    return found


@pytest.mark.parametrize("case", ["qwen3_5_odd", "deepseek_v3_odd"])
def test_drafts_of_prediction_layers(case: str, tmp_path: Path) -> None:
    """Their layers' pages come back, too, whether or not they were used."""
    folder = write_with_prediction(tmp_path / "model", case)
    requests = make_requests(5, 16, len_vocabulary(folder))
    find_after_restarts(folder, tmp_path / "prefixes", requests, [{"speculation": "mtp"}] * 3, load_format="auto")


def len_vocabulary(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def test_pictures_are_compared_by_their_digests(tmp_path: Path) -> None:
    """And an assistant's draft tokens change no bit of what follows them."""
    folder = write_chat_model(tmp_path / "model", "gemma4_causal")
    drafter = write_assistant_for(tmp_path / "drafter", folder)
    options = {**PICTURE_SETTINGS, "load_format": "auto", "num_blocks": 200, "speculation": "off"}
    with engine_on(folder, None, **options) as engine:
        requests = make_picture_requests(random.Random(3), 12, engine)
    others = [each for each in requests if each.images]
    others = [
        msgspec.structs.replace(
            each,
            images=tuple(msgspec.structs.replace(item, digest=b"other " + item.digest[6:]) for item in each.images),
        )
        for each in others
    ]
    options.pop("speculation")
    drafting = [{"speculation": f"mtp:{drafter}"}] * 2
    find_after_restarts(folder, tmp_path / "prefixes", requests, drafting, **options)
    with engine_on(folder, tmp_path / "prefixes", **options, speculation=f"mtp:{drafter}") as engine:
        starts = {each.request_id: each.images[0].first_token for each in others}
        cached = {each.request_id: cached_tokens(engine, each) for each in others}
    assert others
    assert all(cached[name] <= starts[name] for name in starts), "another picture's page"


def cached_tokens(engine: Engine, request: EngineRequest) -> int:
    """Tokens of a request's prompt that were found, and which nothing else finds after it."""
    engine.add(request)
    found = run_to_end(engine)[request.request_id].of(0)[0].num_cached_tokens
    engine.reset_prefix_cache()
    assert found is not None
    return found


GPU_CASES: dict[str, dict[str, Any]] = {
    "llama_default": {},
    "qwen3_tied_gqa4": {"kv_cache_dtype": "fp8"},
    "deepseek_v3_odd": {},
    "deepseek_v3_wide": {"kv_cache_dtype": "fp8"},
    "qwen3_5_odd": {},
}
"""Pages of floats, of fp8, latent ones of both, and states."""


@pytest.mark.exhaustive
@pytest.mark.emulator
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpus_read_back_the_bits_of_a_lone_run(case: str, device: str, tmp_path: Path) -> None:
    """In exact mode."""
    folder = write_model(tmp_path / "model", load_golden(case))
    settings = {**GPU_CASES[case], "device": device, "exact": True, "load_format": "auto"}
    requests = [each for each in make_requests(7, 8, len_vocabulary(folder)) if each.params.n == 1]
    others: list[dict[str, Any]] = [{}, {}, {"num_blocks": 60, "preemption": "swap", "swap_space_bytes": 1 << 22}]
    find_after_restarts(folder, tmp_path / "prefixes", requests, others, **settings)


def test_salts_and_other_models_find_nothing(tmp_path: Path) -> None:
    """Nor does a model into whose folder another one's files were moved."""
    model, other = write_full(tmp_path / "model"), write_full(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    requests = [each for each in make_requests(3, 20) if each.cache_salt is None]
    with engine_on(model, tmp_path / "prefixes") as engine:
        answers(engine, requests)
    (of_model,) = (each for each in (tmp_path / "prefixes").iterdir() if each.is_dir())
    with engine_on(other, None) as alone:
        expected = answers(alone, requests)
    for is_moved in (False, True):
        with engine_on(other, tmp_path / "prefixes") as engine:
            (of_other,) = {each for each in (tmp_path / "prefixes").iterdir() if each.is_dir()} - {of_model}
            assert answers(engine, requests) == expected
            assert restored(engine) == 0
        shutil.rmtree(of_other)
        if not is_moved:
            shutil.copytree(of_model, of_other)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pages"))


@pytest.mark.parametrize("num_cuts", [6, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_torn_and_changed_files_are_misses(num_cuts: int, tmp_path: Path) -> None:
    model, rng = write_full(tmp_path / "model"), random.Random(0)
    requests = make_requests(1, 12)
    with engine_on(model, None) as alone:
        expected = answers(alone, requests)
    with engine_on(model, tmp_path / "whole") as engine:
        answers(engine, requests)
    for number in range(num_cuts):
        folder = tmp_path / f"torn {number}"
        shutil.copytree(tmp_path / "whole", folder)
        for file in files_of(folder):
            data = bytearray(file.read_bytes())
            place = rng.choice((rng.randrange(200), rng.randrange(len(data))))
            match number % 3:
                case 0:
                    del data[place:]
                case 1:
                    data[place] ^= 1 << rng.randrange(8)
                case _:
                    data[place:] = bytes(len(data) - place)  # what a system may leave that lost its power
            file.write_bytes(bytes(data))
        with engine_on(model, folder) as engine:
            assert answers(engine, requests) == expected, number
        shutil.rmtree(folder)


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_while_it_writes(num_kills: int, tmp_path: Path) -> None:
    """At any moment, with a folder so small that files are deleted and written all the time."""
    model, rng, folder = write_full(tmp_path / "model"), random.Random(num_kills), tmp_path / "prefixes"
    sets = [make_requests(seed, 10) for seed in range(4)]
    with engine_on(model, None) as alone:
        expected = [answers(alone, requests) for requests in sets]
    found = 0
    for number in range(num_kills):
        command = [sys.executable, "-m", "tests.runtime.engine.storing_engine", str(model), str(folder), "600000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            if not number:
                wait_until(lambda: bool(files_of(folder)))  # on a busy machine no kill would come after a file
            time.sleep(rng.random() ** 2 * 3)
            child.kill()
        with engine_on(model, folder, num_blocks=60, prefix_cache_disk_bytes=600_000) as engine:
            for requests, known in zip(sets, expected):
                assert answers(engine, requests) == known, number
            found += restored(engine)
    assert found > 0


def test_two_engines_on_one_folder(tmp_path: Path) -> None:
    """Each deletes what the other has written, and reads it."""
    model, folder = write_full(tmp_path / "model"), tmp_path / "prefixes"
    sets = [make_requests(seed, 10) for seed in range(3)]
    with engine_on(model, None) as alone:
        expected = [answers(alone, requests) for requests in sets]
    failures: list[str] = []
    counts: list[int] = []

    def serve(first: int) -> None:
        with engine_on(model, folder, num_blocks=60, prefix_cache_disk_bytes=700_000) as engine:
            for number in range(9):
                place = (first + number) % 3
                if answers(engine, sets[place]) != expected[place]:
                    failures.append(f"engine {first}, round {number}")
                engine.reset_prefix_cache()
            counts.append(restored(engine))

    threads = [threading.Thread(target=serve, args=[first]) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(counts) == 2
    assert sum(counts) > 0
    assert sum(file.stat().st_size for file in files_of(folder)) <= 2 * 700_000


def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished files go, and it is tried again later."""
    model, folder = write_full(tmp_path / "model"), tmp_path / "prefixes"
    requests = make_requests(2, 12)
    with engine_on(model, None) as alone:
        expected = answers(alone, requests)
    room = [5000]

    def write(descriptor: int, data: Any) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = plain(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    plain = os.write
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(page_store, "_REST_S", 0.0)
    with engine_on(model, folder) as engine:
        assert answers(engine, requests) == expected
    assert not [file for file in folder.rglob("*") if file.name.endswith((".pages", ".tmp"))]
    room[0] = BYTES
    with engine_on(model, folder) as engine:
        assert answers(engine, requests) == expected
    assert files_of(folder)


def test_what_waits_for_a_disk_that_takes_nothing_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store.DiskPages, "has_room", False)
    with engine_on(write_full(tmp_path / "model"), tmp_path / "prefixes", num_blocks=24) as engine:
        assert engine.scheduler.stored is not None
        for seed in range(6):
            answers(engine, make_requests(seed, 10))
            assert len(engine.scheduler.stored._waiting) <= 2 * engine.pool.num_blocks, seed
        monkeypatch.setattr(page_store.DiskPages, "has_room", True)
    assert files_of(tmp_path / "prefixes")


def test_an_idle_engine_writes_more_than_the_queue_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((page_store, "MOST_QUEUED_BYTES"), (stored_prefixes, "_STEP_BYTES")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(stored_prefixes, "_FILE_BYTES", 1)
    monkeypatch.setattr(thread_client, "REST_S", 0.001)
    with engine_on(write_full(tmp_path / "model"), tmp_path / "prefixes") as engine:
        with closing(thread_client.ThreadEngineClient(engine)) as client:
            params = SamplingParams(max_tokens=1)
            outputs: list[Any] = []
            client.submit(EngineRequest(request_id="x", prompt_token_ids=[*range(90)], params=params), outputs.append)
            wait_until(lambda: bool(outputs) and not engine.wants_rest)
        assert engine.scheduler.stored is not None
        assert engine.scheduler.stored.num_written == 11


def test_a_shutdown_writes_what_is_left_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than the queue holds; and it says what a disk that is too slow did not take."""
    model = write_full(tmp_path / "model")
    monkeypatch.setattr(page_store, "MOST_QUEUED_BYTES", 1)
    for name in ("_STEP_BYTES", "_FILE_BYTES"):
        monkeypatch.setattr(stored_prefixes, name, 1)

    def serve(folder: str) -> None:
        with engine_on(model, tmp_path / folder) as engine:
            params = SamplingParams(max_tokens=1)
            engine.add(EngineRequest(request_id="x", prompt_token_ids=[*range(90)], params=params))
            run_to_end(engine)

    serve("whole")
    assert len(files_of(tmp_path / "whole")) == 11
    assert not said_by_engine(caplog)
    monkeypatch.setattr(page_store.DiskPages, "has_room", False)
    monkeypatch.setattr(stored_prefixes, "_CLOSE_S", 0.05)
    serve("slow")
    assert not files_of(tmp_path / "slow")
    assert said_by_engine(caplog) == ["0 MB of prefixes were not stored in the 0.05 s of a shutdown"]


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_others_go_on_while_a_prefix_is_read_back(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page a step, and the prompt is hashed once; a sequence that ends meanwhile leaves no block behind."""
    model, own = write_case(tmp_path / "model", case)
    prompt = [random.Random(1).randrange(50) for _ in range(80)]

    def request(name: str, ids: list[int], count: int) -> EngineRequest:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        return EngineRequest(request_id=name, prompt_token_ids=ids, params=params)

    long, other = request("long", prompt, 4), request("other", [7, 5, 3], 60)
    with engine_on(model, None, **own) as alone:
        for each in (long, other):
            alone.add(each)
        known = run_to_end(alone)
    with engine_on(model, tmp_path / "prefixes", **own) as engine:
        engine.add(long)
        run_to_end(engine)
    monkeypatch.setattr(stored_prefixes, "_READ_BYTES", 1)
    with engine_on(model, tmp_path / "prefixes", **own) as engine:
        stored = engine.scheduler.stored
        assert stored is not None
        hashed = Mock(side_effect=stored._names)
        monkeypatch.setattr(stored, "_names", hashed)
        found: dict[str, Collected] = {}
        engine.add(other)
        collect(engine.step(), found)
        hashed.reset_mock()
        for ends in ("cancelled", "paused", "answered"):
            engine.add(long)
            steps = 0
            while not engine.scheduler.running[1:] and engine.scheduler.waiting:
                before = found["other"].token_ids()
                collect(engine.step(), found)
                assert len(found["other"].token_ids()) == len(before) + 1
                engine.check_invariants()
                steps += 1
                if ends != "answered" and steps == 3:
                    assert stored.held_blocks
                    if ends == "paused":
                        engine.pause("long")
                        collect(engine.step(), found)
                        assert not stored.held_blocks
                    engine.cancel("long")
            assert not stored.held_blocks
        assert steps > 5
        assert hashed.call_count == 3
        run_to_end(engine, found)
        assert found["long"].token_ids() == known["long"].token_ids()
        assert restored(engine) > 60


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_an_idle_engine_reads_back_what_was_used_last(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had not been restarted: a chat's next turn, and one that leaves an earlier prompt, wait for no file.
    Half of each pool stays empty; what has a salt is read when it is asked for."""
    monkeypatch.setattr(State, "most_pages", lambda *_: 40)
    monkeypatch.setattr(stored_prefixes, "_READ_BYTES", 1)
    monkeypatch.setattr(stored_prefixes, "_WARM_S", 0.0001)
    model, own = write_case(tmp_path / "model", case)
    prompt = [random.Random(1).randrange(50) for _ in range(60)]
    turns = [prompt, [*prompt, *[9, 4, 7] * 4], [*prompt[:41], 3, 3, 8, 1, 5]]

    def request(name: str, ids: list[int], salt: str | None = None) -> EngineRequest:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
        return EngineRequest(request_id=name, prompt_token_ids=ids, params=params, cache_salt=salt)

    asked = [request(str(number), ids) for number, ids in enumerate(turns)]
    salted = request("salted", [*range(1, 40)], "a tenant's")
    with engine_on(model, None, **{**own, "enable_prefix_caching": False, "max_num_seqs": 1}) as alone:
        known = answers(alone, [*asked, salted])

    def warm(engine: Engine) -> int:
        """How often an idle engine looked for requests meanwhile."""
        for looks in range(10_000):
            if not engine.wants_rest:
                return looks
            engine.rest_long()
            engine.check_invariants()
        raise AssertionError("it reads for ever")

    with engine_on(model, tmp_path / "prefixes", **own) as engine:
        for each in (salted, *asked):
            answers(engine, [each])
    with engine_on(model, tmp_path / "prefixes", **own) as engine:
        assert warm(engine) > 3
        stored = engine.scheduler.stored
        assert stored is not None
        assert not stored.held_blocks
        assert (found := restored(engine)) > 60
        for each in asked:
            assert answers(engine, [each]).items() <= known.items()
        if case != "windows":  # there a prompt that ends before what was stored needs pages that had left the window
            assert restored(engine) == found, "all was there"
        found = restored(engine)
        assert answers(engine, [salted]).items() <= known.items()
        assert restored(engine) > found
    with engine_on(model, tmp_path / "prefixes", **own, num_blocks=60) as engine:
        warm(engine)
        assert engine.pool.num_cached > 0
        assert min(engine.pool.empty_counts) >= 0
    with engine_on(model, tmp_path / "prefixes", **own) as engine:  # asked in the midst of it
        stored = engine.scheduler.stored
        assert stored is not None
        while engine.wants_rest and not stored.held_blocks:
            engine.rest_long()
        assert stored.held_blocks
        engine.reset_prefix_cache()
        assert not stored.num_waiting
        assert not stored.wants_to_warm
        assert not stored.held_blocks
        assert engine.pool.num_cached == 0
        stored.settle()  # as for new weights
        while engine.wants_rest and not stored.held_blocks:
            engine.rest_long()
        assert stored.held_blocks
        stored.settle()
        assert not stored.held_blocks
        assert answers(engine, asked) == {key: value for key, value in known.items() if key[0] != "salted"}
    for file in (tmp_path / "prefixes").rglob("*.pages"):
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last[0] ^ 1]))
    with engine_on(model, tmp_path / "prefixes", **own) as engine:
        warm(engine)
        assert answers(engine, [*asked, salted]) == known, "torn files"


def test_a_prefix_that_is_read_back_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a running sequence that needs a block."""
    model, prompt = write_full(tmp_path / "model"), [*range(88)]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    long, other = (
        EngineRequest(request_id=name, prompt_token_ids=ids, params=msgspec.structs.replace(params, max_tokens=count))
        for name, ids, count in (("long", prompt, 8), ("other", [*range(9, 16)], 40))
    )
    with engine_on(model, tmp_path / "prefixes") as engine:
        engine.add(long)
        run_to_end(engine)
    monkeypatch.setattr(stored_prefixes, "_READ_BYTES", 1)
    with engine_on(model, tmp_path / "prefixes", num_blocks=12) as engine:
        stored = engine.scheduler.stored
        assert stored is not None
        given_way = 0

        def drop(*args: Any) -> bool:
            nonlocal given_way
            is_dropped = plain(*args)
            given_way += is_dropped
            return is_dropped

        plain = stored.drop
        monkeypatch.setattr(stored, "drop", drop)
        engine.add(other)
        engine.step()
        engine.add(long)
        results = run_to_end(engine)
        assert given_way > 0
        engine.check_invariants()
    assert sorted(len(each.token_ids()) for each in results.values()) == [8, 39]


def test_what_an_idle_engine_reads_back_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a prompt that needs all blocks, and reads none back itself."""
    model = write_full(tmp_path / "model")
    short, whole = (
        EngineRequest(request_id=name, prompt_token_ids=[*range(count)], params=SamplingParams(max_tokens=2, **params))
        for name, count, params in (("short", 40, {}), ("whole", 88, {"prompt_logprobs": 1}))
    )
    with engine_on(model, tmp_path / "prefixes") as engine:
        answers(engine, [short])
    monkeypatch.setattr(stored_prefixes, "_READ_BYTES", 1)
    monkeypatch.setattr(stored_prefixes, "_WARM_S", 0.0001)
    with engine_on(model, tmp_path / "prefixes", num_blocks=12) as engine:
        stored = engine.scheduler.stored
        assert stored is not None
        while engine.wants_rest and not stored.held_blocks:
            engine.rest_long()
        assert stored.held_blocks
        engine.add(whole)
        engine.step()
        assert engine.stats().num_running == 1
        engine.check_invariants()


def test_what_is_remembered_of_files_is_bounded(tmp_path: Path) -> None:
    """Unusable files are forgotten once they are gone, and digests of files that are."""
    model, folder = write_full(tmp_path / "model"), tmp_path / "prefixes"
    with engine_on(model, folder):
        pass
    (of_model,) = (each for each in folder.iterdir() if each.is_dir())
    notes = folder / "digests.json"
    known = json.loads(notes.read_text())
    (tmp_path / "other").write_text("")
    others = {f"{tmp_path / name} 0 1 2 3": "digest" for name in ("gone", "other", "model/config.json")}
    notes.write_text(json.dumps(others))
    store = page_store.DiskPages(folder, of_model.name, BYTES, [[8]])
    for number in range(3):
        (of_model / f"{number}.pages").write_bytes(b"no pages")
        store._seen_ns = -1
        store.refresh()
        assert store._unusable == {f"{number}.pages"}
        (of_model / f"{number}.pages").unlink()
    assert store.close(5.0) == 0
    with engine_on(model, folder):
        pass
    assert json.loads(notes.read_text()) == {**known, f"{tmp_path / 'other'} 0 1 2 3": "digest"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"enable_prefix_caching": False}, "prefix_cache_dir is 'x', which needs enable_prefix_caching"),
        ({"tensor_parallel_size": 2}, "pages of 2 ranks are not stored; leave out tensor_parallel_size or the folder"),
        ({"prefix_cache_disk_bytes": 0}, "prefix_cache_disk_bytes must be"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        EngineConfig(prefix_cache_dir="x", **options)


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    model = write_full(tmp_path / "model")
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(RequestError, match=r"has mode 755 .* .chmod 700"), engine_on(model, folder):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file cannot be used"), engine_on(model, tmp_path / "file"):
        pass
