"""Compiled kernels on disk: what changes the key, what survives, who may write. Compiles a few small kernels."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numba import cuda, float32, types
from numba.cuda.core import ir_utils

from numba_kernels import source_digests
from numba_kernels.cuda.compile import compile_ptx
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.specialisation import Specialisation
from runtime.device import kernel_cache, kernel_key
from runtime.device.compiled_kernel import CompiledKernel
from runtime.device.errors import CompileError
from runtime.device.kernel_cache import KernelCache, is_meant_for, needs_of
from runtime.errors import DeviceError, InvalidArgumentError
from tests.runtime.device.kernels import scale, scale_dependent

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def test_a_kernel_is_compiled_once(cache: KernelCache) -> None:
    first = cache.get(scale(), "sm_80", is_ptx=False)
    again = KernelCache(cache.folder)
    second = again.get(scale(), "sm_80", is_ptx=False)
    assert first == second
    assert (cache.num_compiled, cache.num_read, again.num_compiled, again.num_read) == (1, 0, 0, 1)
    assert (first.name, first.arch, first.is_ptx, first.argument_format) == ("scale", "sm_80", False, "Q Q I f")
    assert first.image[:4] == b"\x7fELF"
    assert first.num_registers > 0
    assert (first.spill_bytes, first.static_shared_bytes, first.waits_for_dependency) == (0, 0, False)


def test_ptx_for_emulated_devices(cache: KernelCache) -> None:
    kernel = cache.get(scale_dependent(), "sm_90a", is_ptx=True)
    text = kernel.image.decode()
    assert text.endswith("\0")
    assert ".target sm_90a" in text
    assert ".visible .entry scale_dependent(" in text
    assert text.count("scale_dependent_param_0") >= 2  # declared and read: nothing keeps numba's own name
    assert kernel.waits_for_dependency
    assert kernel == KernelCache(cache.folder).get(scale_dependent(), "sm_90a", is_ptx=True)


def test_folders_and_files_are_the_users_alone(cache: KernelCache) -> None:
    before = os.umask(0)
    try:
        cache.get(scale(), "sm_80", is_ptx=True)
    finally:
        os.umask(before)
    path = cache.path_of(scale(), "sm_80", is_ptx=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    kinds = sorted(each.suffix for each in path.parent.iterdir())
    assert kinds == [".ir", ".kernel"]  # no partial file is left, and no lock


def test_a_folder_that_others_write_is_refused(cache: KernelCache) -> None:
    cache.get(scale(), "sm_80", is_ptx=True)
    cache.folder.chmod(0o777)
    with pytest.raises(DeviceError, match=r"others may write.*chmod 700"):
        cache.get(scale(), "sm_80", is_ptx=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-20] + b"x" + data[-19:],
        lambda data: data.replace(b'"Q Q I f"', b"17"),
        lambda data: data.replace(b'"name"', b'"other"'),
        lambda data: b"[]\n" + data.partition(b"\n")[2],
        lambda data: data.replace(b'"format": 4', b'"format": 0'),
        lambda data: os.urandom(300),
    ],
)
def test_a_corrupt_file_is_compiled_anew(cache: KernelCache, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compiled("scale", b"image of the kernel, long enough\0")
    monkeypatch.setattr(kernel_cache, "compile_kernel", lambda *_, **__: whole)
    cache.get(scale(), "sm_80", is_ptx=True)
    path = cache.path_of(scale(), "sm_80", is_ptx=True)
    data = damage(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    assert [entry.kernel for entry in cache.entries()] == [None]
    again = KernelCache(cache.folder)
    assert again.get(scale(), "sm_80", is_ptx=True) == whole
    assert again.num_compiled == 1
    assert [entry.kernel for entry in cache.entries()] == [whole]


def compiled(name: str, image: bytes) -> CompiledKernel:
    return CompiledKernel(
        name=name, arch="sm_80", is_ptx=True, argument_format="Q Q I f", waits_for_dependency=False, num_registers=0,
        spill_bytes=0, static_shared_bytes=0, image=image,
    )  # fmt: skip


def test_numba_runs_once_for_all_architectures(cache: KernelCache) -> None:
    kernels = [cache.get(scale(), arch, is_ptx=True) for arch in ("sm_80", "sm_90a", "sm_120a")]
    assert (cache.num_front_ends, cache.num_compiled) == (1, 3)
    again = KernelCache(cache.folder)
    other = again.get(scale(), "sm_100a", is_ptx=True)
    assert (again.num_front_ends, again.num_compiled) == (0, 1)
    assert [each.arch for each in (*kernels, other)] == ["sm_80", "sm_90a", "sm_120a", "sm_100a"]
    assert all(f".target {each.arch}" in each.image.decode() for each in (*kernels, other))
    assert cache.ir_bytes() > 0


def test_a_process_compiles_any_number_of_kernels(cache: KernelCache) -> None:
    """After a thousand kernels numba's next label had a thousand digits, which LLVM refuses."""

    @device_function
    def add_all(values, count):
        total = float32(0.0)
        for i in range(count):
            total += values[i]
        return total

    @cuda.jit
    def kernel(x: Any, n: Any) -> None:
        x[0] = add_all(x, n)

    ir_utils._the_max_label.update(10**1000)
    (text,) = cache.llvm_ir(Specialisation("adds", kernel, (types.CPointer(float32), types.uint32), 256))
    assert max(map(len, re.findall(r"^B\d+", text, re.MULTILINE))) < 10


