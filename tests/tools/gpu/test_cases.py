"""The sections: their limits fit the time that a GPU is lent, and wrong results are errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels.case import Prepared, errors, prepare, verify
from runtime.bench.kernels.operations import product_case
from tests.runtime.device.emulated import new_gpu
from tools import gpu_check
from tools.gpu import sanitizer
from tools.gpu.checking import worker
from tools.gpu.kernels.cases import check
from tools.gpu.sections import EMULATED_TESTS, ROOT, Case, Options, sections
from tools.gpu.serving import graph_timeline


def test_three_commands_are_enough_and_names_are_unique() -> None:
    found = list(sections())
    assert len({section.name for section in found}) == len(found)
    assert gpu_check.BUDGET_S < 600
    tests = ("tests ", "emulated ", "sanitizer ")
    before_tests = [section for section in found if not section.name.startswith(tests)]
    assert found[: len(before_tests)] == before_tests
    assert sum(section.limit_s for section in before_tests if section.is_timed) < 2 * gpu_check.BUDGET_S
    assert all(section.case_limit_s <= section.limit_s < gpu_check.BUDGET_S for section in found)
    files = {f"gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {section.argument for section in found if section.is_session} == files | set(EMULATED_TESTS)
    assert all((ROOT / "tests" / file).is_file() for file in EMULATED_TESTS)


def test_every_section_names_its_function() -> None:
    for section in sections():
        module, _, function = section.source.partition(":")
        file = ROOT / "tools" / "gpu" / f"{module.replace('.', '/')}.py"
        assert f"def {function}(" in file.read_text(), section.name


def test_sanitizers_watch_every_kind_of_product_and_attention() -> None:
    """Recurrent states and sampling are left out for time."""
    checked = {section.name for section in sections() if section.source == "kernels.cases:checked"}
    assert checked - set(sanitizer.WATCHED) == {"recurrent", "sampling"}
    assert set(sanitizer.WATCHED) <= checked


def test_what_the_parent_imports_needs_no_package() -> None:
    """On a bare machine it runs before anything is unpacked."""
    code = "import sys; sys.path.insert(0, '.'); import tools.gpu_check; print([n for n in sys.modules if n in "
    code += "('numpy', 'numba', 'msgspec', 'cuda', 'runtime.device.gpu')])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def ready(expected: np.ndarray) -> Prepared:
    rows = np.arange(len(expected))
    return Prepared(lambda: None, 0, expected.shape, "f32", rows, expected, lambda *_: lambda: None)


def test_a_wrong_result_and_nan_are_errors() -> None:
    expected = np.array([1.0, -4.0], np.float32)
    assert errors(np.array([1.0, -4.2], np.float32), ready(expected), 0.12, "ours") == {
        "error_share": pytest.approx(0.05), "error_rms": pytest.approx(0.2 / 17**0.5),
    }  # fmt: skip
    for wrong in ([1.5, -4.0], [np.nan, -4.0], [np.inf, -4.0]):
        with pytest.raises(AssertionError, match="ours result is wrong"):
            errors(np.array(wrong, np.float32), ready(expected), 0.12, "ours")


def test_texts_in_a_models_own_tokens() -> None:
    """Without the packages of its tokenizer, and for these the same."""
    pytest.importorskip("regex")
    from runtime.text.load import read_tokenizer
    from tools.gpu.serving.asking import DEMO, first_difference, ids_of
    from tools.gpu.serving.speculation import QUESTIONS

    tokenizer = read_tokenizer(DEMO)
    prompts = [f"<|user|>{question}<|assistant|>" for question in QUESTIONS]
    assert [ids_of(DEMO, prompt) for prompt in prompts] == [tokenizer.encode(prompt) for prompt in prompts]
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3]], [[1, 2], [3, 4]]) == "answer 1 differs from token 1 on: [], not [4]"


def test_the_pictures_answers_are_the_cpus() -> None:
    """Those that a GPU's are compared with."""
    from tools.gpu.serving import vision

    assert vision.answers(Options("cpu"), "float32") == json.loads(vision.ANSWERS.read_text())


