"""Pauses, sleeps and new weights of a running engine: after each it answers as a fresh engine does, and no answer has
tokens of two versions."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from models.checkpoints.given_weights import SHARED_FOLDER, shared_path, shared_weights, write_shared
from models.errors import ConfigError, ModelLoadError, WeightsError
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import PoolingRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.steps.executor import ExecutorLostError
from runtime.engine.weights.commands import (
    DropWeights,
    EngineCondition,
    FolderWeights,
    GivenArrays,
    LoadWeights,
    PauseAll,
    PauseMode,
    ResumeAll,
    SharedWeights,
    Sleep,
    TellState,
    UpdateMode,
    UseWeights,
    WakeUp,
)
from runtime.errors import InvalidArgumentError
from tests.models.folders import change_config, golden_tensors, load_golden, write_safetensors
from tests.runtime.engine.fakes import make_engine, request
from tests.runtime.engine.weights.two_models import (
    CASE,
    TIMEOUT_S,
    Answer,
    Asked,
    answers,
    folders,
    opened,
    prompt_of,
    told,
)

__all__ = ["answers", "folders"]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"decode_graphs": "off"},
    "overlapped": {"overlap": "on"},
    "no cache": {"enable_prefix_caching": False},
    "tight": {"num_blocks": 9, "swap_space_bytes": 1 << 20},
    "lookup": {"speculation": "ngram"},
}


@pytest.fixture(params=SETTINGS)
def client(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[ThreadEngineClient]:
    made = opened(folders[0], **SETTINGS[request.param])
    yield made
    made.order(ResumeAll()).result(TIMEOUT_S)
    engine = made._engine
    made.close(drain=True)
    engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks


def check(answer: Answer, answers: dict[str, Any]) -> None:
    """The answer is whole and of its version, or ended early with the beginning of that."""
    whole = answers[answer.weight_version]
    if answer.finish_reason == "length":
        assert answer.tokens == whole
    else:
        assert answer.finish_reason == "abort"
        assert answer.tokens == whole[: len(answer.tokens)]


@pytest.mark.parametrize("mode", ["wait", "abort", "restart"])
def test_update(
    client: ThreadEngineClient, folders: tuple[Path, Path], answers: dict[str, Any], mode: UpdateMode
) -> None:
    ids = prompt_of(CASE)
    begun = [Asked(client, f"begun {i}", ids, restarts=i != 1) for i in range(3)]
    for each in begun:
        each.wait_for_output()
    queued = [Asked(client, f"queued {i}", ids) for i in range(3)]
    client.update_weights(FolderWeights(str(folders[1])), "new", mode)
    late = [Asked(client, f"late {i}", ids) for i in range(3)]
    found = [each.answer() for each in begun]
    for answer in found:
        check(answer, answers)
    for each in [*queued, *late]:
        answer = each.answer()
        check(answer, answers)
    assert Asked(client, "last", ids).answer() == Answer(answers["new"], "length", "new", 0)
    assert client.weight_version == "new"


def test_a_message_is_kept_while_its_request_can_begin_again() -> None:
    """Its images may be large. A stream whose choices have all begun ends when the weights change."""
    engine = make_engine(max_num_seqs=2)
    for name, restarts in (("stream", False), ("whole", True)):
        asked = msgspec.structs.replace(request(name, [1, 2, 3], n=3, max_tokens=8, ignore_eos=True), restarts=restarts)
        engine.add(asked)
    stream, whole = engine.requests["stream"], engine.requests["whole"]
    seen = set()
    while engine.has_work:
        engine.step()
        begun = [bool(sequence.num_output_tokens) for sequence in stream.open_sequences]
        if begun:
            assert (stream.asked is None) == all(begun)
            seen.add(all(begun))
        assert whole.asked is not None
    assert seen == {False, True}


def test_old_weights_finish_in_wait_mode(folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    client = opened(folders[0])
    begun = [Asked(client, f"begun {i}", prompt_of(CASE)) for i in range(3)]
    for each in begun:
        each.wait_for_output()
    client.update_weights(FolderWeights(str(folders[1])), "new")
    assert [each.answer() for each in begun] == [Answer(answers["0"], "length", "0", 0)] * 3
    client.close()


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sleep(client: ThreadEngineClient, answers: dict[str, Any], level: int, mode: PauseMode) -> None:
    ids = prompt_of(CASE)
    begun = [Asked(client, f"begun {i}", ids) for i in range(3)]
    for each in begun:
        each.wait_for_output()
    if mode == "abort":  # more than can have ended by then
        begun += [Asked(client, f"queued {i}", ids) for i in range(30)]
    condition = told(client, Sleep(level, mode))
    assert condition.sleep_level == level
    assert condition.has_pages == (level == 0)
    assert condition.has_weights == (level < 2)
    assert client.stats().sleep_level == level
    late = Asked(client, "late", ids)
    if level == 2:
        with pytest.raises(RequestError, match="sleeps"):
            client.logits(ids)
    awake = told(client, WakeUp(("weights",)))
    assert awake.has_weights
    assert awake.is_sleeping == (level > 0)
    assert told(client, WakeUp()) == EngineCondition(False, 0, True, True)
    found = [each.answer() for each in begun]
    for answer in found:
        check(answer, answers)
    reasons = {answer.finish_reason for answer in found}
    assert "abort" in reasons if mode == "abort" else reasons == {"length"}
    assert late.answer() == Answer(answers["0"], "length", "0", 0)


def test_pause(client: ThreadEngineClient, answers: dict[str, Any]) -> None:
    ids = prompt_of(CASE)
    kept = Asked(client, "kept", ids)
    kept.wait_for_output()
    assert told(client, PauseAll("keep")).is_paused
    late = Asked(client, "late", ids)
    gone = Asked(client, "gone", ids)
    client.cancel("gone")
    assert gone.answer().finish_reason == "abort"
    assert client._engine.num_unscheduled == 1
    assert told(client, TellState()).is_paused
    assert not told(client, ResumeAll()).is_paused
    for each in (kept, late):
        assert each.answer() == Answer(answers["0"], "length", "0", 0)


def test_update_while_paused(client: ThreadEngineClient, folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    """A kept request begins anew, or ends if it must not."""
    seen = set()
    for attempt in range(40):
        kept = [Asked(client, f"kept {attempt} {i}", prompt_of(CASE), restarts=bool(i)) for i in range(2)]
        for each in kept:
            each.wait_for_output()
        told(client, PauseAll("keep"))  # perhaps after they have ended
        condition = client.update_weights(FolderWeights(str(folders[1])), "new")
        assert condition.is_paused
        told(client, ResumeAll())
        ended, again = (each.answer() for each in kept)
        assert condition.num_ended == (ended.finish_reason == "abort")
        assert condition.num_restarted == again.num_restarts == (again.weight_version == "new")
        assert ended.weight_version == "0"
        check(ended, answers)
        assert again.tokens == answers[again.weight_version]
        seen.add((condition.num_ended, condition.num_restarted))
        if (1, 1) in seen:
            return
        client.update_weights(FolderWeights(str(folders[0])), "0")
    raise AssertionError(f"they always ended before: {seen}")


def test_update_while_asleep(folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    client = opened(folders[0])
    told(client, Sleep(2))
    condition = client.update_weights(FolderWeights(str(folders[1])), "new")
    assert (condition.sleep_level, condition.has_weights, condition.has_pages) == (2, True, False)
    assert told(client, WakeUp(("kv_cache",))).sleep_level == 0
    assert Asked(client, "after", prompt_of(CASE)).answer() == Answer(answers["new"], "length", "new", 0)
    client.close()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_embeddings_wait_for_a_stopped_engine(folders: tuple[Path, Path], level: int) -> None:
    """No order computes them before; then they are the new weights'."""
    client, other = (opened(folder) for folder in folders)
    asked = PoolingRequest([1, 2, 3])
    expected = [each.embed(asked).result(TIMEOUT_S) for each in (client, other)]
    told(client, Sleep(level))
    waiting = client.embed(asked)
    for command in (TellState(), Sleep(level), PauseAll("keep"), DropWeights()):
        told(client, command)
    client.update_weights(FolderWeights(str(folders[1])), "new", "wait")
    assert client.embed_here(asked) is None
    assert not waiting.done()
    told(client, WakeUp(()))
    np.testing.assert_array_equal(waiting.result(TIMEOUT_S), expected[1])
    assert (expected[0] != expected[1]).any()
    for each in (client, other):
        each.close()