def test_what_lanes_do_together_stays_together() -> None:
    """NVVM for newer architectures copies code in front of a branch into its sides, where some lanes would shuffle here
    and others there, and wait for each other for ever."""

    @cuda.jit
    def kernel(x: Any, n: Any) -> None:
        between, rank, lane = cuda.shared.array(64, float32), types.uint32(0), lane_index()
        while rank < n:
            first, second = warp_sum(x[rank + lane]), warp_sum(x[rank + lane + types.uint32(32)])
            if lane == types.uint32(0):
                between[rank] = first
            if lane == types.uint32(0):
                between[rank + types.uint32(1)] = second
            rank += types.uint32(2)
        x[lane] = between[lane]

    sums = Specialisation("sums", kernel, (types.CPointer(float32), types.uint32), 32)
    assert len({compile_ptx(sums, arch).count("shfl.sync") for arch in ("sm_90a", "sm_100a", "sm_120a")}) == 1


def test_llvm_ir_from_disk_gives_the_same_kernel(cache: KernelCache) -> None:
    modules = cache.llvm_ir(scale())
    again = KernelCache(cache.folder)
    assert again.llvm_ir(scale()) == modules
    assert again.num_front_ends == 0
    ours = again.get(scale(), "sm_90a", is_ptx=True).image.decode()
    theirs = compile_ptx(scale(), "sm_90a")
    assert ours.rstrip("\0").splitlines()[-12:] == theirs.splitlines()[-12:]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-9] + os.urandom(9)])
def test_corrupt_llvm_ir_is_made_anew(cache: KernelCache, damage: Any) -> None:
    modules = cache.llvm_ir(scale())
    (path,) = cache.folder.glob("*/*.ir")
    path.write_bytes(damage(path.read_bytes()))
    again = KernelCache(cache.folder)
    assert again.llvm_ir(scale()) == modules
    assert again.num_front_ends == 1


