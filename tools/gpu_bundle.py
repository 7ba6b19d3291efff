"""Bundles everything that gpu_check needs on a machine without compiler and network, in one folder.

    python -m tools.gpu_bundle gpu_bundle                                  # for sm_90a; kernels, and packages for 3.12
    python -m tools.gpu_bundle gpu_bundle --image ptx --quick --no-packages    # for gpu_check --device emulated:sm_90a

Kernels: each section of gpu_check, and the serving of its models in all kinds of batches, runs on a dummy device that
    records launches (`gpu/checking/collect.py`). The recorded kernels are compiled, unless cached, into one bundle for
    each architecture, where KernelCache finds them by sources, specialisation and architecture. Cubins are checked to
    need no symbol from elsewhere. cases.json names the kernels of each case, for `gpu_check --changed-since`.

Packages: wheels of this environment's versions, for the given Python and machine, of packages that a GPU image may lack
    or have too old. They are used only then (`gpu/checking/unpack.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from runtime.device.compiled_kernel import Bundle, merge_bundles  # noqa: E402
from tools.gpu.checking.changed import CASES  # noqa: E402
from tools.gpu.checking.elf_symbols import undefined_symbols  # noqa: E402
from tools.gpu.checking.unpack import PACKAGES  # noqa: E402
from tools.gpu.sections import sections  # noqa: E402

MOST_BYTES = 64 << 20
"""Bytes that may travel to the machine: the tracked files and the folder."""

CARRIED = ("packaging", "msgspec", "gguf", "llguidance", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-pathfinder")
GLIBCS = (17, 24, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 whose wheels may be taken: the machine's own is 2.35 or newer."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_bundle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], help="sm_90a, sm_80 ...")
    parser.add_argument("--image", choices=("cubin", "ptx"), default="cubin", help="ptx for emulated devices")
    parser.add_argument("--quick", action="store_true", help="the kernels of gpu_check --quick")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="only what these sections launch")
    parser.add_argument("--python", default="3.12", help="of the machine that it is for")
    parser.add_argument("--no-packages", action="store_true", help="kernels alone")
    asked = parser.parse_args(arguments)
    names = [section.name for section in sections()]
    if unknown := [name for name in asked.sections or () if name not in names]:
        parser.error(f"--sections {unknown[0]!r} is none of {', '.join(names)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    problems = []
    cases: dict[str, dict[str, list[str]]] = {}
    for arch in asked.arch:
        chosen = [name for name in names if not asked.sections or name in asked.sections]
        problems += write_kernels(asked.folder, arch, asked.image, chosen, cases, is_quick=asked.quick)
    (asked.folder / CASES).write_text(json.dumps(cases) + "\n", encoding="utf-8")
    if not asked.no_packages:
        write_packages(asked.folder, asked.python)
    size = sum(path.stat().st_size for path in asked.folder.iterdir())
    print(f"{asked.folder}: {size / 1e6:.1f} MB")
    if size > (room := MOST_BYTES - tracked_bytes()):
        problems.append(f"{size:,} bytes, at most {room:,} can be carried beside the tracked files")
    print("\n".join(problems))
    return int(bool(problems))


def tracked_bytes() -> int:
    """The size of the working tree's tracked files; 0 outside of git."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False).stdout
    paths = [ROOT / name for name in os.fsdecode(listed).split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def write_kernels(
    folder: Path, arch: str, image: str, names: Sequence[str], cases: dict[str, dict[str, list[str]]], *, is_quick: bool
) -> list[str]:
    """Writes the bundle of the sections' kernels, and their names by case to `cases`. Returns the problems."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        parts = collect(Path(scratch), arch, image, names, problems, cases, is_quick=is_quick)
        if not parts:
            return [*problems, f"{arch}: nothing was launched"]
        path = folder / f"gpu_check-{arch}-{image}.bundle"
        merge_bundles(path, parts)
    bundle = Bundle(path)
    if image == "cubin":
        for kernel in bundle.kernels():
            if missing := undefined_symbols(kernel.image):
                problems.append(f"{kernel.name} for {arch} needs {', '.join(missing)} from elsewhere")
    print(f"{path.name}: {len(bundle)} kernels, {path.stat().st_size / 1e6:.1f} MB")
    return problems


def collect(
    scratch: Path, arch: str, image: str, names: Sequence[str], problems: list[str],
    cases: dict[str, dict[str, list[str]]], *, is_quick: bool,
) -> list[Path]:  # fmt: skip
    """A bundle of each section with launches; as many at once as there are cores."""
    device = "cuda:0" if image == "cubin" else f"emulated:{arch}"
    waiting = list(enumerate(names))
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    parts = []
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            number, name = waiting.pop(0)
            part = scratch / f"{number}.bundle"
            command = [sys.executable, "-m", "tools.gpu.checking.collect", name, "--device", device, "--arch", arch]
            command += ["--part", str(part), *["--quick"] * is_quick]
            with part.with_suffix(".log").open("wb") as log:
                running[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT), part
        for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
            process, part = running.pop(name)
            said = part.with_suffix(".log").read_text(errors="replace", encoding="utf-8").strip()
            if process.returncode:
                problems.append(f"{name}: status {process.returncode}: {said[-2000:]}")
                continue
            found = json.loads(said.splitlines()[-1])
            print(f"{arch} {name}: {found['kernels']} kernels, {found['compiled']} compiled now", flush=True)
            for what in ("refused", "odd"):
                for where, why in found[what].items():
                    print(f"  {where}: {why.splitlines()[0]}", flush=True)
            of_section = cases.setdefault(name, {})
            for case, kernels in found["cases"].items():
                of_section[case] = sorted({*of_section.get(case, ()), *kernels})
            parts += [part] * part.exists()
        time.sleep(0.1)
    return parts


def write_packages(folder: Path, python: str) -> None:
    """Downloads the wheels and lists the acceptable versions of each. Raises CalledProcessError with pip's message."""
    for old in folder.glob("*.whl"):
        old.unlink()
    tags = [word for minor in GLIBCS for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    tags += ["--platform", "manylinux2014_x86_64", "--implementation", "cp", "--python-version", python]
    tags += [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    known: list[dict[str, Any]] = []
    for name in CARRIED:
        before = set(folder.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([*pip, *tags, f"{name}=={version(name)}"], check=True)
        (wheel,) = set(folder.glob("*.whl")) - before
        wanted = needs(name)
        known.append({"name": name, "version": version(name), "file": wheel.name, "needs": wanted})
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, unless {wanted or 'any version'} is there")
    (folder / PACKAGES).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def needs(name: str) -> str:
    """The versions of a package that this project and the other bundled packages accept."""
    found: set[str] = set()
    for package in ("xserv", *CARRIED):
        for text in requires(package) or ():
            requirement = Requirement(text)
            is_of_cuda = requirement.marker is None or requirement.marker.evaluate({"extra": "cuda"})
            if canonicalize_name(requirement.name) == canonicalize_name(name) and is_of_cuda:
                found.update(map(str, requirement.specifier))
    return ",".join(sorted(found))


if __name__ == "__main__":
    sys.exit(main())
