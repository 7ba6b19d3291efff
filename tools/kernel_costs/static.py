"""Compilers' facts on every kernel and architecture: registers, spills, shared memory, occupancy.

Needs no GPU: NVVM makes the PTX, which the cache of kernels keeps, and nvJitLink, which is ptxas, the machine code.
nvdisasm shows ptxas's reordering of loads that should run before the previous kernel has ended, and the barriers of
clusters. Work is spread over processes by specialisation, and the facts are cached on disk, keyed by the PTX, the
assembler and disassembler, and the files of this folder:

    <XDG_CACHE_HOME or ~/.cache>/xserv/examined/<digest of the sources>/<digest>.facts
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import re
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba_kernels.cache_files import cache_root, locked, read_entry, write_entry
from numba_kernels.cuda import chain_sampling, experts, logprobs, sampling
from numba_kernels.cuda.attention import flash_float32, flash_tensor_core
from numba_kernels.cuda.attention.decode_block import decode_block
from numba_kernels.cuda.attention.hopper_tiles import hopper_tiles
from numba_kernels.cuda.attention.tiles import WIDE
from numba_kernels.cuda.attention.wide_tiles import wide_tiles
from numba_kernels.cuda.experts import packed_gather, packed_rows
from numba_kernels.cuda.gemm import (
    hopper,
    hopper_bytes,
    hopper_packed,
    mixed_input,
    packed_factors,
    packed_stream,
    quantised_gemv,
    skinny_shape,
    tensor_core,
    w8a8,
)  # fmt: skip
from numba_kernels.cuda.gemm.product import machine_of
from numba_kernels.cuda.gemm.rings import gemv_ring
from numba_kernels.cuda.gemm.rings.few_weights import Block
from numba_kernels.cuda.gemm.rings.packed_ring import packed_ring
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.recurrent import chunk_factors, chunk_scan
from numba_kernels.cuda.recurrent.chunk_layout import ChunkForm
from numba_kernels.cuda.registry import specialisations
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.source_digests import sources_digest
from runtime.device.assemble import assemble
from runtime.device.kernel_cache import KernelCache, is_meant_for
from runtime.device.kernel_key import tool_versions
from runtime.emulator.driver.architectures import blocks_per_sm, model_of
from tools.kernel_costs.machine_code import MachineInstruction, disassemble

QWEN_VOCABULARY = 151_936
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

_PTXAS = re.compile(r"C75\d\d[^\n]*")  # remarks on bad code: serialised wgmma and the like
_DOUBLE = re.compile(r"\.f64\b")
_LOCAL = re.compile(r"\.local\b")
_DYNAMIC = re.compile(r"\.extern\s+\.shared")
_LOAD = re.compile(r"\bld\.global\b")
_WAIT = "griddepcontrol.wait"
_BULK, _COPIES = "cp.async.bulk.", ("UBLKCP", "UTMALDG", "LDGSTS")
_MEETS_OR_SWAPS = re.compile(r"\b(barrier\.cluster|atom|red)\b")
_LABEL = re.compile(r"(?P<name>[$%\w]+):")
_BRANCH = re.compile(r"^\s*(?P<guard>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<target>[$%\w]+);")
_LEAVES = re.compile(r"^\s*(bra|ret|exit|trap)\b")
_READS_EARLY = re.compile(
    "gemv_|gemm_skinny_|gemm_quantised_gemv_|gemm_hopper_few_|attention_decode_(?!.*_(s8|e4m3)_).*_heads"
)
"""Kernels of these names have their first loads of the weight, or of keys, on their way before the kernel in front has
ended."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts from the machine code.

    Attributes:
        num_early_loads: loads from device memory before griddepcontrol.wait, in the PTX.
        num_late_loads: how many of them ptxas has moved after it.
        num_device_fences: device-wide fences, in a kernel with clusters.
        num_swaps: compare-and-swap atomics, which a loop retries.
        num_early_copies: copies to shared memory before griddepcontrol.wait; one in a loop counts once.
    """

    num_early_loads: int = 0
    num_late_loads: int = 0
    num_device_fences: int = 0
    num_swaps: int = 0
    num_early_copies: int = 0

    @property
    def reads_early(self) -> bool:
        """Whether anything is read from device memory before griddepcontrol.wait."""
        return self.num_early_loads + self.num_early_copies > 0


def machine_facts(text: str, code: Sequence[MachineInstruction]) -> MachineFacts:
    """The facts of a kernel's PTX and machine code."""
    opcodes = [each.opcode for each in code]
    num_early = num_there = num_copies = 0
    if _WAIT in text:
        num_early, num_there = num_early_loads(text), _num_early(code, "LDG")
        num_copies = _num_early(code, _COPIES)
    meets = any(opcode.startswith("UCGABAR") for opcode in opcodes)
    fences = sum(opcode.startswith("MEMBAR") and not opcode.endswith(".CTA") for opcode in opcodes)
    swaps = sum(opcode.startswith("ATOM") and ".CAS" in opcode for opcode in opcodes)
    return MachineFacts(num_early, max(0, num_early - num_there), fences if meets else 0, swaps, num_copies)


