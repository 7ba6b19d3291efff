"""Folders of the user's that are called as packages of ours: the command never meets them, a library says so."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("xserv")
NAMES = ("models", "server", "tests", "tokenizer", "numba_kernels", "runtime")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with packages of these names, all of which end whoever imports them."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a foreign package was imported')\n")
    return tmp_path


def run(folder: Path, *words: str, stdin: str = "", places: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if places:
        environment["PYTHONPATH"] = places
    return subprocess.run(
        words, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command_never_meets_them(folder: Path) -> None:
    """Where Python looks into the folder before all others."""
    done = run(folder, str(COMMAND), "tokenize", "some text", places=".")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Ġte" in done.stdout


def test_nor_does_the_engines_process(folder: Path) -> None:
    """It is Python again, with the same places of modules."""
    script = (
        "from runtime.own_packages import python_module; import subprocess, sys;"
        "sys.exit(subprocess.call([sys.executable, '-P', *python_module('runtime.engine.process.main'), '--help']))"
    )
    done = run(folder, sys.executable, "-P", "-c", script, places=f"{ROOT}:.")
    assert done.returncode == 0, done.stderr
    done = run(folder, sys.executable, str(ROOT / "runtime" / "own_packages.py"), "runtime.engine.process.main", "-h")
    assert (done.returncode, "--fd" in done.stdout) == (0, True), done.stderr


def test_python_m_xserv_is_the_command(folder: Path) -> None:
    done = run(folder, sys.executable, "-m", "xserv", "info", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: xserv info")


@pytest.mark.parametrize(
    ("name", "is_package"), [("models", True), ("models", False), ("server", True), ("runtime", True)]
)
def test_the_library_names_what_hides_a_package(tmp_path: Path, name: str, is_package: bool) -> None:
    (tmp_path / name).mkdir()
    if is_package:
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a foreign package was imported')\n")
    done = run(tmp_path, sys.executable, "-c", "from xserv import SamplingParams; SamplingParams()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / name} hides xserv's own package '{name}'")
    if name != "runtime":  # then the module that is asked for is not ours
        done = run(tmp_path, sys.executable, "-m", "runtime.cli", "--help")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"xserv: error: {tmp_path / name} hides")
        assert done.stderr.count("\n") == 1


def test_other_folders_are_nobodys_business(tmp_path: Path) -> None:
    for name in ("tests", "tools", "data"):
        (tmp_path / name).mkdir()
    script = "import xserv; print(xserv.SamplingParams().max_tokens, 'LLM' in dir(xserv))"
    done = run(tmp_path, sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (0, "16 True\n"), done.stderr


def test_a_wrong_name_is_an_attribute_error() -> None:
    import xserv

    with pytest.raises(AttributeError, match="has no attribute 'LLn'"):
        _ = xserv.LLn


@pytest.mark.exhaustive
def test_a_wheel_works(tmp_path: Path) -> None:
    """It holds the package `xserv` and the marks of typed packages, and works where it is unpacked."""
    git = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, check=True)
    source = tmp_path / "source"
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and "setuptools" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("no index of packages to take setuptools from")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("xserv-*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    expected = {"xserv/__init__.py", "xserv/py.typed", "runtime/py.typed", "models/demo/config.json"}
    demos = ("demo", "demo_hybrid", "demo_moe", "demo_vision")
    assert expected | {f"models/{name}/model.safetensors" for name in demos} <= set(names)
    assert not [name for name in names if name.startswith(("runtime/facade", "tests", "tools"))]
    script = "from xserv import SamplingParams; import runtime; print(runtime.__file__)"
    done = run(tmp_path, sys.executable, "-P", "-c", script, places=str(unpacked))
    assert (done.returncode, done.stdout.strip()) == (0, str(unpacked / "runtime" / "__init__.py")), done.stderr
    assert "xserv = xserv.command:main" in (next(unpacked.glob("*.dist-info")) / "entry_points.txt").read_text()
