"""A request that another engine continues gets the answer of one engine, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.admission import record_of
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import Begun, EngineOutput, EngineRequest, Source
from runtime.engine.sampling_params import SamplingParams
from runtime.kv.kinds import State
from tests.models.adapter_cases import load_adapter_golden
from tests.models.drafters.assistant_cases import write_assistant_for
from tests.models.drafters.mtp_cases import write_with_prediction
from tests.models.folders import load_golden, write_model
from tests.models.vision.chat_model import write_chat_model
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_adapters import CASE, loaded, write_scaled
from tests.runtime.engine.test_picture_schedules import SETTINGS as PICTURE_SETTINGS
from tests.runtime.engine.test_picture_schedules import make_requests as make_picture_requests
from tests.runtime.engine.test_stored_prefixes import GPU_CASES, len_vocabulary, write_case
from tests.runtime.engine.transfer.handing import (
    address_of,
    answered_alone,
    continued,
    handed_over,
    joined_engine,
    leased,
    run,
    said,
)
from tests.waiting import wait_until


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_the_answer_is_that_of_one_engine(
    case: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    requests = make_requests(1, 40, len_vocabulary(model))
    known = answered_alone(model, requests, **settings)
    with (
        joined_engine(model, scheme, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, scheme, **settings) as second,
    ):
        assert said(handed_over(first, second, requests, scheme), requests) == known
        assert first.hand_overs is not None
        assert second.hand_overs is not None
        counters = first.hand_overs.counters, second.hand_overs.counters
        assert counters[0].dropped == counters[1].lost == 0
        assert counters[1].arrived > 10
        stored = second.scheduler.stored
        assert stored is not None
        assert stored.num_restored > 100
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.hand_overs.arrivals.num_open == 0


@pytest.mark.parametrize("case", ["full", "windows", "states"])
@pytest.mark.parametrize(("length", "is_relayed"), [(5, False), (16, False), (61, False), (64, False), (61, True)])
def test_nothing_of_the_prompt_is_computed_again(
    case: str, length: int, is_relayed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    asked = EngineRequest(
        request_id="x",
        prompt_token_ids=[(7 * i) % 53 for i in range(length)],
        params=SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
    )
    with (
        joined_engine(model, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, **settings) as second,
    ):
        outputs = handed_over(first, second, [asked], "unix", every=1 if is_relayed else 2)["x"]
        counts = [len(each.new_token_ids) for each in outputs]
        num_here = counts.index(0) if is_relayed else 1
        assert counts == [1] * num_here + [0] * is_relayed + [1] * (9 - num_here)
        assert num_here >= 2 or not is_relayed
        stored = second.scheduler.stored
        assert stored is not None
        num_pages = length + num_here - 1 if case != "states" else length  # a state after the prompt alone is kept
        assert stored.num_restored == num_pages
        assert second.stats().iteration_tokens == length + 9 - 1 - num_pages


def reserve(engine: Engine, request: EngineRequest, address: str) -> None:
    """As a fleet does when a prompt is begun elsewhere."""
    assert engine.hand_overs is not None
    source = Source(address, request.lease)
    engine.hand_overs.arrivals.expect(source)
    begun = msgspec.structs.replace(request, lease="", source=source, begun=[Begun([0])])
    engine.hand_overs.reserve(record_of(begun, engine.info))


def take_in(engine: Engine, request: EngineRequest) -> None:
    """Until all pages have come, and those that fit are read."""
    assert engine.hand_overs is not None
    arrivals = engine.hand_overs.arrivals
    wait_until(lambda: arrivals.result(request.lease)[0])
    while engine.has_work:
        engine.step()
        engine.check_invariants()


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_blocks_are_reserved_before_the_request_comes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 80}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = [
        leased(EngineRequest(request_id=f"{step}", prompt_token_ids=[(step * i + step) % 53 for i in range(61)],
                             params=params), "unix")
        for step in (5, 7)
    ]  # fmt: skip
    other = EngineRequest(request_id="other", prompt_token_ids=[(9 * i) % 53 for i in range(90)], params=params)
    known = answered_alone(model, [*(msgspec.structs.replace(each, lease="") for each in asked), other], **settings)
    with (
        joined_engine(model, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, **settings) as second,
    ):
        address, pool = address_of(first, "unix"), second.pool
        for each in asked:
            first.add(each)
        begun = {each.request_id: list[EngineOutput]() for each in asked}
        num_told = 0
        while first.has_work:
            for output in first.step():
                if output.new_token_ids:
                    begun[output.request_id].append(output)
                else:
                    reserve(second, next(each for each in asked if each.request_id == output.request_id), address)
                    num_told += 1
        assert num_told == 2
        for each in asked:
            take_in(second, each)
        num_held = pool.num_blocks - pool.num_free
        assert num_held > 0
        assert second.stats().prefix_cache_restored == 2 * 61
        rest = continued(asked[0], begun[asked[0].request_id], address)
        found = {asked[0].request_id: [*begun[asked[0].request_id], *run(second, [rest])[asked[0].request_id]]}
        assert said(found, asked[:1]) == {("5", 0): known["5", 0]}
        assert second.stats().iteration_tokens == 8  # nothing of the prompt
        assert 0 < pool.num_blocks - pool.num_free < num_held
        assert second.hand_overs is not None
        assert second.hand_overs.reserved.held_blocks
        assert said(run(second, [other]), [other]) == {("other", 0): known["other", 0]}
        second.hand_overs.drop(asked[1].lease)
        second.hand_overs.reserved.drop(asked[1].lease)
        assert pool.num_free == pool.num_blocks
        assert second.stats().num_open_transfers == 0


def test_reserved_blocks_go_to_those_that_run(tmp_path: Path) -> None:
    """A pool that a prompt fills, and a request that needs all of it."""
    model, own = write_case(tmp_path / "model", "full")
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 20, "max_model_len": 160}
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    size = 20 * 8 - 40
    asked, other = (
        EngineRequest(request_id=f"{step}", prompt_token_ids=[(step * i) % 53 for i in range(count)], params=params)
        for step, count in ((5, size), (7, size - 8))
    )
    # The other one is refused while this one runs, and has to be tried again.
    small = EngineRequest(
        request_id="small",
        prompt_token_ids=[(3 * i + 1) % 53 for i in range(20)],
        params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    )
    known = answered_alone(model, [asked, other, small], **settings)
    asked = leased(asked, "unix")
    with joined_engine(model, **settings) as first, joined_engine(model, **settings) as second:
        address = address_of(first, "unix")
        begun = run(first, [asked])[asked.request_id]
        reserve(second, asked, address)
        take_in(second, asked)
        assert second.pool.num_free < second.pool.num_blocks // 2
        found = said(run(second, [small, other]), [small, other])
        assert found == {("small", 0): known["small", 0], ("7", 0): known["7", 0]}
        assert second.pool.num_free == second.pool.num_blocks
        outputs = {"5": [*begun, *run(second, [continued(asked, begun, address)])["5"]]}
        assert said(outputs, [asked]) == {("5", 0): known["5", 0]}
        assert second.stats().num_open_transfers == 0


def hands_over_as_alone(model: Path, requests: list[EngineRequest], scheme: str = "unix", **settings: Any) -> None:
    """Requests are handed over and answered as by an engine that runs each alone, and nothing stays."""
    known = answered_alone(model, requests, **{**settings, "speculation": "off", "prefix_cache_dir": ""})
    with joined_engine(model, scheme, **settings) as first, joined_engine(model, scheme, **settings) as second:
        for engine in (first, second):
            if engine.speculator is not None:
                engine.speculator.tries_all()
        assert said(handed_over(first, second, requests, scheme), requests) == known
        stats = second.stats()
        assert stats.num_arrived > len(requests) // 2
        assert stats.num_lost_transfers == 0
        assert stats.prefix_cache_restored > 0
        assert (stats.num_draft_tokens > 0) == (settings.get("speculation", "off") != "off")
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            wait_until(lambda engine=engine: engine.stats().num_open_transfers == 0)


@pytest.mark.parametrize(
    ("case", "speculation"),
    [
        ("qwen3_5_odd", "mtp"),
        ("deepseek_v3_odd", "mtp"),
        pytest.param("qwen3_5_odd", "suffix", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3_odd", "ngram", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_change_nothing(case: str, speculation: str, tmp_path: Path) -> None:
    """Of layers that predict, whose pages are handed over, too; of hybrids and latent attention."""
    folder = write_with_prediction(tmp_path / "model", case)
    settings = {**SETTINGS, "num_blocks": 200, "load_format": "auto", "speculation": speculation}
    hands_over_as_alone(folder, make_requests(5, 16, len_vocabulary(folder)), **settings)


def test_pictures_and_an_assistant(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model", "gemma4_causal")
    drafter = write_assistant_for(tmp_path / "drafter", folder)
    settings = {**PICTURE_SETTINGS, "load_format": "auto", "num_blocks": 200, "speculation": f"mtp:{drafter}"}
    engine = build_engine(folder, **settings)
    requests = make_picture_requests(random.Random(3), 12, engine)
    engine.close()
    assert any(each.images for each in requests)
    hands_over_as_alone(folder, requests, **settings)


@pytest.mark.exhaustive
@pytest.mark.emulator
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpus_hand_over_the_bits_of_a_lone_run(case: str, device: str, tmp_path: Path) -> None:
    """In exact mode."""
    folder = write_model(tmp_path / "model", load_golden(case))
    settings = {
        **SETTINGS,
        **GPU_CASES[case],
        "device": device,
        "exact": True,
        "load_format": "auto",
        "num_blocks": 200,
    }
    requests = [each for each in make_requests(7, 8, len_vocabulary(folder)) if each.params.n == 1]
    hands_over_as_alone(folder, requests, **settings)


def test_adapters(tmp_path: Path) -> None:
    """Each engine reads them; pages are those of an adapter."""
    folder = write_model(tmp_path / "model", load_adapter_golden(CASE).golden)
    for name, factor in (("a", 1.0), ("b", -0.5)):
        write_scaled(tmp_path / name, factor)
    settings: dict[str, Any] = {
        **SETTINGS, "load_format": "auto", "num_blocks": 200, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
    }  # fmt: skip
    engine = build_engine(folder, **settings)
    refs = [None, *(loaded(engine, tmp_path / name) for name in ("a", "b"))]
    engine.close()
    requests = [
        msgspec.structs.replace(each, adapter=refs[number % 3])
        for number, each in enumerate(make_requests(5, 18, len_vocabulary(folder)))
    ]
    hands_over_as_alone(folder, requests, **settings)


def test_an_engine_with_a_prefix_folder(tmp_path: Path) -> None:
    """Pages come from both; what was handed over is stored, too."""
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200, "prefix_cache_dir": str(tmp_path / "prefixes")}
    requests = make_requests(1, 20)
    for _ in range(2):
        hands_over_as_alone(model, requests, **settings)
    assert list((tmp_path / "prefixes").rglob("*.pages"))


def test_lost_pages_are_computed(tmp_path: Path) -> None:
    """The sender is gone, too little room was given, or the address leads nowhere."""
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200}
    requests = make_requests(1, 12)
    alone = build_engine(model, **settings)
    known = said(run(alone, requests), requests)
    alone.close()
    with joined_engine(model, **settings) as first:
        asked = [leased(each, "unix") for each in requests]
        begun = run(first, asked)
        address = address_of(first, "unix")
    for where in (address, "unix:nobody", "carrier:pigeon"):
        with joined_engine(model, **settings) as second:
            rest = [continued(each, begun[each.request_id], where) for each in asked]
            rest = [each for each in rest if not all(choice.has_ended for choice in each.begun)]
            ended = run(second, rest)
            found = {each.request_id: [*begun[each.request_id], *ended.get(each.request_id, [])] for each in asked}
            assert said(found, requests) == known
            assert second.stats().num_lost_transfers == len(rest)
            assert second.stats().num_open_transfers == 0


def test_nothing_is_announced_before_it_is_offered(tmp_path: Path) -> None:
    """The first chunk of the prompt fills no page."""
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200, "max_num_seqs": 1, "max_num_batched_tokens": 1}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = EngineRequest(request_id="x", prompt_token_ids=[(7 * i) % 53 for i in range(40)], params=params)
    with joined_engine(model, **settings) as engine:
        engine.add(leased(asked, "unix"))
        num_announced = 0
        while engine.has_work:
            for output in engine.step():
                if not (output.is_last or output.new_token_ids):
                    num_announced += 1
                    assert engine.stats().num_open_transfers == 1
        assert num_announced == 1


def test_pages_of_other_tokens_are_not_used(tmp_path: Path) -> None:
    """A lease that holds another prompt's pages helps nothing, and harms nothing."""
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    right, wrong = (
        EngineRequest(request_id=name, prompt_token_ids=[(step * i) % 53 for i in range(70)], params=params)
        for name, step in (("right", 7), ("wrong", 5))
    )
    with joined_engine(model, **settings) as first, joined_engine(model, **settings) as second:
        known = said(run(first, [right]), [right])
        asked = leased(wrong, "unix")
        run(first, [asked])
        source = Source(address_of(first, "unix"), asked.lease)
        assert said(run(second, [msgspec.structs.replace(right, source=source)]), [right]) == known
        assert second.stats().prefix_cache_restored == 0
        assert second.stats().num_open_transfers == 0


