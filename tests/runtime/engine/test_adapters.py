"""Requests with adapters in an engine: the same bits in any company, pages keyed by content, slots that are waited
for."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.make_engine import engine_of
from runtime.engine.messages import AdapterRef, EngineOutput, EngineRequest
from runtime.engine.sampling_params import SamplingParams
from tests.models.adapter_cases import adapter_tensor, load_adapter_golden, write_adapter
from tests.models.folders import load_golden, write_model
from tests.waiting import wait_until

CASE = "llama"
NAMES = ("first", "second", "third")
Answer = list[tuple[int, float]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and three adapters of it."""
    root = tmp_path_factory.mktemp("adapters")
    golden = load_adapter_golden(CASE)
    write_model(root / "model", golden.golden)
    for number, name in enumerate(NAMES):
        write_scaled(root / name, (1.0, 0.5, -0.5)[number])
    return root


def write_scaled(folder: Path, factor: float) -> None:
    """The case's adapter, its effect times a factor."""
    shapes = load_adapter_golden(CASE).shapes
    tensors = {
        name: adapter_tensor(name, shape, CASE) * np.float32(factor)
        for name, shape in shapes.items()
        if "lora_B" in name
    }
    write_adapter(folder, CASE, tensors=tensors)


@pytest.fixture(params=["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(folders: Path, **settings: Any) -> Engine:
    given = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    given |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "block_size": 8, "num_blocks": 64, "seed": 0}
    return engine_of(str(folders / "model"), EngineConfig(**{**given, **settings}))


@pytest.fixture
def engine(folders: Path) -> Iterator[Engine]:
    made = opened(folders)
    yield made
    made.check_invariants()
    assert made.pool.num_free == made.pool.num_blocks
    made.close()


def loaded(engine: Engine, folder: Path) -> AdapterRef:
    digest = bytes(int(each) for each in engine.load_adapter(folder.name, str(folder)).result(30))
    return AdapterRef(name=folder.name, path=str(folder), digest=digest.hex())


def asked(name: str, ids: list[int], adapter: AdapterRef | None, **params: Any) -> EngineRequest:
    given = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logprobs": 0, **params}
    return EngineRequest(request_id=name, prompt_token_ids=ids, params=SamplingParams(**given), adapter=adapter)


def drained(engine: Engine) -> tuple[dict[str, Answer], dict[str, EngineOutput]]:
    """Each request's tokens with their log probabilities, and its first output."""
    answers: dict[str, Answer] = {}
    firsts: dict[str, EngineOutput] = {}
    while engine.has_work:
        for output in engine.step():
            firsts.setdefault(output.request_id, output)
            found = answers.setdefault(output.request_id, [])
            found += [(each.token_id, each.logprob) for each in output.logprobs or []]
    return answers, firsts


IDS = [int(i) for i in np.random.default_rng(5).integers(0, 60, 40)]


@pytest.mark.parametrize("settings", [
    {}, {"decode_graphs": "off"}, {"speculation": "ngram"}, {"num_blocks": 14, "preemption": "recompute"},
    {"num_blocks": 14, "preemption": "swap", "swap_space_bytes": 1 << 20}, {"overlap": "on"},
])  # fmt: skip
def test_answers_are_those_alone(folders: Path, device: str, settings: dict[str, Any]) -> None:
    exact = {"exact": True} if device != "cpu" else {}
    order = [0, None, 1, 2, 0, None, 2, 1]
    mixed = opened(folders, device=device, **settings, **exact)
    refs = [loaded(mixed, folders / name) for name in NAMES]
    prompts = [(IDS[:9] * 3)[: 15 + 2 * number] for number in range(len(order))]
    for number, which in enumerate(order):
        mixed.add(asked(str(number), prompts[number], None if which is None else refs[which]))
    found, _ = drained(mixed)
    assert mixed.adapters is not None
    assert mixed.adapters.num_writes >= 3  # two slots for three adapters
    assert not any(mixed.adapters._holders.values())
    mixed.check_invariants()
    mixed.close()
    alone = opened(folders, device=device, enable_prefix_caching=False, decode_graphs="off", **exact)
    for number, which in enumerate(order):
        alone.add(asked(str(number), prompts[number], None if which is None else refs[which]))
        answers, _ = drained(alone)
        assert found[str(number)] == answers[str(number)], (number, which)
    alone.close()


def test_prefixes_are_shared_within_an_adapter_alone(engine: Engine, folders: Path) -> None:
    first, second = (loaded(engine, folders / name) for name in NAMES[:2])
    renamed = AdapterRef(name="other", path=first.path, digest=first.digest)
    cached = []
    for number, adapter in enumerate([None, first, second, None, renamed, second]):
        engine.add(asked(str(number), IDS[:33], adapter, max_tokens=1))
        _, outputs = drained(engine)
        cached.append(outputs[str(number)].num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


def test_a_changed_folder_meets_no_old_page(engine: Engine, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(folders / "first", folder)
    old = loaded(engine, folder)
    engine.add(asked("old", IDS[:33], old))
    before, _ = drained(engine)
    write_scaled(folder, 0.25)
    new = loaded(engine, folder)
    assert new.digest != old.digest
    engine.add(asked("new", IDS[:33], new))
    after, firsts = drained(engine)
    assert firsts["new"].num_cached_tokens == 0
    assert after["new"] != before["old"]
    engine.add(asked("old again", IDS[:33], old))  # its content is kept
    again, _ = drained(engine)
    assert again["old again"] == before["old"]


def test_content_that_is_gone_is_an_error_of_the_request_alone(folders: Path, tmp_path: Path) -> None:
    engine = opened(folders, max_cpu_loras=2)
    folder = tmp_path / "changing"
    shutil.copytree(folders / "first", folder)
    old = loaded(engine, folder)
    write_scaled(folder, 0.25)
    for name in NAMES[1:]:  # two others take its place in memory
        loaded(engine, folders / name)
    engine.add(asked("gone", IDS[:9], old))
    engine.add(asked("plain", IDS[:9], None))
    answers, firsts = drained(engine)
    assert firsts["gone"].finish_reason == "error"
    assert "has other content than when it was loaded: load it again" in str(firsts["gone"].error)
    assert len(answers["plain"]) == 10
    engine.close()


def test_requests_wait_for_a_slot_in_the_order_of_arrival(folders: Path) -> None:
    engine = opened(folders, max_loras=1)
    first, second = (loaded(engine, folders / name) for name in NAMES[:2])
    for number, adapter in enumerate([first, second, first, None]):
        engine.add(asked(str(number), IDS[: 9 + number], adapter, max_tokens=4))
    _, firsts = drained(engine)
    order = list(firsts)
    assert order.index("0") < order.index("1") < order.index("2")
    assert order.index("3") < order.index("1")  # one without an adapter waits for none
    engine.close()


def test_an_adapter_that_a_closed_engine_has_not_read(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(folders)
    ref = loaded(engine, folders / NAMES[0])
    assert engine.adapters is not None
    engine.adapters._kept.clear()
    may_read, read = threading.Event(), engine.adapters._read

    def late(path: Path) -> Any:
        assert may_read.wait(30)
        return read(path)

    monkeypatch.setattr(engine.adapters, "_read", late)
    under_way, waiting = (engine.load_adapter(name, str(folders / name)) for name in NAMES[:2])
    wait_until(under_way.running)
    engine.close()
    may_read.set()
    assert bytes(int(each) for each in under_way.result(30)).hex() == ref.digest
    with pytest.raises(EngineDeadError, match="was closed before the adapter was read"):
        waiting.result(30)
    with pytest.raises(EngineDeadError, match="is closed"):
        engine.load_adapter(NAMES[2], str(folders / NAMES[2]))
    with pytest.raises(EngineDeadError, match="is closed"):
        engine.add(asked("0", IDS[:9], msgspec.structs.replace(ref, digest="00" * 32)))


class _Compiling:
    """A queue with a grammar that takes long."""

    def __len__(self) -> int:
        return 1

    def wait(self, timeout_s: float) -> None:
        pass

    def take(self) -> list[Any]:
        return []


def test_a_grammar_that_is_being_compiled_delays_no_adapter(
    engine: Engine, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(engine, folders / NAMES[0])
    with monkeypatch.context() as compiling:
        compiling.setattr(engine, "grammars", _Compiling())
        engine.add(asked("0", IDS[:9], first))
        outputs = [output for _ in range(40) for output in engine.step()]
    assert [output.finish_reason for output in outputs if output.finish_reason is not None] == ["length"]


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(folders: Path) -> None:
    engine = opened(folders, max_loras=1)
    first, second = (loaded(engine, folders / name) for name in NAMES[:2])
    engine.add(asked("holds", IDS[:9], first, max_tokens=30))
    engine.add(asked("waits", IDS[:9], second))
    for _ in range(4):
        engine.step()
    assert engine.stats().num_waiting == 1
    assert [each.finish_reason for each in engine.cancel("waits")] == ["abort"]
    assert engine.stats().num_waiting == 0
    engine.cancel("holds")
    engine.add(asked("next", IDS[:9], second))
    answers, _ = drained(engine)
    assert len(answers["next"]) == 10
    engine.close()


def test_a_paused_request_gives_its_slot_to_others(folders: Path) -> None:
    alone = opened(folders, max_loras=1)
    first, second = (loaded(alone, folders / name) for name in NAMES[:2])
    alone.add(asked("0", IDS[:9], first, max_tokens=30, n=2, seed=3, temperature=1.0))
    expected, _ = drained(alone)
    alone.close()
    engine = opened(folders, max_loras=1)
    engine.add(asked("0", IDS[:9], first, max_tokens=30, n=2, seed=3, temperature=1.0))
    found: Answer = []

    def run(steps: int) -> None:
        for _ in range(steps):
            for output in engine.step():
                if output.request_id == "0":
                    found.extend((each.token_id, each.logprob) for each in output.logprobs or [])

    run(6)
    engine.pause("0")
    engine.add(asked("1", IDS[:9], second))
    answers, _ = drained(engine)
    found += answers.pop("0", [])
    assert len(answers["1"]) == 10
    assert engine.requests["0"].adapter_slot == -1
    engine.resume("0")
    rest, _ = drained(engine)
    assert sorted(found + rest["0"]) == sorted(expected["0"])
    engine.check_invariants()
    engine.close()


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_reloads_of_other_content_never_meet_old_answers(folders: Path, tmp_path: Path, count: int) -> None:
    """Names whose folders change under way, prompts that share prefixes, cancelled and paused requests."""
    rng = np.random.default_rng(count)
    prompts = [IDS[: int(end)] for end in (9, 17, 25)]
    engine = opened(folders, max_loras=3, max_cpu_loras=5, num_blocks=40)
    names = [f"adapter {number}" for number in range(4 if count < 1000 else 50)]
    refs: dict[str, tuple[AdapterRef, int]] = {}
    asked_for: dict[str, tuple[int, int]] = {}  # the version's factor, the prompt
    answers: dict[str, Answer] = {}
    dropped: set[str] = set()

    def take(output: EngineOutput) -> None:
        assert output.finish_reason != "error", output.error
        answers.setdefault(output.request_id, []).extend((e.token_id, e.logprob) for e in output.logprobs or [])

    for number in range(count):
        name = names[int(rng.integers(len(names)))]
        if name not in refs or rng.random() < 0.1:
            factor = int(rng.integers(-3, 4))
            folder = tmp_path / f"{name} {factor}"
            if not folder.exists():
                write_scaled(folder, factor / 2)
            refs[name] = loaded(engine, folder), factor
        ref, factor = refs[name]
        which = int(rng.integers(len(prompts)))
        asked_for[str(number)] = factor, which
        engine.add(asked(str(number), prompts[which], ref, max_tokens=int(rng.integers(1, 5))))
        if rng.random() < 0.05:
            engine.cancel(str(number))
            dropped.add(str(number))
        while engine.stats().num_waiting + engine.stats().num_running > 6:
            for output in engine.step():
                take(output)
    for output in iter(lambda: engine.step() if engine.has_work else None, None):
        for each in output or []:
            take(each)
    engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.adapters is not None
    assert len(engine.adapters) == 0
    engine.close()
    alone = opened(folders, enable_prefix_caching=False)
    expected: dict[tuple[int, int], Answer] = {}
    for factor, which in sorted(set(asked_for.values())):
        folder = tmp_path / f"{factor} alone"
        write_scaled(folder, factor / 2)
        alone.add(asked("alone", prompts[which], loaded(alone, folder), max_tokens=5))
        expected[factor, which] = drained(alone)[0]["alone"]
    alone.close()
    for name, key in asked_for.items():
        if name not in dropped:
            assert answers[name] == expected[key][: len(answers[name])], (name, key)


@pytest.mark.parametrize("name", ["mistral_wide_window", "qwen2_window", "deepseek_v3_wide"])
def test_ranks_answer_as_one(tmp_path: Path, name: str) -> None:
    golden = load_golden(name)
    write_model(tmp_path / "model", golden)
    rng = np.random.default_rng(1)
    tensors = {}
    for tensor, shape in golden.shapes.items():
        if len(shape) == 2 and "_proj" in tensor:
            module = f"base_model.model.{tensor.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((4, shape[1])).astype(np.float32) / 4
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((shape[0], 4)).astype(np.float32) / 4
            tensors[f"{module}.lora_B.bias"] = rng.standard_normal(shape[0]).astype(np.float32) / 4
    folder = write_adapter(tmp_path / "own", CASE, tensors=tensors, config={"lora_bias": True}, is_alone=True)
    found = []
    for ranks in (1, 2):
        engine = opened(tmp_path, tensor_parallel_size=ranks)
        engine.add(asked("0", IDS[:20], loaded(engine, folder)))
        engine.add(asked("1", IDS[:20], None))
        found.append(drained(engine)[0])
        engine.close()
    for request in ("0", "1"):
        one, two = (each[request] for each in found)
        assert [token for token, _ in one] == [token for token, _ in two]
        np.testing.assert_allclose([each for _, each in one], [each for _, each in two], atol=1e-4)
    assert found[0]["0"] != found[0]["1"]


def test_an_engine_without_adapters_refuses_them(folders: Path) -> None:
    engine = opened(folders, enable_lora=False)
    ref = AdapterRef(name="first", path=str(folders / "first"), digest="00" * 32)
    with pytest.raises(RequestError, match="start it with enable_lora"):
        engine.add(asked("0", IDS[:9], ref))
    with pytest.raises(RequestError, match="start it with enable_lora"):
        engine.load_adapter("first", str(folders / "first"))
    engine.close()


def test_an_adapter_that_does_not_fit_is_told(engine: Engine, tmp_path: Path) -> None:
    write_adapter(tmp_path / "gemma", "gemma3")
    with pytest.raises(RequestError, match=r"'gemma': .*is for another model"):
        engine.load_adapter("gemma", str(tmp_path / "gemma")).result(30)
    with pytest.raises(RequestError, match="there is no such folder"):
        engine.load_adapter("none", str(tmp_path / "none")).result(30)


@pytest.mark.parametrize(("settings", "message"), [
    ({"max_loras": 0}, "max_loras"), ({"max_lora_rank": 513}, "max_lora_rank"),
    ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras is 3, must be at least max_loras = 4"),
])  # fmt: skip
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(**settings)


def test_prefixes_on_the_disk_are_those_of_an_adapters_content(folders: Path, tmp_path: Path, device: str) -> None:
    """After a restart each adapter finds its own pages, and one of the same name with other numbers none."""
    exact = {"exact": True} if device != "cpu" else {}
    changed = tmp_path / NAMES[0]
    write_scaled(changed, -2.0)
    paths: list[Path | None] = [None, *(folders / name for name in NAMES[:2]), changed]
    known: list[Answer] = []
    alone = opened(folders, device=device, enable_prefix_caching=False, **exact)
    for path in paths:
        alone.add(asked("x", IDS, None if path is None else loaded(alone, path)))
        known.append(drained(alone)[0]["x"])
    alone.close()
    assert len({str(each) for each in known}) == 4
    for number, cached in enumerate(([0, 0, 0], [32, 32, 32, 0])):
        engine = opened(folders, device=device, prefix_cache_dir=str(tmp_path / "prefixes"), **exact)
        for path, expected, least in zip(paths, known, cached):
            engine.add(asked("x", IDS, None if path is None else loaded(engine, path)))
            answers, firsts = drained(engine)
            assert answers["x"] == expected, (number, path)
            assert firsts["x"].num_cached_tokens == least
            engine.rest()
        engine.close()
