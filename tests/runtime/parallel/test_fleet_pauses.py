"""Engines with roles pause, sleep and take new weights as one: no answer has tokens of two versions, whatever dies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.given_weights import shared_path, shared_weights
from runtime.engine.errors import EngineDeadError
from runtime.engine.process.child import Supervision
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.weights.commands import (
    EngineCondition,
    FolderWeights,
    PauseAll,
    PauseMode,
    ResumeAll,
    SharedWeights,
    Sleep,
    TellState,
    UpdateMode,
    WakeUp,
)
from runtime.parallel.fleet import Fleet
from runtime.parallel.handing_fleet import HandingFleet
from runtime.parallel.roles import AutoRoles
from tests.runtime.engine.weights.test_kinds import tensors_of
from tests.runtime.engine.weights.two_models import (
    CASE,
    USUAL,
    Answer,
    Asked,
    answers,
    folders,
    prompt_of,
    told,
)
from tests.runtime.parallel.test_handing_fleet import ChangingFleet
from tests.waiting import wait_until

__all__ = ["answers", "folders"]

IDS = prompt_of(CASE)
SUPERVISION = Supervision(first_delay_s=0.05, most_delay_s=0.2, healthy_s=0.0, hang_timeout_s=60.0)


@pytest.fixture(scope="module", params=["fixed", "auto"])
def one_fleet(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[HandingFleet]:
    roles: dict[str, Any] = {"prefill_engines": 1, "decode_engines": 1}
    if request.param == "auto":
        roles = {"engine_roles": "auto", "data_parallel_size": 2}
    made = ChangingFleet(folders[0], supervision=SUPERVISION, **roles, **USUAL)
    yield made
    made.close()


@pytest.fixture
def fleet(one_fleet: HandingFleet, folders: tuple[Path, Path]) -> Iterator[HandingFleet]:
    """It serves the old weights, and after the test nothing is left in it."""
    if one_fleet.weight_version != "0":
        one_fleet.update_weights(FolderWeights(str(folders[0])), "0")
    yield one_fleet
    told(one_fleet, WakeUp())
    wait_until(lambda: not one_fleet._lives and not one_fleet._routes)
    assert one_fleet._held == (0, 0)
    for each in one_fleet.engines:
        wait_until(lambda each=each: each.state == "ready")
        wait_until(lambda each=each: each.stats().num_running == 0 and each.stats().num_open_transfers == 0)
        wait_until(lambda each=each: each.stats().num_free_blocks == each.stats().num_blocks)


def check(answer: Answer, answers: dict[str, Any], versions: dict[str, str] | None = None) -> None:
    """The answer is whole and of its version, or ended early with the beginning of that."""
    if answer.finish_reason == "abort" and not answer.tokens:
        return
    name = answer.weight_version
    whole = answers[name if versions is None else versions[name]]
    if answer.finish_reason == "length":
        assert answer.tokens == whole
    else:
        assert answer.finish_reason == "abort"
        assert answer.tokens == whole[: len(answer.tokens)]


@pytest.mark.parametrize("mode", ["wait", "abort", "restart"])
def test_update(fleet: HandingFleet, folders: tuple[Path, Path], answers: dict[str, Any], mode: UpdateMode) -> None:
    begun = [Asked(fleet, f"begun {i}", IDS, restarts=i != 1) for i in range(3)]
    for each in begun:
        each.wait_for_output()
    queued = [Asked(fleet, f"queued {i}", IDS) for i in range(6)]
    condition = fleet.update_weights(FolderWeights(str(folders[1])), "new", mode)
    assert condition == EngineCondition(False, 0, True, True, condition.num_ended, condition.num_restarted, "new")
    late = [Asked(fleet, f"late {i}", IDS) for i in range(3)]
    found = [each.answer() for each in begun]
    for answer in found:
        check(answer, answers)
        if mode == "wait":
            assert answer == Answer(answers["0"], "length", "0", 0)
    assert condition.num_restarted == 0 or mode == "restart"
    for each in [*queued, *late]:
        check(each.answer(), answers)
    moved = fleet.routing.num_handed_over
    last = [Asked(fleet, f"last {i}", IDS) for i in range(12)]
    for each in last:
        assert each.answer() == Answer(answers["new"], "length", "new", 0)
    assert fleet.weight_version == "new"
    assert isinstance(fleet.router.roles, AutoRoles) or fleet.routing.num_handed_over > moved


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sleep(fleet: HandingFleet, answers: dict[str, Any], level: int, mode: PauseMode) -> None:
    begun = [Asked(fleet, f"begun {i}", IDS) for i in range(3)]
    for each in begun:
        each.wait_for_output()
    if mode == "abort":
        begun += [Asked(fleet, f"queued {i}", IDS) for i in range(30)]
    condition = told(fleet, Sleep(level, mode))
    assert condition.sleep_level == level
    assert condition.has_pages == (level == 0)
    assert condition.has_weights == (level < 2)
    late = Asked(fleet, "late", IDS)
    assert told(fleet, TellState()).is_sleeping == (level > 0)
    assert told(fleet, WakeUp()) == EngineCondition(False, 0, True, True)
    found = [each.answer() for each in begun]
    for answer in found:
        check(answer, answers)
    reasons = {answer.finish_reason for answer in found}
    assert "abort" in reasons if mode == "abort" else reasons == {"length"}
    assert late.answer() == Answer(answers["0"], "length", "0", 0)


def test_pause(fleet: HandingFleet, folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    """A kept request continues with the same bits. After an update it begins again, or ends if it may not."""
    kept = [Asked(fleet, f"kept {i}", IDS, restarts=i > 0) for i in range(4)]
    for each in kept:
        each.wait_for_output()
    assert told(fleet, PauseAll("keep")).is_paused
    late, gone = Asked(fleet, "late", IDS), Asked(fleet, "gone", IDS)
    fleet.cancel("gone")
    assert gone.answer().finish_reason == "abort"
    fleet.cancel("kept 3")
    assert not told(fleet, ResumeAll()).is_paused
    for each in (*kept[:3], late):
        assert each.answer() == Answer(answers["0"], "length", "0", 0)
    check(kept[3].answer(), answers)
    kept = [Asked(fleet, f"kept {i}", IDS, restarts=i > 0) for i in range(4)]
    for each in kept:
        each.wait_for_output()
    told(fleet, PauseAll("keep"))
    held = [name for name, life in fleet._lives.items() if life.has_output]
    condition = fleet.update_weights(FolderWeights(str(folders[1])), "new")
    assert condition.is_paused
    assert condition.num_ended == ("kept 0" in held)
    assert condition.num_restarted == len([name for name in held if name != "kept 0"])
    late = Asked(fleet, "late", IDS)
    told(fleet, ResumeAll())
    for i, each in enumerate(kept):
        answer = each.answer()
        check(answer, answers)
        if f"kept {i}" in held:
            assert answer.finish_reason == ("length" if i else "abort")
            assert (answer.weight_version, answer.num_restarts) == (("new", 1) if i else ("0", 0))
    assert late.answer() == Answer(answers["new"], "length", "new", 0)


def test_close_while_held(folders: tuple[Path, Path]) -> None:
    """A drain does not wait for what a pause holds."""
    fleet = HandingFleet(folders[0], prefill_engines=1, decode_engines=1, **USUAL)
    told(fleet, PauseAll("keep"))
    waiting = Asked(fleet, "waiting", IDS)
    fleet.close(drain=True)
    assert waiting.answer().finish_reason == "abort"


def kill(fleet: HandingFleet, rng: random.Random) -> None:
    pid = rng.choice(fleet.engines).pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 12))])
def test_engines_that_die_meanwhile(
    fleet: HandingFleet, folders: tuple[Path, Path], answers: dict[str, Any], seed: int
) -> None:
    """Random changes while engines are killed at random moments: all answers are whole and of one version, or ended by
    a change; in the end all engines serve the same weights."""
    rng = random.Random(seed)
    versions = {"0": "0"}  # which folder's each version has
    asked: list[Asked] = []
    for number in range(10 if seed == 1 else 25):
        asked += [Asked(fleet, f"{number}/{i}", IDS, restarts=rng.random() < 0.7) for i in range(rng.randrange(1, 8))]
        if rng.random() < 0.5:
            asked[-1].wait_for_output()
        kills = [threading.Timer(rng.random() * 0.6, kill, [fleet, rng]) for _ in range(rng.randrange(3))]
        for timer in kills:
            timer.start()
        which = rng.randrange(2)
        version = f"v{number}"
        versions[version] = ("0", "new")[which]
        mode: Any = rng.choice(["wait", "abort", "restart"])
        try:
            if rng.random() < 0.3:
                told(fleet, rng.choice([PauseAll("keep"), Sleep(2, "keep"), Sleep(1, "wait")]))
            fleet.update_weights(FolderWeights(str(folders[which])), version, mode)
            assert {each.weight_version for each in fleet.engines if each.state == "ready"} <= {version}
        except EngineDeadError:
            time.sleep(0.1)
        for timer in kills:
            timer.join()
        wait_until(lambda: all(each.state == "ready" for each in fleet.engines))
        told(fleet, WakeUp())
    for each in asked:
        check(each.answer(), answers, versions)
    assert len({each.weight_version for each in fleet.engines}) == 1


@pytest.mark.parametrize(
    "kind", ["two", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("one", "roles"))]
)
def test_an_engine_that_is_killed_in_its_sleep_sleeps_again_and_a_paused_one_pauses(
    kind: str, folders: tuple[Path, Path], answers: dict[str, Any]
) -> None:
    if kind == "one":
        client: Fleet | ProcessEngineClient = ProcessEngineClient(folders[0], supervision=SUPERVISION, **USUAL)
    elif kind == "two":
        client = Fleet(folders[0], supervision=SUPERVISION, data_parallel_size=2, **USUAL)
    else:
        client = HandingFleet(folders[0], supervision=SUPERVISION, prefill_engines=1, decode_engines=1, **USUAL)
    last = client.engines[-1] if isinstance(client, Fleet) else client
    killed: list[int] = []

    def kill_it() -> None:
        assert last.pid is not None
        killed.append(last.pid)
        os.kill(killed[-1], signal.SIGKILL)
        wait_until(lambda: last.pid not in (None, killed[-1]) and last.state == "ready")

    try:
        told(client, Sleep(2))
        kill_it()
        assert told(last, TellState()) == EngineCondition(False, 2, False, False)
        told(client, WakeUp(("weights",)))
        kill_it()
        assert told(last, TellState()) == told(client, TellState()) == EngineCondition(False, 2, True, False)
        assert told(client, WakeUp()) == EngineCondition(False, 0, True, True)
        kill_it()
        assert told(last, TellState()) == EngineCondition(False, 0, True, True)
        told(client, PauseAll())
        kill_it()
        assert told(last, TellState()) == told(client, TellState()) == EngineCondition(True, 0, True, True)
        assert told(client, ResumeAll()) == EngineCondition(False, 0, True, True)
        kill_it()
        assert told(last, TellState()) == EngineCondition(False, 0, True, True)
        found = [Asked(client, f"{i}", IDS) for i in range(6)]
        assert [each.answer() for each in found] == [Answer(answers["0"], "length", "0", 0)] * 6
    finally:
        client.close()


def test_weights_of_a_memory(fleet: HandingFleet, folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    """Pages are handed over between engines that have them; one that dies comes back with its own, and takes no part
    in answers of the others' version."""
    with shared_weights(tensors_of(folders[1])) as name:
        fleet.update_weights(SharedWeights(str(shared_path(name))), "new")
    moved = fleet.routing.num_handed_over
    for each in [Asked(fleet, f"shared {i}", IDS) for i in range(12)]:
        assert each.answer() == Answer(answers["new"], "length", "new", 0)
    assert isinstance(fleet.router.roles, AutoRoles) or fleet.routing.num_handed_over > moved
    begun = [Asked(fleet, f"begun {i}", IDS, restarts=i % 2 == 0, max_tokens=20) for i in range(8)]
    for each in begun:
        each.wait_for_output()
    pid = fleet.engines[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fleet.engines[0].weight_version == "0" and fleet.engines[0].state == "ready")
    late = [Asked(fleet, f"late {i}", IDS) for i in range(12)]
    for each in [*begun, *late]:
        check(each.answer(), answers)
    assert fleet.weight_version == "0,new"
