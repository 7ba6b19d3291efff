"""Where the compiler's libraries are looked for, and what is said of those that are missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cuda.pathfinder
import pytest

from runtime.device import assemble
from runtime.device.errors import CompileError


@pytest.fixture(autouse=True)
def _no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty PATH, none of the packages, and no variable; what a test sets goes again."""
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    monkeypatch.setattr(assemble, "_has_package", lambda name: False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A toolkit whose nvcc is on the PATH."""
    folder = tmp_path / "cuda"
    (folder / "bin").mkdir(parents=True)
    (folder / "nvvm").mkdir()
    (folder / "bin" / "nvcc").write_text("")
    (folder / "bin" / "nvcc").chmod(0o755)
    return folder


def loader(missing: tuple[str, ...]) -> Callable[[str], None]:
    def load(name: str) -> None:
        if name in missing:
            raise RuntimeError(f"no {name}")

    return load


def test_the_toolkit_of_nvcc_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", loader(()))
    assert assemble.toolkit() == home
    assemble.require_compiler.__wrapped__()
    assert os.environ["CUDA_HOME"] == str(home)
    assert assemble.toolkit_version() == str(home)
    (home / "version.json").write_text("13.0")
    assert assemble.toolkit_version() == f"{home} 13.0"


def test_variables_and_packages_come_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", loader(()))
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    assert assemble.toolkit() == Path("/elsewhere")
    assemble.require_compiler.__wrapped__()
    assert os.environ["CUDA_HOME"] == "/elsewhere"
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setattr(assemble, "_has_package", lambda name: True)
    assemble.require_compiler.__wrapped__()
    assert os.environ["CUDA_HOME"] == ""
    assert assemble.toolkit_version() == "-"


def test_each_missing_library_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", loader(("nvrtc", "nvJitLink")))
    with pytest.raises(CompileError) as raised:
        assemble.require_compiler.__wrapped__()
    assert "lacks libnvrtc (pip install nvidia-cuda-nvrtc), libnvJitLink (pip install nvidia-nvjitlink)" in str(
        raised.value
    )
    assert "nvvm" not in str(raised.value)
    assert f"the CUDA toolkit {home}" in str(raised.value)
    monkeypatch.setenv("CUDA_HOME", "")
    (home / "bin" / "nvcc").unlink()
    assert assemble.toolkit() is None
    with pytest.raises(CompileError, match="no CUDA toolkit, since nvcc is not on the PATH"):
        assemble.require_compiler.__wrapped__()
