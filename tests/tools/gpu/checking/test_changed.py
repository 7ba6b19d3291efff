"""`gpu_check --changed-since` leaves out what launches the kernels of an earlier bundle, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import gpu_check
from tools.gpu.checking.changed import CASES, unchanged_since
from tools.gpu.sections import ROOT, Section

LAUNCHED = {
    "rows": {"norm": ["a"], "copy": ["a", "b"], "time": []}, "gemm": {"small": ["b"], "large": ["c"]},
    "tests": {"one": ["a"]}, "environment": {"versions": []},
}  # fmt: skip


def bundle(folder: Path, images: dict[str, str], *, has_cases: bool = True) -> Path:
    folder.mkdir()
    kernels = [{"name": name, "arch": "sm_90a", "sha256": image} for name, image in images.items()]
    with zipfile.ZipFile(folder / "gpu_check-sm_90a-cubin.bundle", "w") as file:
        file.writestr("manifest.json", json.dumps({"kernels": kernels}))
    if has_cases:
        (folder / CASES).write_text(json.dumps(LAUNCHED))
    return folder


def test_only_cases_with_changed_kernels_run(tmp_path: Path) -> None:
    old, new = bundle(tmp_path / "old", {"a": "1", "b": "2"}), bundle(tmp_path / "new", {"a": "1", "b": "3", "c": "4"})
    for earlier in (old, *old.glob("*.bundle")):
        found = unchanged_since(earlier, new)
        assert found.cases == {"rows": ["norm"], "gemm": [], "tests": ["one"], "environment": []}
        assert found.sections == {"tests"}, "a case without kernels runs always"


def test_bundles_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, bare = bundle(tmp_path / "new", {"a": "1"}), bundle(tmp_path / "bare", {"a": "1"}, has_cases=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no zip")
    for earlier, later, words in (
        (new, bare, "bare has no cases.json"), (tmp_path / "empty", new, "empty has no kernels"),
        (tmp_path / "text", new, "text is no bundle of kernels"), (tmp_path / "not", new, "not has no kernels"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            unchanged_since(earlier, later)
    with pytest.raises(SystemExit):
        gpu_check.main(["--changed-since", str(new), "--out", str(tmp_path / "out")])
    assert "--changed-since compares with --bundle, which is missing" in capsys.readouterr().err


def test_sections_without_a_changed_kernel_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = bundle(tmp_path / "old", {"a": "1", "b": "2"}), bundle(tmp_path / "new", {"a": "1", "b": "3", "c": "4"})
    ran: dict[str, list[str]] = {}

    def run(section: Section, *rest: object) -> dict[str, object]:
        ran[section.name] = list(rest[-1])  # type: ignore[call-overload]
        return {"status": "ok", "seconds": 0.0, "cases": {}}

    monkeypatch.setattr(gpu_check, "run_section", run)
    monkeypatch.setattr(gpu_check, "prepare", lambda *_: {})
    monkeypatch.setattr(gpu_check, "sections", lambda: (Section(name, "nowhere:cases", 1) for name in LAUNCHED))
    arguments = ["--bundle", str(new), "--changed-since", str(old), "--out", str(tmp_path / "out")]
    assert gpu_check.main(arguments) == 0
    assert ran == {"rows": ["norm"], "gemm": [], "environment": []}
    report = json.loads((tmp_path / "out" / "report.json").read_text())["sections"]
    assert report["tests"] == {"status": "skipped", "why": "no kernel has changed", "seconds": 0.0, "cases": {}}


DRY_RUN = """
import json
from tools.gpu.checking.collect import dry_device, run_dry
from tools.gpu.sections import Options, find
_, launched = dry_device("emulated:sm_90a", "sm_90a")
print(json.dumps(run_dry(find("rows"), Options("emulated:sm_90a", is_quick=True, is_dry=True), launched)))
"""


@pytest.mark.emulator
def test_a_dry_run_tells_the_kernels_of_each_case() -> None:
    done = subprocess.run([sys.executable, "-c", DRY_RUN], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    odd, cases = json.loads(done.stdout.splitlines()[-1])
    assert odd == {}
    assert len(cases) == 4
    assert all(kernels for kernels in cases.values()), cases
    assert any(name.startswith("rms_norm") for names in cases.values() for name in names), cases
    assert len(set(map(tuple, cases.values()))) == 4, "each has its own"
