"""A bundle made here serves a check in a bare environment: one without the kernels' compiler and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from runtime.device.compiled_kernel import Bundle, merge_bundles, write_bundle
from runtime.errors import DeviceError
from tests.runtime.device.kernels import scale
from tests.runtime.device.test_kernel_bundle import compiled
from tools.gpu.checking import unpack
from tools.gpu.checking.elf_symbols import symbols, undefined_symbols
from tools.gpu.sections import ROOT, sections

DEVICE = "emulated:sm_90a"
HAS_COMPILER = "from runtime.device.assemble import require_compiler; require_compiler()"


class Bare:
    """A Python with this one's packages but for NVIDIA's libraries, whose cache has no kernels."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        for path in Path(sys.prefix, "lib", site.parent.name, "site-packages").iterdir():
            if not path.name.startswith(("nvidia", "__editable__", "__pycache__", "xserv")):
                (site / path.name).symlink_to(path)
        ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xserv"
        self.cache = folder / "cache" / "xserv"
        self.cache.mkdir(parents=True, mode=0o700)
        for kind in ("numba", "emulator"):  # what the processor runs
            (ours / kind).mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.cache / kind).symlink_to(ours / kind)
        self._python = folder / "venv" / "bin" / "python"
        self._environment = {
            "PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        alone = ["unshare", "--net"] if os.geteuid() == 0 else []  # no network: only root may take it away
        return subprocess.run(
            [*alone, str(self._python), *arguments], cwd=ROOT, env=self._environment, capture_output=True, text=True,
            timeout=1700,
        )  # fmt: skip


def make_bundle(folder: Path, *names: str) -> Path:
    """The quick kernels of sections, as PTX."""
    command = [sys.executable, "-m", "tools.gpu_bundle", str(folder), "--image", "ptx", "--quick", "--no-packages"]
    done = subprocess.run([*command, "--sections", *names], cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def check(bare: Bare, bundle: Path | None, out: Path, *names: str) -> tuple[int, dict[str, Any]]:
    """gpu_check's status and what its report says of the sections."""
    arguments = ["-m", "tools.gpu_check", "--device", DEVICE, "--quick", "--out", str(out), "--budget", "1600"]
    arguments += ["--bundle", str(bundle)] if bundle is not None else []
    done = bare.run(*arguments, "--sections", *names)
    assert (out / "report.json").is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "report.json").read_text())["sections"]
    return done.returncode, found


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_a_check_in_a_bare_environment(tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    done = bare.run("-c", HAS_COMPILER)
    assert "the kernels' compiler lacks libnvrtc (pip install nvidia-cuda-nvrtc)" in done.stderr
    status, found = check(bare, make_bundle(tmp_path / "bundle", "rows"), tmp_path / "out", "rows")
    assert (status, found["rows"]["status"]) == (0, "ok"), found
    assert len(found["rows"]["cases"]) == 4
    assert all(case["result"]["error_share"] < 1e-2 for case in found["rows"]["cases"].values())
    assert [path.suffix for path in (bare.cache / "kernels").iterdir() if path.is_file()] == [".bundle"]
    assert not list((bare.cache / "kernels").glob("*/*.kernel"))  # nothing was compiled


@pytest.mark.exhaustive  # a quarter of an hour
@pytest.mark.emulator
def test_the_whole_check_in_a_bare_environment(tmp_path: Path) -> None:
    bare, names = Bare(tmp_path), [section.name for section in sections()]
    assert check(bare, None, tmp_path / "without", "rows")[1]["rows"]["status"] == "failed"
    status, found = check(bare, make_bundle(tmp_path / "bundle", *names), tmp_path / "out", *names)
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        section.name: "skipped" if section.needs_hardware else "ok" for section in sections()
    }
    assert status == 0
    assert not list((bare.cache / "kernels").glob("*/*.kernel"))


def test_bundles_are_merged(tmp_path: Path) -> None:
    parts = [tmp_path / f"{number}.bundle" for number in range(2)]
    write_bundle(parts[0], [(each, compiled(each)) for each in (scale(), scale(2.0))])
    write_bundle(parts[1], [(each, compiled(each)) for each in (scale(2.0), scale(3.0))])
    merge_bundles(tmp_path / "all.bundle", parts)
    merged = Bundle(tmp_path / "all.bundle")
    assert sorted(kernel.image for kernel in merged.kernels()) == sorted(
        compiled(scale(factor)).image for factor in (1.0, 2.0, 3.0)
    )
    parts[1].write_bytes(b"")
    with pytest.raises(DeviceError, match=r"1\.bundle"):
        merge_bundles(tmp_path / "all.bundle", parts)


def test_wheels_are_used_where_something_is_missing_or_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {distribution.name for distribution in distributions()}
    assert "numpy" in here
    wheels = {"numpy": "<1", "packaging": "", "msgspec": ">=0.1", "not-there": "==1.0"}
    known = []
    for name, needs in wheels.items():
        known.append({"name": name, "version": "1.0", "file": f"{name}-1.0.whl", "needs": needs})
        with zipfile.ZipFile(tmp_path / f"{name}-1.0.whl", "w") as wheel:
            wheel.writestr(f"{name.replace('-', '_')}_of_the_bundle.py", "VALUE = 1\n")
    (tmp_path / unpack.PACKAGES).write_text(json.dumps(known))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert [path.name for path in unpack.wanted_wheels(tmp_path)] == ["numpy-1.0.whl", "not-there-1.0.whl"]
    (tmp_path / "scratch").mkdir()
    environment = unpack.prepare(tmp_path, tmp_path / "scratch")
    code = "import not_there_of_the_bundle, numpy_of_the_bundle; print(not_there_of_the_bundle.VALUE)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
    assert not (tmp_path / "scratch" / "site" / "msgspec_of_the_bundle.py").exists()


def test_undefined_symbols_of_machine_code() -> None:
    from runtime.device.assemble import assemble

    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() {{ {} ret; }}"
    for arch in ("sm_90a", "sm_80"):
        plain = assemble(text.format(""), arch).cubin
        assert undefined_symbols(plain) == []
    assert "k" in {name for name, _ in symbols(plain)}
    declared = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);\n"
    call = "{{ .param .b32 r; .param .b64 f; .param .b64 v; call.uni (r), vprintf, (f, v); }}"
    needing = assemble(text.replace(".visible", declared + ".visible").format(call.format()), "sm_80").cubin
    assert undefined_symbols(needing) == ["vprintf"]
    with pytest.raises(ValueError, match="no cubin"):
        undefined_symbols(b"\x7fELF\x01")