def test_threads_that_want_one_kernel_compile_it_once(cache: KernelCache) -> None:
    caches = [KernelCache(cache.folder) for _ in range(4)]
    found: list[CompiledKernel] = []
    threads = [
        threading.Thread(target=lambda each=each: found.append(each.get(scale(), "sm_80", is_ptx=True)))
        for each in caches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(kernel == found[0] for kernel in found)
    assert sum(each.num_compiled for each in caches) == sum(each.num_front_ends for each in caches) == 1
    assert sum(each.num_read for each in caches) == 3


def test_folders_of_older_sources_go_when_long_unused(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compiled("scale", b"image")
    monkeypatch.setattr(kernel_cache, "compile_kernel", lambda *_, **__: whole)
    long_ago = time.time() - 31 * 86400
    for name, used in (("0" * 16, long_ago), ("1" * 16, time.time() - 29 * 86400), ("somebody's own", long_ago)):
        (cache.folder / name).mkdir(parents=True, mode=0o700)
        (cache.folder / name / "scale.kernel").write_bytes(b"")
        os.utime(cache.folder / name, (used, used))
    cache.folder.chmod(0o700)
    cache.get(scale(), "sm_80", is_ptx=True)
    current = cache.path_of(scale(), "sm_80", is_ptx=True).parent.name
    assert {each.name for each in cache.folder.iterdir()} == {"1" * 16, "somebody's own", current}
    os.utime(cache.folder / current, (long_ago, long_ago))
    assert KernelCache(cache.folder).get(scale(), "sm_80", is_ptx=True) == whole
    assert (cache.folder / current).stat().st_mtime > time.time() - 3600  # reading it is use


def test_many_writers_and_readers(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds a whole file at any time, whoever wrote it."""
    kernels = [compiled("scale", bytes([n]) * 200_000) for n in range(4)]
    monkeypatch.setattr(kernel_cache, "compile_kernel", lambda *_, **__: kernels[0])
    cache.get(scale(), "sm_80", is_ptx=True)
    path = cache.path_of(scale(), "sm_80", is_ptx=True)
    found: list[CompiledKernel | None] = []

    def write(kernel: CompiledKernel) -> None:
        for _ in range(50):
            cache._write(path, kernel)

    threads = [threading.Thread(target=write, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(kernel_cache._read(path))
    for thread in threads:
        thread.join()
    assert len(found) > 5
    assert all(kernel in kernels for kernel in found)
    assert sorted(each.suffix for each in path.parent.iterdir()) == [".ir", ".kernel"]


def test_a_disk_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    whole = compiled("scale", b"image")
    monkeypatch.setattr(kernel_cache, "compile_kernel", lambda *_, **__: whole)
    cache = KernelCache(tmp_path / "file" / "kernels")
    assert cache.get(scale(), "sm_80", is_ptx=True) is whole
    assert (tmp_path / "file").read_text() == ""


def test_everything_that_matters_is_in_the_key(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    base = scale()

    def path(specialisation: Specialisation = base, arch: str = "sm_80", is_ptx: bool = False) -> str:
        return str(cache.path_of(specialisation, arch, is_ptx=is_ptx))

    changed = [
        dataclasses.replace(base, name="other"),
        dataclasses.replace(base, constants={"factor": 2.0}),
        dataclasses.replace(base, argument_types=(*base.argument_types[:3], types.float64)),
        dataclasses.replace(base, max_threads=128),
        dataclasses.replace(base, min_blocks=2),
        dataclasses.replace(base, fastmath=True),
        dataclasses.replace(base, kernel=scale_dependent().kernel),  # other code
        dataclasses.replace(base, kernel=scale(2.0).kernel),  # another constant in the closure alone
    ]
    paths = [path(), path(arch="sm_90a"), path(is_ptx=True), *(path(each) for each in changed)]
    assert len(set(paths)) == len(paths)
    assert path() == paths[0]
    monkeypatch.setattr(kernel_cache, "tool_versions", lambda: "numba 0.0")
    assert path() not in paths
    monkeypatch.setattr(kernel_key, "_digest_of_files", lambda names: "0" * 64)
    assert path() not in paths


def test_functions_are_told_apart_by_what_they_reach() -> None:
    one, two = (instruction(text, "r", "r", is_pure=True) for text in ("not.b32 $0, $1;", "neg.s32 $0, $1;"))

    def made(operation: Any, number: Any) -> Any:
        def function(x: Any) -> Any:
            return operation(x) + number

        return function

    functions = [made(one, 1), made(two, 1), made(one, 2), made(one, float32(1)), made(made(one, 1), 1)]
    digests = ["\0".join(kernel_key.function_words(function)) for function in functions]
    assert len(set(digests)) == len(digests)
    assert kernel_key.function_words(made(one, 1)) == kernel_key.function_words(functions[0])


def test_the_index_is_made_of_nothing_that_a_version_of_python_or_numba_changes() -> None:
    assert kernel_key.function_words(scale(2.0).kernel) == [
        "tests.runtime.device.kernels.scale.<locals>.kernel",
        "constant float32 2.0",
    ]
    add = instruction("add.u32 $0, $1, $2;", "r", "r r", is_pure=True)
    assert kernel_key.function_words(add)[1:] == [
        "typed (Signature, numba_kernels.cuda.intrinsics.asm.instruction.<locals>.generate)",
        "numba_kernels.cuda.intrinsics.asm.instruction.<locals>.generate",
        "assembly add.u32 $0, $1, $2; =r,r,r False",
        "groups ('r', 'r')",
        "is_accumulating False",
        "outputs 'r'",
    ]


def test_a_function_without_a_source_file_is_known_by_its_code() -> None:
    functions = []
    for text in ("x + 1", "x + 2"):
        names: dict[str, Any] = {"__name__": "typed"}
        exec(f"def function(x):\n    return {text}\n", names)
        functions.append(names["function"])
    assert kernel_key.function_words(functions[0]) != kernel_key.function_words(functions[1])


def test_the_sources_are_all_files_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = kernel_key.all_sources.__wrapped__
    monkeypatch.setattr(kernel_key, "SOURCES", tmp_path)
    (tmp_path / "gemm").mkdir()
    found = {digest()}
    for name, text in (("a.py", "1"), ("gemm/b.py", "1"), ("a.py", "2"), ("gemm/b.py", "3"), ("gemm/c.py", "3")):
        (tmp_path / name).write_text(text)
        assert digest() not in found
        found.add(digest())


def test_a_kernels_sources_are_its_file_and_what_that_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_key, "_digest_of_files", kernel_key._digest_of_files.__wrapped__)
    digest = kernel_key.digest_of.__wrapped__
    folder = kernel_key.SOURCES
    tiers = {name: digest(folder / "gemm" / f"{name}.py") for name in ("naive", "tiled")}
    assert tiers["naive"] != tiers["tiled"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = source_digests._read

    def read_changed(path: str, end: str) -> tuple[str, list[str]]:
        content, modules = real(path)
        return content + "#" * path.endswith(end), modules

    for changed, expected in (("gemm/tiled.py", {"tiled"}), ("intrinsics/memory.py", {"naive", "tiled"})):
        monkeypatch.setattr(source_digests, "_notes", None)  # nothing is known
        monkeypatch.setattr(source_digests._Notes, "write", lambda notes: None)
        monkeypatch.setattr(source_digests, "_read", partial(read_changed, end=changed))
        found = {name for name, before in tiers.items() if digest(folder / "gemm" / f"{name}.py") != before}
        assert found == expected


def test_kernels_that_do_not_compile_are_named(cache: KernelCache) -> None:
    @cuda.jit
    def kernel(x: Any) -> None:
        x[0] = undefined_name  # type: ignore[name-defined]  # noqa: F821

    broken = Specialisation("broken", kernel, (types.CPointer(types.float32),), 32)
    with pytest.raises(CompileError, match=r"(?s)broken does not compile.*undefined_name"):
        cache.get(broken, "sm_80", is_ptx=True)
    arrays = dataclasses.replace(scale(), argument_types=(types.float32[:],))
    with pytest.raises(CompileError, match=r"scale: argument 0 is a .*array"):
        cache.get(arrays, "sm_80", is_ptx=True)
    assert list(cache.entries()) == []


def test_what_ptxas_refuses_is_in_its_own_words() -> None:
    from runtime.device.assemble import assemble

    with pytest.raises(CompileError, match=r"sm_80.*Not a name of any known instruction: 'nonsense'"):
        assemble(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { nonsense; }", "sm_80")


def test_registers_are_handed_over_in_whole_programs() -> None:
    from runtime.device.assemble import assemble

    text = (
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() .maxntid 256 .minnctapersm 1 {{\n"
        '\tsetmaxnreg.dec.sync.aligned.u32 24; {}  // "a remark"\n\tret;\n}}'
    )
    code = assemble(text.format(""), "sm_90a")
    assert b".text.k\0" in code.cubin
    assert "C75" not in code.log
    with pytest.raises(CompileError, match="nonsense"):
        assemble(text.format("nonsense;"), "sm_90a")


def test_fewer_blocks_of_a_multiprocessor_where_registers_would_be_short() -> None:
    """200 numbers are added up from the last one on; half of a multiprocessor's registers hold them all."""
    from runtime.device.assemble import assemble

    loads = "".join(f"ld.global.volatile.f32 %f{i}, [%rd1+{4 * i}];\n" for i in range(200))
    sums = "".join(f"fma.rn.f32 %f200, %f200, %f{i}, %f{i};\n" for i in reversed(range(200)))
    text = (
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) .maxntid 128 "
        f".minnctapersm {{}} {{{{\n.reg .f32 %f<201>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n{loads}"
        f"mov.f32 %f200, 0f00000000;\n{sums}st.global.f32 [%rd1], %f200;\nret;\n}}}}"
    )
    asked = {blocks: assemble(text.format(blocks), "sm_80") for blocks in (1, 2, 4)}
    assert [code.spill_store_bytes for code in asked.values()] == [0, 0, 0]
    assert asked[4].num_registers == asked[2].num_registers > 200


def test_clear(cache: KernelCache) -> None:
    cache.get(scale(), "sm_80", is_ptx=True)
    (cache.folder / "other").mkdir()
    (cache.folder / "other" / "old-sm_80.kernel").write_bytes(b"")
    (cache.folder / "other" / "left.partial").write_bytes(b"")
    assert [entry.is_current for entry in cache.entries()] == [True, False] or [
        entry.is_current for entry in cache.entries()
    ] == [False, True]
    assert cache.clear() == 2
    assert list(cache.folder.iterdir()) == []
    assert cache.clear() == 0


def test_which_kernels_an_architecture_has() -> None:
    plain = scale()
    hopper = dataclasses.replace(plain, min_capability=90, needs_arch_features=True)
    newer = dataclasses.replace(plain, min_capability=89)
    assert [is_meant_for(plain, arch) for arch in ("sm_80", "sm_90a", "sm_120a")] == [True, True, True]
    assert [is_meant_for(hopper, arch) for arch in ("sm_80", "sm_90", "sm_90a", "sm_100a")] == [
        False,
        False,
        True,
        False,
    ]
    assert [is_meant_for(newer, arch) for arch in ("sm_86", "sm_89", "sm_120a")] == [False, True, True]
    spilling = dataclasses.replace(plain, spills_on=("sm_86",))
    assert [is_meant_for(spilling, arch) for arch in ("sm_80", "sm_86", "sm_89")] == [True, False, True]
    assert (needs_of(plain), needs_of(hopper)) == ("sm_80", "sm_90a")
    with pytest.raises(InvalidArgumentError, match="arch"):
        is_meant_for(plain, "sm90")


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Two processes one after the other, with a kernel of the registry; the second does not load the compiler."""
    program = (
        "import sys\n"
        "from numba_kernels.cuda import embedding\n"
        "from runtime.device.kernel_cache import KernelCache\n"
        "cache = KernelCache()\n"
        "kernel = cache.get(next(iter(embedding.specialisations())), 'sm_80', is_ptx=False)\n"
        "print(cache.num_compiled, cache.num_read, 'numba_kernels.cuda.compile' in sys.modules, kernel.name)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    first, second = (run.stdout.split() for run in runs)
    assert first[:3] == ["1", "0", "True"]
    assert second[:3] == ["0", "1", "False"]
    assert first[3] == second[3]
    assert len(list((tmp_path / "xserv" / "kernels").glob("*/*.kernel"))) == 1