def test_updates_at_once_are_counted_one_by_one(folders: tuple[Path, Path]) -> None:
    """Each has a number of its own, which its own answer tells."""
    client = opened(folders[0])
    with ThreadPoolExecutor(8) as threads:
        given = [threads.submit(client.update_weights, FolderWeights(str(folders[i % 2])), None) for i in range(8)]
        found = [each.result(TIMEOUT_S).weight_version for each in given]
    assert sorted(found, key=int) == [str(number) for number in range(1, 9)]
    assert client.weight_version == "8"
    client.close()


def test_arrays_and_shared_memory(folders: tuple[Path, Path], answers: dict[str, Any]) -> None:
    """Both are as the folder with the same numbers; what their owner writes later changes nothing."""
    golden = load_golden(CASE)
    new = golden_tensors(type(golden)(**{**vars(golden), "seed": golden.seed + 1}))
    client = opened(folders[0])
    for round_, how in enumerate(("arrays", "shared", "other type")):
        mine = {name: each.copy() for name, each in new.items()}
        if how == "shared":
            with shared_weights(mine) as name:
                client.update_weights(SharedWeights(str(shared_path(name))), f"{round_}")
                assert not (SHARED_FOLDER / name).stat().st_mode & 0o077
            assert not (SHARED_FOLDER / name).exists()
        else:
            kind = np.float64 if how == "other type" else np.float32
            mine = {name: each.astype(kind) for name, each in mine.items()}
            client.update_weights(GivenArrays(mine), f"{round_}")
        for each in mine.values():
            each[...] = 1.0
        assert Asked(client, how, prompt_of(CASE)).answer().tokens == answers["new"]
        client.update_weights(FolderWeights(str(folders[0])), "old")
    client.update_weights(GivenArrays(new), "given")
    told(client, Sleep(2))
    with pytest.raises(RequestError, match="came from memory"):
        told(client, WakeUp())
    client.update_weights(GivenArrays(new), "again")
    told(client, WakeUp())
    assert Asked(client, "again", prompt_of(CASE)).answer() == Answer(answers["new"], "length", "again", 0)
    client.close()