def test_pages_that_follow_a_choice_can_be_asked_for(tmp_path: Path) -> None:
    """Two that could be relayed are not alone: each leaves with its first token, before its pages."""
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with joined_engine(model, **settings) as first:
        assert first.hand_overs is not None
        first.hand_overs.may_wait = True
        for number in (5, 7):
            ids = [(number * i) % 53 for i in range(40)]
            asked = EngineRequest(request_id=f"{number}", prompt_token_ids=ids, params=params)
            first.add(leased(asked, "unix", may_relay=True))
        outputs = first.step()
        assert outputs[0].is_handed_over
        assert first.stats().num_open_transfers > 0
        assert first.stats().transfer_sent_bytes == 0


def test_cancelled_and_paused_requests_leave_no_page(tmp_path: Path) -> None:
    model, own = write_case(tmp_path / "model", "full")
    settings = {**SETTINGS, **own, "num_blocks": 200, "max_num_batched_tokens": 16}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = EngineRequest(request_id="x", prompt_token_ids=[(7 * i) % 53 for i in range(70)], params=params)
    with joined_engine(model, **settings) as first, joined_engine(model, **settings) as second:
        offering = leased(asked, "unix")
        first.add(offering)
        for _ in range(3):
            first.step()
        assert first.stats().num_open_transfers == 1
        first.cancel("x")
        assert first.stats().num_open_transfers == 0
        begun = run(first, [offering])["x"]
        rest = continued(offering, begun, address_of(first, "unix"))
        second.add(rest)
        second.pause("x")
        for _ in range(20):
            second.step()
        assert second.pool.num_free == second.pool.num_blocks
        second.cancel("x")
        wait_until(lambda: second.stats().num_open_transfers == 0)  # a pull's thread ends
        second.add(msgspec.structs.replace(rest, source=Source(address_of(first, "unix"), "unix:gone")))
        second.pause("x")
        for _ in range(20):
            second.step()
        second.resume("x")
        outputs = [output for _ in range(50) if second.has_work for output in second.step()]
        assert sum(len(each.new_token_ids) for each in outputs) == 8