def _num_early(code: Sequence[MachineInstruction], opcode: str | tuple[str, ...]) -> int:
    """The number of instructions of a kind that a kernel may execute before it waits for the previous grid.
    Specialised warps wait separately: a load may come after another one's wait. Division may be a function of its own,
    before the kernel, which ends with a branch to itself."""
    starts = [0, *(index + 1 for index, each in enumerate(code) if each.target == index)]
    seen, waiting, count = set[int](), starts, 0
    while waiting:
        index = waiting.pop()
        while index < len(code) and index not in seen:
            seen.add(index)
            each = code[index]
            if each.opcode.startswith("ACQBULK"):
                break
            count += each.opcode.startswith(opcode)
            if each.target is not None:
                waiting.append(each.target)
            if each.is_certain and each.opcode.startswith(("BRA", "EXIT")):
                break
            index += 1
    return count


def num_early_loads(text: str) -> int:
    """The number of loads from device memory that a kernel's PTX may execute before it waits for the previous grid.
    Compilers for newer architectures place the wait below later code, so the order of the text is meaningless."""
    runs: dict[str, list[str]] = {}  # instructions from a label, or after a branch, to the next of either
    following: dict[str, set[str]] = {}
    name = ""
    runs[name], following[name] = [], set()
    for line in text.splitlines():
        label, branch = _LABEL.match(line), _BRANCH.search(line)
        if label or (branch and branch["guard"]):
            before, name = name, label["name"] if label else f"behind line {len(runs)}"
            runs[name], following[name] = [], set()
            if label is None or not _LEAVES.search("".join(runs[before][-1:])):
                following[before].add(name)
            if branch:
                following[before].add(branch["target"])
            continue
        runs[name].append(line)
        if branch:
            following[name].add(branch["target"])
    seen, waiting, count = set(), [""], 0
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in runs[name]:
            if _WAIT in line:
                break
            count += _LOAD.search(line) is not None
        else:
            waiting += following[name]
    return count


