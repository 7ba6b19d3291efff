"""Installs the bundle of tools/gpu_bundle.py on its target machine. Needs only Python.

    FOLDER/*.bundle        compiled kernels (`runtime.device.compiled_kernel`), which go into the cache of kernels
    FOLDER/packages.json   [{"name", "version", "file", "needs"}]: wheels, and the acceptable versions of each
    FOLDER/*.whl

A wheel is used only if its package is missing or has an unacceptable version: working packages are not shadowed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from numba_kernels.cache_files import cache_root
from tools.gpu.sections import ROOT

PACKAGES = "packages.json"
KERNELS = "*.bundle"
_SITE = """import site
site.addsitedir({folder!r})  # so that .pth files count, as numba-cuda's does
"""


def prepare(bundle: Path | None, scratch: Path) -> dict[str, str]:
    """The environment for processes that import this project. Wheels are unpacked below `scratch`, kernels copied into
    the cache.

    Raises FileNotFoundError if there is no such folder, ValueError if it holds neither kernels nor wheels.
    """
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if bundle is not None:
        kernels = copy_kernels(bundle)
        wheels = wanted_wheels(bundle)
        if not kernels and not (bundle / PACKAGES).is_file():
            raise ValueError(f"{bundle} holds neither {KERNELS} nor {PACKAGES}: make it by tools/gpu_bundle.py")
        site = scratch / "site"
        site.mkdir()
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                files.extractall(site)
        (site / "sitecustomize.py").write_text(_SITE.format(folder=str(site)), encoding="utf-8")
        folders.insert(0, str(site))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def copy_kernels(bundle: Path) -> list[Path]:
    """Copies the bundles of kernels into the cache; returns their paths there. Raises FileNotFoundError."""
    if not bundle.is_dir():
        raise FileNotFoundError(f"{bundle} is no folder")
    cache = cache_root("kernels")
    found = sorted(bundle.glob(KERNELS))
    if found:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [Path(shutil.copyfile(path, cache / path.name)) for path in found]


def wanted_wheels(bundle: Path) -> list[Path]:
    """The wheels whose packages this Python lacks, or has in an unacceptable version."""
    if not (bundle / PACKAGES).is_file():
        return []
    known: list[dict[str, str]] = json.loads((bundle / PACKAGES).read_text(encoding="utf-8"))
    for each in known:
        if each["name"] == "packaging":
            sys.path.append(str(bundle / each["file"]))  # a wheel is a zip, which Python can import from
    return [bundle / each["file"] for each in known if not does(installed(each["name"]), each)]


def installed(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def does(found: str | None, package: Mapping[str, str]) -> bool:
    """Whether the version found is acceptable."""
    from packaging.specifiers import SpecifierSet

    return found is not None and SpecifierSet(package["needs"], prereleases=True).contains(found)
