"""Bundles: a cache finds in them what another machine compiled, with whatever tools, and nothing else."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numba_kernels.cuda.specialisation import Specialisation
from runtime.device import kernel_cache, kernel_key
from runtime.device.compiled_kernel import Bundle, CompiledKernel, write_bundle
from runtime.device.errors import CompileError
from runtime.device.kernel_cache import KernelCache
from runtime.errors import DeviceError
from tests.runtime.device.kernels import scale, scale_dependent


def compiled(specialisation: Specialisation, arch: str = "sm_90a", *, is_ptx: bool = False) -> CompiledKernel:
    """One that was never compiled."""
    return CompiledKernel(
        name=specialisation.name, arch=arch, is_ptx=is_ptx, argument_format="Q Q I f", waits_for_dependency=False,
        num_registers=16, spill_bytes=0, static_shared_bytes=0,
        image=f"{specialisation.name} {specialisation.constants}".encode() * 99,
    )  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """An empty one on a machine that has other tools, and no compiler."""

    def refuse(specialisation: Specialisation) -> tuple[str, ...]:
        raise CompileError(f"{specialisation.name}: there is no compiler")

    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setattr(kernel_cache, "_front_end", refuse)
    monkeypatch.setattr(kernel_cache, "tool_versions", lambda: "python 3.99, numba 0.99")
    return KernelCache(tmp_path / "kernels")


def bundle_of(cache: KernelCache, *specialisations: Specialisation, is_ptx: bool = False) -> Path:
    path = cache.folder / f"{'ptx' if is_ptx else 'cubin'}.bundle"
    write_bundle(path, [(each, compiled(each, is_ptx=is_ptx)) for each in specialisations])
    return path


def test_a_machine_without_a_compiler_finds_its_kernels(cache: KernelCache) -> None:
    bundle_of(cache, scale(), scale(2.0), scale())
    bundle_of(cache, scale_dependent(), is_ptx=True)
    assert [len(bundle) for bundle in cache.bundles] == [2, 1]
    assert cache.get(scale(), "sm_90a", is_ptx=False) == compiled(scale())
    assert cache.get(scale(2.0), "sm_90a", is_ptx=False) == compiled(scale(2.0))  # the same name
    assert cache.get(scale_dependent(), "sm_90a", is_ptx=True) == compiled(scale_dependent(), is_ptx=True)
    assert (cache.num_read, cache.num_compiled) == (3, 0)
    for asked, arch, is_ptx in (
        (scale(3.0), "sm_90a", False), (scale(), "sm_80", False), (scale(), "sm_90a", True),
        (scale_dependent(), "sm_90a", False),
    ):  # fmt: skip
        with pytest.raises(CompileError, match="there is no compiler"):
            cache.get(asked, arch, is_ptx=is_ptx)


def test_kernels_of_other_sources_are_not_found(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle_of(cache, scale())
    monkeypatch.setattr(kernel_key, "_digest_of_files", lambda names: "0" * 64)
    with pytest.raises(CompileError, match="there is no compiler"):
        cache.get(scale(), "sm_90a", is_ptx=False)


def test_what_was_compiled_here_comes_first(cache: KernelCache) -> None:
    bundle_of(cache, scale())
    ours = compiled(scale_dependent())
    cache._write(cache.path_of(scale(), "sm_90a", is_ptx=False), ours)
    assert cache.get(scale(), "sm_90a", is_ptx=False) == ours


def rewritten(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Each of the bundle's files as `change(name, content)`."""
    with zipfile.ZipFile(path) as bundle:
        files = {name: bundle.read(name) for name in bundle.namelist()}
    with zipfile.ZipFile(path, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(name, change(name, content))


def with_manifest(**changes: Any) -> Callable[[str, bytes], bytes]:
    return lambda name, content: (
        json.dumps(json.loads(content) | changes).encode() if name == "manifest.json" else content
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "BadZipFile"),
        (lambda path: path.write_bytes(b""), "BadZipFile"),
        (lambda path: rewritten(path, with_manifest(format=1)), "format 1, not 2"),
        (lambda path: rewritten(path, with_manifest(kernels=[{}])), "KeyError"),
        (lambda path: rewritten(path, lambda name, content: content[:9] + b"x" * (name[0] == "s") + content[9:]),
         "not what the manifest says"),
    ],
)  # fmt: skip
def test_a_damaged_bundle_is_named(cache: KernelCache, damage: Callable[[Path], Any], words: str) -> None:
    path = bundle_of(cache, scale())
    damage(path)
    with pytest.raises(DeviceError, match=rf"kernel bundle .*cubin\.bundle: .*{words}.*remove it"):
        cache.get(scale(), "sm_90a", is_ptx=False)


def test_a_folder_that_others_write_is_refused(cache: KernelCache) -> None:
    bundle_of(cache, scale())
    cache.folder.chmod(0o777)
    with pytest.raises(DeviceError, match="others may write"):
        _ = cache.bundles


def test_clear_takes_bundles_along(cache: KernelCache) -> None:
    bundle_of(cache, scale(), scale(2.0))
    (cache.folder / "broken.bundle").write_bytes(b"")
    assert cache.clear() == 2
    assert list(cache.folder.iterdir()) == []


def test_a_bundle_says_whether_it_is_of_the_present_sources(cache: KernelCache) -> None:
    path = bundle_of(cache, scale())
    assert Bundle(path).is_current
    rewritten(path, with_manifest(sources="others"))
    assert not Bundle(path).is_current