def spoilt(new: Path, folder: Path, how: str) -> Path:
    shutil.copytree(new, folder)
    tensors = golden_tensors(load_golden(CASE))
    name = next(name for name in tensors if "mlp.down_proj" in name)
    if how == "missing":
        del tensors[name]
    elif how == "left over":
        tensors["model.more.weight"] = np.ones((2, 2), np.float32)
    elif how == "misshapen":
        tensors[name] = tensors[name][:-1]
    elif how in ("nan", "infinity"):
        tensors[name][1, 2] = np.nan if how == "nan" else -np.inf
    elif how == "config":
        change_config(folder, rms_norm_eps=0.125)
    write_safetensors(folder / "model.safetensors", tensors)
    if how == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "other type":
        write_safetensors(folder / "model.safetensors", golden_tensors(load_golden(CASE), "BF16"))
    elif how == "empty":
        (folder / "model.safetensors").unlink()
    return folder


REFUSED = {
    "missing": (WeightsError, "is missing"),
    "left over": (WeightsError, "is left over"),
    "misshapen": (WeightsError, "config asks for"),
    "nan": (WeightsError, "NaN or an infinity"),
    "infinity": (WeightsError, "NaN or an infinity"),
    "config": (ConfigError, "another model's"),
    "truncated": (WeightsError, "truncated"),
    "other type": (ConfigError, "float type is bfloat16"),
    "empty": (ModelLoadError, "has neither"),
}


def test_what_is_refused_changes_nothing(folders: tuple[Path, Path], answers: dict[str, Any], tmp_path: Path) -> None:
    client = opened(folders[0])
    for how, (kind, words) in REFUSED.items():
        begun = Asked(client, how, prompt_of(CASE))
        begun.wait_for_output()
        with pytest.raises(kind, match=words):
            client.update_weights(FolderWeights(str(spoilt(folders[1], tmp_path / how, how))), "new", "abort")
        assert begun.answer() == Answer(answers["0"], "length", "0", 0), how
    with pytest.raises(RequestError, match="not there"):
        client.update_weights(FolderWeights(str(tmp_path / "nowhere")), "new")
    with pytest.raises(RequestError, match="no weights were read"):
        client.order(UseWeights("new")).result(TIMEOUT_S)
    client.order(LoadWeights(FolderWeights(str(folders[1])))).result(TIMEOUT_S)
    client.order(DropWeights()).result(TIMEOUT_S)
    with pytest.raises(RequestError, match="no weights were read"):
        client.order(UseWeights("new")).result(TIMEOUT_S)
    for command in (Sleep(3), Sleep(1, "later"), WakeUp(("all",)), PauseAll("no"), UseWeights(""), UseWeights("\n")):  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            client.order(command).result(TIMEOUT_S)
    assert Asked(client, "after", prompt_of(CASE)).answer() == Answer(answers["0"], "length", "0", 0)
    client.close()
    with pytest.raises(EngineDeadError):
        client.order(TellState())