@dataclass(frozen=True, slots=True)
class StaticFacts:
    """One kernel on one architecture.

    Attributes:
        kernel: the specialisation's name.
        arch: "sm_90a".
        num_threads: of a block, at most.
        num_registers, stack_bytes, spill_bytes: of a thread; spill_bytes counts stores and loads.
        shared_bytes: of a block, static and dynamic.
        blocks_per_sm: resident at once, on the product that `architectures.model_of` names.
        occupancy: threads resident at once over those that could be.
        messages: ptxas's remarks C75xx.
        has_double, has_local: whether the PTX computes in float64, or keeps anything in local memory.
        machine: facts from the machine code, or None if it was not read.
    """

    kernel: str
    arch: str
    num_threads: int
    num_registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    occupancy: float
    messages: tuple[str, ...]
    has_double: bool
    has_local: bool
    machine: MachineFacts | None = None

    def offences(self) -> list[str]:
        """Forbidden properties of a kernel, in words."""
        found = []
        if self.spill_bytes:
            found.append(f"spills: {self.spill_bytes} bytes of spill stores and loads")
        if self.has_local or self.stack_bytes:
            found.append(f"local: {self.stack_bytes} bytes of local memory")
        if self.messages:
            found.append(f"ptxas: {self.messages[0]}")
        if self.has_double:
            found.append("f64: its PTX computes in float64")
        if self.blocks_per_sm < 1:
            found.append("occupancy: not one block fits a multiprocessor")
        if self.machine is not None:
            found += self._offences_of(self.machine)
        return [f"{self.kernel} on {self.arch}: {offence}" for offence in found]

    def _offences_of(self, machine: MachineFacts) -> list[str]:
        found = []
        if machine.num_late_loads:
            found.append(f"late: {machine.num_late_loads} of {machine.num_early_loads} early loads come after the wait")
        elif _READS_EARLY.match(self.kernel) and can_depend(self.arch) and not machine.reads_early:
            found.append("late: no weight and no key is loaded before the wait")
        if machine.num_device_fences and self.kernel.startswith("gemm") and not self.kernel.endswith("_adapted"):
            found.append(f"fences: {machine.num_device_fences} of the whole device, in a product of clusters")
        if machine.num_swaps:
            found.append(f"swaps: {machine.num_swaps} atomics that are repeated until nobody comes between")
        return found


def can_depend(arch: str) -> bool:
    """Whether an architecture has dependent launches."""
    return model_of(arch).capability >= (9, 0)


