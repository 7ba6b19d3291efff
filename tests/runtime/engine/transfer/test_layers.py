"""The first layers' pages and states of a step go while its later layers are not computed yet; the bits stay those of
one engine, and a step that fails or an engine that ends between two layers leaves nothing that could be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from numba_kernels.cpu.running import pool
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.transfer.transport import Pages
from runtime.kv.kinds import State
from runtime.kv.layer_copies import LayerCopies
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_stored_prefixes import GPU_CASES, len_vocabulary, write_case
from tests.runtime.engine.test_window_groups import write_model as write_windows
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

PATTERN = ("sliding_attention", "full_attention") * 2
"""Two groups of two layers."""
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A part of each layer, and a processor that copies."""
    monkeypatch.setattr("runtime.kv.layer_copies.PART_BYTES", 1)
    monkeypatch.setattr("runtime.kv.layer_copies.has_free_core", lambda: True)
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    pool.limit_threads(1)
    yield
    pool.limit_threads(pool.NUM_THREADS)


def write(folder: Path, case: str) -> tuple[Path, dict[str, Any]]:
    if case != "windows":
        return write_case(folder, case)
    folder.mkdir()
    return write_windows(folder, PATTERN), {}


def offers_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Pages]:
    """The pages that an engine offers from now on."""
    assert engine.hand_overs is not None
    (transport,) = engine.hand_overs.transports.values()
    found: list[Pages] = []
    before = transport.offer

    def offer(lease: str, pages: Pages | None) -> bool:
        if pages is not None and pages.names:
            found.append(pages)
        return before(lease, pages)

    monkeypatch.setattr(transport, "offer", offer)
    return found


def at_last_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Has ``work`` called each time before the last layer begins, once the copies know of those before it."""
    last, before = max(engine.executor.kv_cache.spec.layers_with_pages), LayerCopies.passed  # type: ignore[attr-defined]

    def passed(self: LayerCopies, layer: int) -> None:
        before(self, layer)
        if layer == last:
            work()

    monkeypatch.setattr(LayerCopies, "passed", passed)


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_bits_are_those_of_one_engine(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = write(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    requests = make_requests(1, 40, len_vocabulary(model))
    known = answered_alone(model, requests, **settings)
    with (
        joined_engine(model, **settings, max_num_batched_tokens=40) as first,
        joined_engine(model, **settings) as second,
    ):
        offers = offers_of(first, monkeypatch)
        assert said(handed_over(first, second, requests, "unix"), requests) == known
        assert len({(each.pool, each.first_plane) for each in offers}) > len({each.pool for each in offers})
        assert first.hand_overs is not None
        assert second.hand_overs is not None
        assert first.hand_overs.counters.dropped == second.hand_overs.counters.lost == 0
        assert second.hand_overs.counters.arrived > 10
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.stats().num_open_transfers == 0


@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_first_layers_have_gone_before_the_last_begins(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = write(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    asked = EngineRequest(request_id="x", prompt_token_ids=[(7 * i) % 53 for i in range(61)], params=PARAMS)
    with joined_engine(model, **settings) as first, joined_engine(model, **settings) as second:
        offers = offers_of(first, monkeypatch)
        seen: list[int] = []

        def look() -> None:
            wait_until(lambda: bool(offers))
            seen.append(len(offers))

        at_last_layer(first, monkeypatch, look)
        outputs = handed_over(first, second, [asked], "unix")["x"]
        assert [len(each.new_token_ids) for each in outputs] == [1] * 9
        assert seen
        assert seen[0] < len(offers)  # the last planes go when the step is over
        stored = second.scheduler.stored
        assert stored is not None
        assert stored.num_restored == 61
        assert second.stats().iteration_tokens == 8


@pytest.mark.parametrize("ends", ["step", "engine"])
def test_what_ends_between_two_layers_hands_nothing_over(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = write(tmp_path / "model", "windows")
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    asked = leased(
        EngineRequest(request_id="x", prompt_token_ids=[(7 * i) % 53 for i in range(61)], params=PARAMS), "unix"
    )
    known = answered_alone(model, [msgspec.structs.replace(asked, lease="")], **settings)
    with joined_engine(model, **settings) as first, joined_engine(model, **settings) as second:
        assert first.hand_overs is not None
        assert second.hand_overs is not None
        arrivals, rest = second.hand_overs.arrivals, continued(asked, [], address_of(first, "unix"))
        assert rest.source is not None
        source = rest.source

        def end() -> None:
            arrivals.expect(source)
            wait_until(lambda: bool(arrivals._arrivals[asked.lease].parts))
            if ends == "step":
                raise RuntimeError("the model fails")
            for transport in first.hand_overs.transports.values():  # type: ignore[union-attr]
                transport.close()

        at_last_layer(first, monkeypatch, end)
        outputs = run(first, [asked])["x"]
        assert (outputs[-1].finish_reason == "error") == (ends == "step")
        assert outputs[-1].is_handed_over == (ends == "engine")
        wait_until(lambda: arrivals.result(asked.lease)[0])
        assert arrivals.is_empty  # the planes that have come are no pages
        begun = msgspec.structs.replace(rest, begun=[])
        assert said(run(second, [begun]), [begun]) == known
        assert second.stats().prefix_cache_restored == 0
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.stats().num_open_transfers == 0


@pytest.mark.exhaustive
@pytest.mark.emulator
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpus_hand_over_layer_by_layer(case: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode; no graph is recorded, so that all steps tell of their layers."""
    folder = write_model(tmp_path / "model", load_golden(case))
    settings = {
        **SETTINGS,
        **GPU_CASES[case],
        "device": device,
        "exact": True,
        "load_format": "auto",
        "num_blocks": 200,
        "decode_graphs": "off",
    }
    requests = [each for each in make_requests(7, 8, len_vocabulary(folder)) if each.params.n == 1]
    known = answered_alone(folder, requests, **settings)
    with joined_engine(folder, **settings) as first, joined_engine(folder, **settings) as second:
        offers = offers_of(first, monkeypatch)
        seen: list[int] = []
        at_last_layer(first, monkeypatch, lambda: seen.append(wait_until(lambda: bool(offers)) or len(offers)))
        assert said(handed_over(first, second, requests, "unix"), requests) == known
        assert seen
        assert any(each.first_plane for each in offers)
        assert second.stats().num_lost_transfers == 0