def test_weights_that_are_taken_over_in_part_end_the_engine(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer with both."""
    client = opened(folders[0])

    def fails() -> None:
        raise OSError("no file of the drafter")

    monkeypatch.setattr(client._engine.weights, "_with_new_parts", fails)
    with pytest.raises(ExecutorLostError, match="no file of the drafter"):
        client.update_weights(FolderWeights(str(folders[1])), "new")
    with pytest.raises(EngineDeadError):
        client.order(TellState()).result(TIMEOUT_S)
    client.close()


def test_shared_memory_that_cannot_be(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = golden_tensors(load_golden(CASE))
    client = opened(folders[0])
    path = tmp_path / "shared"
    for how in ("no digest", "other bytes", "cut", "one digest less"):
        write_shared(path.touch() or path, tensors)
        data = bytearray(path.read_bytes())
        if how == "no digest":
            data = data.replace(b'"sha256"', b'"sha255"')
        elif how == "other bytes":
            data[-5] ^= 1
        elif how == "cut":
            del data[-64:]
        else:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            digests = json.loads(header["__metadata__"]["sha256"])
            digests.pop(next(iter(digests)))
            header["__metadata__"]["sha256"] = json.dumps(digests)
            raw = json.dumps(header).encode()
            data[: 8 + size] = len(raw).to_bytes(8, "little") + raw
        path.write_bytes(data)
        with pytest.raises(WeightsError, match=r"digest|truncated"):
            client.update_weights(SharedWeights(str(path)), "new")
    client.close()
    for name in ("", "..", "a/b", "/etc/passwd", "not-there-at-all", "a\0b"):
        with pytest.raises(InvalidArgumentError):
            shared_path(name)
    with shared_weights(tensors) as name:
        (SHARED_FOLDER / name).chmod(0o644)
        with pytest.raises(InvalidArgumentError, match="0600"):
            shared_path(name)
        (SHARED_FOLDER / name).chmod(0o600)
        link = SHARED_FOLDER / f"{name}-link"
        link.symlink_to(SHARED_FOLDER / name)
        try:
            with pytest.raises(InvalidArgumentError, match="plain file"):
                shared_path(link.name)
        finally:
            link.unlink()


def test_folder_that_changes_while_it_sleeps(
    folders: tuple[Path, Path], answers: dict[str, Any], tmp_path: Path
) -> None:
    """Weights that were written in place are not taken for the version that slept."""
    place = shutil.copytree(folders[0], tmp_path / "place")
    client = opened(place)
    told(client, Sleep(2))
    shutil.copy(folders[1] / "model.safetensors", place)
    with pytest.raises(RequestError, match="others than when they were read"):
        told(client, WakeUp())
    client.update_weights(FolderWeights(str(place)), "new")
    told(client, WakeUp())
    assert Asked(client, "after", prompt_of(CASE)).answer() == Answer(answers["new"], "length", "new", 0)
    client.close()


def test_close_while_held(folders: tuple[Path, Path]) -> None:
    """A drain does not wait for what a pause holds."""
    client = opened(folders[0])
    told(client, PauseAll("keep"))
    waiting = Asked(client, "waiting", prompt_of(CASE))
    client.close(drain=True)
    assert waiting.answer().finish_reason == "abort"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 12))])
def test_no_answer_mixes_versions(folders: tuple[Path, Path], seed: int) -> None:
    """Random requests under random pauses, sleeps and updates: each answer is that of a fresh engine of the version
    that it names."""
    drawn = random.Random(seed)
    settings = drawn.choice(list(SETTINGS.values()))
    fresh = {"even": opened(folders[0]), "odd": opened(folders[1])}
    client = opened(folders[0], **settings)
    ids = load_golden(CASE).prompt_ids
    asked: list[tuple[Asked, list[int], dict[str, Any]]] = []
    version = 0
    for number in range(60):
        params = {"temperature": drawn.choice([0.0, 1.0]), "seed": number, "max_tokens": drawn.randint(1, 16)}
        prompt = ids[: drawn.randint(1, min(12, len(ids)))]
        asked.append((Asked(client, f"{number}", prompt, restarts=drawn.random() < 0.7, **params), prompt, params))
        if drawn.random() < 0.3:
            asked[-1][0].wait_for_output()
        choice = drawn.random()
        if choice < 0.12:
            version += 1
            mode = drawn.choice(["wait", "abort", "restart"])
            client.update_weights(FolderWeights(str(folders[version % 2])), str(version), mode)
        elif choice < 0.2:
            told(client, Sleep(drawn.randint(0, 2), drawn.choice(["keep", "wait", "abort"])))
            told(client, WakeUp())
        elif choice < 0.28:
            told(client, PauseAll(drawn.choice(["keep", "wait", "abort"]), drawn.random() < 0.5))
            told(client, ResumeAll())
    assert version > 2
    for number, (each, prompt, params) in enumerate(asked):
        answer = each.answer()
        engine = fresh["odd" if int(answer.weight_version) % 2 else "even"]
        whole = Asked(engine, f"{number}", prompt, **params).answer().tokens
        if answer.finish_reason == "abort":
            assert answer.tokens == whole[: len(answer.tokens)], (number, answer)
        else:
            assert answer.tokens == whole, (number, answer)
    for each in (client, *fresh.values()):
        engine = each._engine
        each.close()
        engine.check_invariants()