def dynamic_shared_bytes(specialisation: Specialisation, arch: str) -> int:
    """Bytes of dynamic shared memory in a kernel's plan; 0 for a kernel without."""
    name, constants = specialisation.name, specialisation.constants
    packing: Any = packing_of(str(constants.get("weight", "")))
    if name.startswith("gemv_ring"):  # of 4,096 numbers
        rows, machine = int(constants["rows"]), machine_of(arch)
        return gemv_ring.ring_stages(machine, 4096, rows) * gemv_ring.RING_BYTES + 8192 * rows
    if name.startswith(("gemm_tensor_core", "experts_tensor_core")):
        return {str(tile): tile for tile in tensor_core.TILES}[constants["tile"]].shared_bytes
    if name.startswith("gemm_skinny"):
        tiles, has_clusters = constants["row_tiles"], specialisation.min_capability >= 90
        most = skinny_shape.most_streams(tiles, has_clusters=has_clusters)
        return skinny_shape.shared_bytes(constants["weight"], tiles, most, has_clusters=has_clusters)
    if name.startswith("gemm_quantised_gemv"):  # of 8,192 numbers, in all rows
        rows = int(constants["rows"])
        slots = int(constants["ring_slots"])
        if not slots:
            return rows * (packed_stream.row_bytes(packing, 8192 // rows) + packed_factors.ROW_GAP)
        depths = (each // rows for each in (8192, 6144, 4096, 2048))  # the longest with such a ring
        rings = (quantised_gemv.ring_of(packing, machine_of(arch), depth, rows) for depth in depths)
        return next((shared_bytes for found, shared_bytes in rings if found == slots), 1)
    if name.startswith("route_normed"):  # of as many
        return 8192 * ITEM_BYTES[constants["dtype"]]
    if name.startswith("gemm_mixed_input"):
        return mixed_input.shared_bytes(constants["weight"], constants["dtype"])
    if name.startswith("experts_hopper"):
        tiles = experts.hopper.TILES if packing is None else experts.hopper.UNPACKING_TILES
        return {str(tile): tile for tile in tiles}[constants["tile"]].shared_bytes
    if name.startswith("experts_packed_gather"):  # rows of 8,192 numbers, or three times as many in all
        slots, count = int(constants["ring_slots"]), 3 if constants["activation"] == "" else 1
        if not slots:
            return count * packed_stream.row_bytes(packing, 8192)
        stage_bytes = packed_gather.WARPS * packed_ring(packing.name, 1, slots).stage_bytes
        return 2 * stage_bytes + packed_stream.row_bytes(packing, 8192)
    if name.startswith("experts_packed_rows"):  # rows of 4,096 numbers, or the longest with such a ring
        slots = int(constants["ring_slots"])
        rings = (packed_rows.ring_of(packing, depth, arch) for depth in (4096, 2048, 1024))
        return next((shared_bytes for found, shared_bytes in rings if found == slots), 1)
    if name.startswith("experts_packed"):
        return mixed_input.shared_bytes(constants["weight"], constants["dtype"], constants["tile_rows"])
    if name.startswith("gemm_w8a8"):
        return w8a8.SHARED_BYTES
    if name.startswith("gemm_hopper_bytes"):
        return hopper_bytes.shared_bytes_of(constants["weight"])
    if name.startswith("gemm_hopper_few"):
        packed = "" if packing is None else packing.name
        return Block(constants["width"], packed, takes_adapters=name.endswith("_adapted")).shared_bytes
    if name.startswith("gemm_hopper"):
        tiles = (*hopper.TILES, hopper.NARROW) if packing is None else hopper_packed.TILES
        return {str(tile): tile for tile in tiles}[constants["tile"]].shared_bytes
    if name.startswith("attention_flash_hopper"):
        return hopper_tiles(constants["head_dim"], constants["v_dim"]).shared_bytes
    if name == "chain_sampling":
        return chain_sampling.SHARED_BYTES
    if name.startswith("sampling"):
        model = model_of(arch)
        clusters = model.max_clusters if constants["is_cluster"] else ()
        planned = sampling.plan(
            1, QWEN_VOCABULARY, max_clusters=clusters, num_sms=model.num_sms, max_shared=model.shared_bytes_per_block
        )
        assert planned is not None
        return planned.launch.shared_bytes
    if "_chunk_" in name:
        form = ChunkForm(*(constants[each] for each in ("dtype", "rows", "columns", "has_delta")))
        return chunk_scan.shared_bytes(form) if "_chunk_scan_" in name else chunk_factors.shared_bytes(form)
    if name.startswith("latent"):
        return int(constants.get("shared_bytes", 0))
    if name == "logprobs":
        return logprobs.SHARED_BYTES
    if name.startswith(("attention_flash", "attention_decode")):
        dtype, head_dim, is_split = constants["dtype"], constants["head_dim"], name.startswith("attention_decode")
        if head_dim > WIDE and dtype != "f32":
            sizes = (wide_tiles(dtype, constants["pages"], head_dim, each, is_split) for each in ("sm_80", "sm_86"))
            return next(each.shared_bytes for each in sizes if each.num_keys == constants["num_keys"])
        if dtype == "f32":
            return flash_float32.shared_bytes(head_dim, constants["v_dim"], is_split)
        num_rows, pages = constants["num_rows"], constants["pages"]
        if is_split:
            return decode_block(dtype, head_dim, num_rows, pages, prepares="_heads" in name).shared_bytes
        return flash_tensor_core.shared_bytes(dtype, head_dim, constants["v_dim"], num_rows, pages)
    return 0


def examine(
    specialisation: Specialisation, archs: Iterable[str], cache: KernelCache, nvdisasm: str | None
) -> list[StaticFacts]:
    """Examines a kernel on the architectures that have its instructions; without `nvdisasm`, not its machine code.

    Raises RuntimeError if its PTX has dynamic shared memory that `dynamic_shared_bytes` does not cover.
    """
    found = []
    for arch in archs:
        if not is_meant_for(specialisation, arch):
            continue
        dynamic = dynamic_shared_bytes(specialisation, arch)
        text = cache.get(specialisation, arch, is_ptx=True).image.rstrip(b"\0").decode()
        if bool(_DYNAMIC.search(text)) != bool(dynamic):
            raise RuntimeError(f"{specialisation.name}: {dynamic} bytes of dynamic shared memory, its PTX disagrees")
        path = _path_of(specialisation, arch, text, dynamic, nvdisasm)
        facts = _read(path)
        if facts is None:
            with locked(path):
                facts = _read(path)  # written by another process, which held the lock
                if facts is None:
                    facts = _examine(specialisation, arch, text, dynamic, nvdisasm)
                    write_entry(path, dataclasses.asdict(facts), b"")
        found.append(facts)
    return found


def examine_text(specialisation: Specialisation, arch: str, cache: KernelCache) -> list[str]:
    """Forbidden properties of a kernel's PTX, in words: local memory, and float64 that is not meant."""
    text = cache.get(specialisation, arch, is_ptx=True).image.decode()
    forbidden = (_LOCAL, "local"), *(() if specialisation.uses_float64 else ((_DOUBLE, "f64"),))
    found = [words for pattern, words in forbidden if pattern.search(text)]
    return [f"{specialisation.name} on {arch}: {words} in its PTX" for words in found]


def _examine(
    specialisation: Specialisation, arch: str, text: str, dynamic_bytes: int, nvdisasm: str | None
) -> StaticFacts:
    code = assemble(text, arch)
    model, threads = model_of(arch), specialisation.max_threads
    shared = code.static_shared_bytes + dynamic_bytes
    blocks = blocks_per_sm(model, threads, code.num_registers, shared)
    machine = None
    if nvdisasm is not None:
        reads = _WAIT in text and (num_early_loads(text) or _BULK in text)
        tells_more = reads or _MEETS_OR_SWAPS.search(text)
        machine = machine_facts(text, disassemble(code.cubin, nvdisasm)) if tells_more else MachineFacts()
    return StaticFacts(
        specialisation.name, arch, threads, code.num_registers, code.stack_bytes,
        code.spill_store_bytes + code.spill_load_bytes, shared, blocks, blocks * threads / model.threads_per_sm,
        tuple(_PTXAS.findall(code.log)), not specialisation.uses_float64 and _DOUBLE.search(text) is not None,
        _LOCAL.search(text) is not None, machine,
    )  # fmt: skip


def _path_of(specialisation: Specialisation, arch: str, text: str, dynamic_bytes: int, nvdisasm: str | None) -> Path:
    """The path of the cached facts. `nvdisasm` is identified by its file's size and time."""
    program = "" if nvdisasm is None else f"{(status := Path(nvdisasm).stat()).st_size} {status.st_mtime_ns}"
    words = specialisation.name, str(specialisation.max_threads), arch, text, str(dynamic_bytes), tool_versions()
    key = hashlib.sha256("\0".join((*words, program)).encode()).hexdigest()[:24]
    return cache_root("examined") / _sources()[:16] / f"{key}.facts"


@functools.cache
def _sources() -> str:
    """A digest of this file and of all that it imports from this project."""
    return sources_digest(Path(__file__))


def _read(path: Path) -> StaticFacts | None:
    entry = read_entry(path)
    if entry is None:
        return None
    kept = entry[0]
    machine = kept["machine"] and MachineFacts(**kept["machine"])
    return StaticFacts(**kept | {"messages": tuple(kept["messages"]), "machine": machine})


def _examine_named(names: Sequence[str], archs: Sequence[str], nvdisasm: str) -> list[StaticFacts]:
    warnings.simplefilter("ignore")
    wanted, cache = set(names), KernelCache()
    return [
        facts for each in specialisations() if each.name in wanted for facts in examine(each, archs, cache, nvdisasm)
    ]


def examine_all(
    nvdisasm: str, archs: Sequence[str] = ARCHS, names: Sequence[str] | None = None, *, num_processes: int = 2
) -> list[StaticFacts]:
    """Registered kernels, all or those of `names`, on each architecture, in the registry's order."""
    if names is None:
        names = [each.name for each in specialisations()]
    bundles = [names[start::8] for start in range(8) if names[start::8]]
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(_examine_named, bundles, [tuple(archs)] * len(bundles), [nvdisasm] * len(bundles)))
    order = {name: place for place, name in enumerate(names)}
    facts = [each for part in parts for each in part]
    return sorted(facts, key=lambda each: (order[each.kernel], archs.index(each.arch)))
