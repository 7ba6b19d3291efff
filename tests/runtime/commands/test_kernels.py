"""`xserv kernels build | list | clear`, and what `xserv info` says of GPUs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cuda.bindings import driver as bindings
from typer.testing import CliRunner

from runtime.cli import app
from runtime.commands import info_report
from runtime.commands.info_report import devices
from runtime.device import gpu
from runtime.device.driver import Driver
from runtime.device.errors import NoDriverError
from runtime.device.kernel_cache import KernelCache
from tests.runtime.device.fake_driver import FakeDriver


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "_opened", {})  # devices that are opened now keep their kernels there
    return tmp_path / "xserv" / "kernels"


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["kernels", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.exhaustive
def test_build_list_clear(folder: Path) -> None:
    family = ("--match", "add_embedding_f32")
    status, out, err = invoke("build", "--arch", "sm_86", *family)
    assert (status, "sm_86" in out) == (0, True)
    count = int(out.split()[0])
    assert f"{count} compiled in" in out
    assert all(line.startswith("compiling kernels for sm_86") for line in err.splitlines())
    status, out, err = invoke("build", "--arch", "sm_86", *family)
    assert out.startswith(f"{count} kernels for sm_86: 0 compiled in ")
    assert f" s, {count} were there" in out
    status, out, _ = invoke("build", "--arch", "sm_80", "--image", "ptx", *family)
    assert f"{count} compiled" in out
    victim = next(iter(KernelCache(folder).entries())).path
    victim.write_bytes(b"broken")
    status, out, _ = invoke("list")
    assert status == 0
    assert out.count("add_embedding_f32") == 2 * count
    assert out.count("registers") == count - ("sm_86" in victim.name)
    assert "corrupt, and compiled anew" in out
    sizes = [entry.size_bytes for entry in KernelCache(folder).entries()]
    assert f"{2 * count} kernels, {sum(sizes):,} B, and {KernelCache(folder).ir_bytes():,} B of LLVM IR" in out
    status, out, _ = invoke("clear")
    assert f"{2 * count} kernels removed" in out
    assert "0 kernels" in invoke("list")[1]


@pytest.mark.exhaustive  # tests/runtime/device and tests/tools/gpu have bundles each time
def test_a_bundle_holds_what_a_launch_needs(folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.zip" for number in range(2)]
    for file in files:
        status, out, _ = invoke("build", "--arch", "sm_90a", "--match", "add_embedding_f32", "--bundle", str(file))
        assert (status, str(file) in out) == (0, True)
    assert files[0].read_bytes() == files[1].read_bytes()
    with zipfile.ZipFile(files[0]) as bundle:
        manifest = json.loads(bundle.read("manifest.json"))
        assert manifest["arch"] == "sm_90a"
        assert len(manifest["kernels"]) == len(bundle.namelist()) - 1 >= 1
        for facts in manifest["kernels"]:
            image = bundle.read(facts["file"])
            assert image[:4] == b"\x7fELF"
            assert facts["name"].encode() in image
            assert facts["sha256"] == hashlib.sha256(image).hexdigest()
            assert set(facts["argument_format"].split()) <= {*"QIifBbHhqd?", "128s"}
            assert facts["max_threads"] > 0
            assert facts["num_registers"] > 0
    (folder / "other.bundle").write_bytes(files[0].read_bytes())
    count = len(manifest["kernels"])
    assert f"other.bundle: {count} kernels for sm_90a, cubin\n" in invoke("list")[1]
    assert f"{2 * count} kernels removed" in invoke("clear")[1]
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--arch", "sm_9000"], "'sm_9000' is not one such as 'sm_80'"),
        pytest.param(
            ["build", "--match", "no such kernel"],
            "no kernel for sm_90a has 'no such kernel'",
            marks=pytest.mark.exhaustive,  # asks processes of its own
        ),
        (["build", "--image", "elf"], "--image"),
        ([], "Missing command"),
    ],
)
def test_wrong_arguments(folder: Path, arguments: list[str], words: str) -> None:
    status, _, err = invoke(*arguments)
    assert status == 2
    assert words in err
    assert not folder.exists()


def test_info_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(FakeDriver(num_devices=2, total_bytes=80 << 30), bindings)
    monkeypatch.setattr(info_report, "open_driver", lambda arch: driver)
    found = {entry["device"]: entry for entry in devices("cpu")}
    assert list(found) == ["cpu", "cuda:0", "cuda:1"]
    assert found["cuda:1"]["properties"]["num_sms"] == 4
    for words in ("Fake", "80.0 GiB", "compute capability 9.0", "4 SMs", "228.0 KiB shared memory each", "L2"):
        assert words in found["cuda:0"]["description"]


def test_info_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arch: str | None) -> Driver:
        raise NoDriverError("no CUDA driver: install one")

    monkeypatch.setattr(info_report, "open_driver", refuse)
    entry = devices("cpu")[1]
    assert (entry["device"], entry["is_usable"]) == ("cuda:0", False)
    assert "install one" in entry["description"]


def test_info_of_an_emulated_device() -> None:
    entry = devices("emulated:sm_80")[-1]
    assert (entry["device"], entry["is_usable"]) == ("emulated:sm_80", True)
    assert entry["properties"]["capability"] == (8, 0)
    assert "A100" in entry["description"]


WITHOUT_THE_EXTRA = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] in ("cuda", "numba_cuda")]:
    del sys.modules[name]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from typer.testing import CliRunner
from runtime.cli import app
result = CliRunner().invoke(app, ["kernels", "build", *sys.argv[2:]])
print(result.exit_code, result.stderr)
"""


@pytest.mark.parametrize("missing", ["cuda,numba_cuda", "numba_cuda"])
def test_build_without_the_extra_says_how_to_get_it(missing: str) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, missing, "--match", "rope"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("2 xserv: error: the kernels' compiler needs cuda-python and numba-cuda"), done.stdout
    assert "pip install '.[cuda]'" in done.stdout