@pytest.mark.emulator
def test_a_wrong_product_says_where() -> None:
    gpu = new_gpu()
    case = product_case("auto", 3, 64, 128, has_bias=True)
    assert check(gpu, case)["error_share"] < 1e-2
    _inputs, ready = prepare(gpu, case, 0)
    ready.expected += np.eye(3, 64, 5, dtype=np.float32) * 99
    with pytest.raises(AssertionError, match=r"off by .* row \d, element \[[567]\]: .* 1.6% of the elements are off"):
        verify(gpu, case, ready)
    with pytest.raises(AssertionError, match="written after the result"):
        verify(gpu, case, ready, lambda: gpu.fill(ready.out + 3 * 64 * 2, 0, 1))


@pytest.mark.exhaustive  # half a minute of translation
@pytest.mark.emulator
@pytest.mark.parametrize("gate", hopper.GATES)
def test_gated_products(gate: str) -> None:
    assert check(new_gpu(), product_case("auto", 130, 72, 64, activation=gate))["error_share"] < 1e-2


class FakeSection:
    is_session = is_timed = False

    def __init__(self, *cases: Case) -> None:
        self._cases = cases

    def start(self, options: Options) -> Iterator[Case]:
        yield from self._cases


def test_a_worker_reports_each_case_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    path = tmp_path / "results"

    def wrong() -> dict[str, Any]:
        seen.append(len(path.read_text().splitlines()))
        raise AssertionError("two is wrong")

    monkeypatch.setattr(worker, "is_lost", lambda options: False)
    section: Any = FakeSection(Case("one", lambda: {"x": 1}), Case("known", wrong), Case("two", wrong))
    assert worker.run(section, Options("cuda:0"), path, ["known"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert seen == [3]
    assert [line.get("begin") or line.get("end") for line in lines] == ["one", "one", "two", "two", None]
    assert (lines[1]["result"], lines[3]["error"]) == ({"x": 1}, "AssertionError: two is wrong")
    assert lines[4] == {"over": True}


def test_a_lost_device_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "is_lost", lambda options: True)

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(worker.os, "_exit", leave)
    lines = worker.Lines(tmp_path / "results", Options("cuda:0"))
    lines.write(end="one", result={})
    with pytest.raises(SystemExit) as ended:
        lines.write(end="two", error="LaunchError")
    lines.close()
    assert ended.value.code == worker.LOST


def event(name: str, start: float, duration: float, correlation: int, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": duration, "args": {"correlation": correlation}}


def test_the_timeline_of_a_graphs_launch() -> None:
    """Kernels of one launch share its correlation; what is launched by itself is no step."""
    steps = [
        [event(f"k{number}", 1000.0 * launch + 3 * number, 2.0 + launch, launch) for number in range(10)]
        for launch in (1, 2, 3)
    ]
    steps[1].append(event("extra", 2500.0, 1.0, 2))
    alone = [event("prefill", 10.0, 5.0, 99), event("launch", 0.0, 1.0, 1, kind="cuda_runtime")]
    found = graph_timeline.steps_of({"traceEvents": [*alone, *steps[0], *steps[1], *steps[2]]})
    assert [len(step) for step in found] == [10, 11, 10]
    step = graph_timeline.median_step(found)
    assert step[0] == ("k0", 0.0, 5.0)  # the longer of the two alike
    assert step[9][1] == 27.0
    assert graph_timeline.gaps(step) == {"sum": 0, "median": 0.0, "overlap": 18.0}
    assert graph_timeline.gaps(found[0]) == {"sum": 0, "median": 0.0, "overlap": 0}


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--sections", "nothing"], "'nothing' is none of environment"),
        (["--bundle", str(tmp_path / "none")], "is no folder"),
        (["--bundle", str(tmp_path)], "holds neither"),
    ):
        with pytest.raises(SystemExit) as ended:
            gpu_check.main([*arguments, "--out", str(tmp_path / "out")])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
