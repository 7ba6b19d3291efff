"""The kernel report: no kernel has what it may not have, on any architecture or in any counted case."""

from __future__ import annotations

import dataclasses

import pytest

from numba_kernels.cuda.gemm import gemv, skinny
from numba_kernels.cuda.registry import specialisations
from runtime.bench.kernels.case import Case
from runtime.bench.kernels.counted import Counts, loops
from runtime.device.kernel_cache import KernelCache, is_meant_for
from runtime.emulator.driver.architectures import A100, H200
from runtime.emulator.translation.ptx import parse
from tools import kernel_report
from tools.kernel_cases.report import cases
from tools.kernel_costs import page
from tools.kernel_costs.machine_code import nvdisasm_if_any
from tools.kernel_costs.machine_code import parse as parse_machine_code
from tools.kernel_costs.static import ARCHS, MachineFacts, StaticFacts, examine, machine_facts
from tools.kernel_report import Allowed, count, main, offences_of, offenders

SHARES = 16  # of the kernels, so that no worker is left with much more than the others


@pytest.mark.exhaustive  # what other tests launch is examined there: `tests/conftest.py`
@pytest.mark.parametrize("share", range(SHARES))
def test_no_kernel_spills_on_any_architecture(share: int) -> None:
    """Every registered kernel, on each architecture that it is meant for."""
    cache, kernels = KernelCache(), list(specialisations())[share::SHARES]
    facts = [found for each in kernels for found in examine(each, ARCHS, cache, nvdisasm_if_any())]
    meant = [(each.name, arch) for each in kernels for arch in ARCHS if is_meant_for(each, arch)]
    assert [(found.kernel, found.arch) for found in facts] == meant
    assert offenders(facts, []) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(
    ("dtype", "weight"), [("bf16", "bf16"), ("f16", "f16"), ("bf16", "u4_g128"), ("bf16", "u8"), ("bf16", "e4m3")]
)
def test_products_of_16_rows_with_adapters_do_not_spill(dtype: str, weight: str, activation: str) -> None:
    """They are none of the registered ones, and have half of a multiprocessor's registers."""
    made = skinny._kernel(dtype, weight, dtype, 1, activation, weight != dtype, takes_adapters=True)
    archs = "sm_90a", "sm_100a", "sm_120a"
    assert offenders(list(examine(made, archs, KernelCache(), nvdisasm_if_any())), []) == []


@pytest.mark.parametrize("name", ["gemm_skinny_bf16_bf16_16", "gemv_ring_bf16_bf16_1"])
def test_kernels_of_other_tests_do_not_spill_on_blackwell(name: str) -> None:
    """The first gets fewer blocks of a multiprocessor there than it asks for."""
    (kernel,) = (each for each in specialisations() if each.name == name)
    facts = examine(kernel, ("sm_100a", "sm_120a"), KernelCache(), None)
    assert [(found.spill_bytes, found.stack_bytes, found.has_local) for found in facts] == [(0, 0, False)] * 2


def test_every_kernel_is_examined_somewhere() -> None:
    for each in specialisations():
        assert any(is_meant_for(each, arch) for arch in ARCHS), each.name


EACH_TIME = (
    "gemm skinny bf16", "gemm hopper bf16 m=256", "gemm quantised_gemv u4_g128", "attention decode bf16 d128",
    "rms_norm", "sampling greedy", "add f32",
)  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] * (not case.name.startswith(EACH_TIME)), id=case.name)
        for case in cases()
    ],
)
@pytest.mark.exhaustive_cases("attention decode")
def test_every_case(case: Case) -> None:
    counts = count(case)
    if counts.warp_instructions == 0 or sum(counts.mix.values()) != counts.warp_instructions:
        raise ValueError(f"{case.name}: {counts.warp_instructions} instructions, of kinds {counts.mix}")
    assert offenders([], [(case, counts)]) == []


@pytest.mark.emulator
def test_counts_of_a_copy_are_known() -> None:
    (case,) = (case for case in cases() if case.name == "add f32")
    counts = count(case)
    assert counts.moved_bytes == case.least_bytes == 12 << 15
    assert counts.sector_efficiency == 1
    assert counts.sectors_per_request == 4
    assert counts.requests == 3 * (1 << 15) // 32
    assert counts.wavefronts == counts.conflicts == counts.tensor_flops == 0


@pytest.mark.emulator
def test_tensor_cores_do_the_product_and_nothing_more() -> None:
    (case,) = (case for case in cases() if case.name == "gemm tensor_core bf16 m=256")
    assert count(case).tensor_flops == case.flops == 2 * 256**3


FACTS = StaticFacts("kernel", "sm_80", 256, 32, 0, 0, 0, 8, 1.0, (), False, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spill_bytes": 8}, "spills: 8 bytes"), ({"stack_bytes": 16}, "local: 16"), ({"has_local": True}, "local: 0"),
        ({"messages": ("C7510: Potential Performance Loss",)}, "ptxas: C7510"), ({"has_double": True}, "f64"),
        ({"blocks_per_sm": 0}, "occupancy"),
    ],
)  # fmt: skip
def test_static_offences_are_named(changes: dict[str, object], words: str) -> None:
    (found,) = dataclasses.replace(FACTS, **changes).offences()
    assert found.startswith(f"kernel on sm_80: {words}")
    assert offenders([dataclasses.replace(FACTS, **changes)], []) == [found]
    assert FACTS.offences() == []


@pytest.mark.parametrize(
    ("name", "arch", "machine", "words"),
    [
        ("gemv_bf16", "sm_90a", MachineFacts(8, 8), "late: 8 of 8 early loads come after the wait"),
        ("rms_norm", "sm_90a", MachineFacts(2, 1), "late: 1 of 2"),
        ("gemv_bf16", "sm_90a", MachineFacts(), "late: no weight and no key is loaded before the wait"),
        ("gemm_skinny_bf16", "sm_120a", MachineFacts(), "late: no weight"), ("gemv_f32", "sm_80", MachineFacts(), ""),
        ("attention_decode_bf16_d128_b16_r8_heads_r128", "sm_90a", MachineFacts(), "late: no weight"),
        ("attention_decode_bf16_d128_b16_r8_s8_heads_r128", "sm_90a", MachineFacts(), ""),
        ("gemm_hopper_bf16", "sm_90a", MachineFacts(num_device_fences=1), "fences: 1 of the whole device"),
        ("sample_bf16", "sm_90a", MachineFacts(num_device_fences=1), ""),
        ("sampling_block", "sm_80", MachineFacts(num_swaps=2), "swaps: 2 atomics"),
        ("gemv_bf16", "sm_90a", MachineFacts(8), ""),
    ],
)  # fmt: skip
def test_offences_of_machine_code_are_named(name: str, arch: str, machine: MachineFacts, words: str) -> None:
    found = dataclasses.replace(FACTS, kernel=name, arch=arch, machine=machine).offences()
    assert [offence.startswith(f"{name} on {arch}: {words}") for offence in found] == [True] * bool(words)


def test_machine_code_is_read_in_its_order() -> None:
    ptx = "ld.global.L1::no_allocate.v4.b32 {}\nld.param.u32 {}\nld.global.b32 {}\n"
    ptx += "griddepcontrol.wait;\nld.global.b32 {}"
    load, wait = "/*0000*/ LDG.E.128 R4, desc[UR4][R2.64] ;\n", "/*0010*/ ACQBULK ;\n"
    divides = "/*0000*/ RET.ABS.NODEC R20 0x0 ;\n.L_x_0:\n/*0010*/ BRA `(.L_x_0);\n"  # in front of the kernel
    copy = "/*0000*/ UBLKCP [UR8], [UR4], UR6 ;\n"
    meet = "/*0020*/ MEMBAR.ALL.CTA ;\n/*0030*/ MEMBAR.ALL.GPU ;\n/*0040*/ UCGABAR_ARV ;\n"
    for code, facts in (
        (load + load + wait + load, MachineFacts(2, 0)), (load + wait + load + load, MachineFacts(2, 1)),
        (load + load + wait + meet, MachineFacts(2, 0, 1)), (divides + load + load + wait, MachineFacts(2, 0)),
    ):  # fmt: skip
        assert machine_facts(ptx, parse_machine_code(code)) == facts
    below = "@%p1 bra $L__1;\nbra.uni $L__2;\n$L__1:\nld.global.b32 {}\nret;\n$L__2:\nld.global.b32 {}\n"
    below += "$L__3:\ngriddepcontrol.wait;\nbra.uni $L__1;\n"
    assert machine_facts(below, parse_machine_code(load + load + wait)) == MachineFacts(2), "one of them never waits"
    moved = "bra.uni $L__2;\n$L__1:\nld.global.b32 {}\nret;\n$L__2:\nld.global.b32 {}\ngriddepcontrol.wait;\n"
    moved += "bra.uni $L__1;\n"
    assert machine_facts(moved, parse_machine_code(load + wait + load)) == MachineFacts(1), "the wait stands last"
    adds = "/*0050*/ ATOMS.ADD R1, [R2], R3 ;\n/*0060*/ ATOMG.E.EXCH.STRONG.GPU PT, R1, desc[UR4][R2.64], R3 ;\n"
    swaps = "/*0070*/ ATOMS.CAST.SPIN.64 P0, [R2], R4, R6 ;\n/*0080*/ ATOMG.E.CAS.STRONG.GPU PT, R1, [R2], R3, R4 ;\n"
    assert machine_facts("", parse_machine_code(adds + swaps)) == MachineFacts(num_swaps=2)
    copies = parse_machine_code(copy + copy + wait + copy)
    assert machine_facts("griddepcontrol.wait;", copies) == MachineFacts(num_early_copies=2)
    assert machine_facts("ld.global.b32 {}", parse_machine_code(load + meet.split("/*0040*/")[0])) == MachineFacts()


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(
    ("name", "num_early_loads"),
    [
        ("gemv_bf16_bf16_1_aligned", 8), ("gemv_f32_f32_8_aligned", 4), ("gemv_bf16_bf16_2_any", 8),
        ("gemm_skinny_bf16_bf16_16", 16), ("gemm_skinny_f16_f32_64", 16),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("_16-16", "_64-16")
def test_weights_are_on_their_way_before_the_wait(name: str, num_early_loads: int) -> None:
    """By the machine code: ptxas moves .nc loads behind griddepcontrol.wait."""
    (kernel,) = (each for each in specialisations() if each.name == name)
    (facts,) = examine(kernel, ("sm_90a",), KernelCache(), nvdisasm_if_any())
    assert facts.machine == MachineFacts(num_early_loads)
    if name.startswith("gemv") and "_1_" in name:
        assert facts.blocks_per_sm == gemv.ONE_ROW_BLOCKS


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(
    "name",
    [
        "gemv_ring_bf16_bf16_1", "gemv_ring_bf16_bf16_2_silu", "gemm_quantised_gemv_u4_g128_bf16_ring_4",
        "gemm_quantised_gemv_e2m1_g32_exponents_bf16_silu_4_ring_2", "gemm_hopper_few_bf16_bf16_32",
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("silu")
def test_a_ring_is_filled_before_the_wait(name: str) -> None:
    """By the machine code: bulk copies stand before griddepcontrol.wait, and two such kernels fit a multiprocessor."""
    (kernel,) = (each for each in specialisations() if each.name == name)
    (facts,) = examine(kernel, ("sm_90a",), KernelCache(), nvdisasm_if_any())
    assert facts.offences() == []
    assert facts.machine is not None
    assert facts.machine.num_early_copies >= 2
    assert facts.machine.num_early_loads == 0
    assert facts.blocks_per_sm == 2


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
def test_loads_that_ptxas_moves_are_found() -> None:
    (facts,) = examine(gemv._kernel("bf16", "bf16", 1, True, "nc"), ("sm_90a",), KernelCache(), nvdisasm_if_any())
    assert facts.machine == MachineFacts(8, 8)


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("name", ["hopper_bf16_bf16_128x256x64_s4_c2_tiles", "hopper_split_bf16_bf16_128x128x64_s5"])
@pytest.mark.exhaustive_cases("hopper_split")
def test_blocks_of_a_cluster_meet_without_a_fence_of_the_device(name: str) -> None:
    """By the machine code: a release at cluster scope would be MEMBAR.ALL.GPU."""
    (kernel,) = (each for each in specialisations() if each.name == f"gemm_{name}")
    (facts,) = examine(kernel, ("sm_90a",), KernelCache(), nvdisasm_if_any())
    assert facts.machine is not None
    assert facts.machine.num_device_fences == 0


@pytest.mark.skipif(nvdisasm_if_any() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
def test_a_draw_neither_swaps_nor_fences_the_device() -> None:
    """By the machine code: 64-bit additions to shared memory would be loops."""
    for name, arch in (("cluster", "sm_90a"), ("block", "sm_80")):
        (kernel,) = (each for each in specialisations() if each.name == f"sampling_{name}")
        (facts,) = examine(kernel, (arch,), KernelCache(), nvdisasm_if_any())
        assert facts.machine == MachineFacts()


def test_counted_offences_are_named() -> None:
    case = next(case for case in cases() if not case.scattered_because)
    good = Counts(case.name, ("k",), warp_instructions=1, requests=1, sectors=20, useful_sectors=19.0, conflicts=3)
    assert offences_of(case, good) == []
    for useful in (18.9, float("nan")):
        (found,) = offences_of(case, dataclasses.replace(good, useful_sectors=useful))
        assert "sectors" in found
        assert offences_of(dataclasses.replace(case, scattered_because="x"), good) == []
    (found,) = offences_of(case, dataclasses.replace(good, loop_conflicts=2, wavefronts=9))
    assert "2 conflicts in a loop" in found


def test_a_tiling_and_its_tensor_cores_are_held() -> None:
    case = next(case for case in cases() if case.is_on_tensor_cores)
    sectors = case.tiled_bytes // 32
    good = Counts(case.name, ("k",), sectors=sectors, useful_sectors=sectors, tensor_flops=95, scalar_flops=5)
    assert offences_of(case, good) == []
    words = dataclasses.replace(good, sectors=2 * sectors, useful_sectors=2 * sectors, word_sectors=sectors)
    assert offences_of(case, words) == []
    (found,) = offences_of(case, dataclasses.replace(words, word_sectors=sectors * 9 // 10))
    assert "1.100 times the least of its tiling" in found
    (found,) = offences_of(case, dataclasses.replace(good, scalar_flops=6))
    assert "tensor cores: 94.1 %" in found


def test_exceptions_are_few_and_let_only_their_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kernel_report.EXCEPTIONS) <= kernel_report.MAX_EXCEPTIONS
    assert all(each.reason and not each.offence.startswith(("gemm", "attention")) for each in kernel_report.EXCEPTIONS)
    spilling = dataclasses.replace(FACTS, spill_bytes=4, has_double=True)
    monkeypatch.setattr(kernel_report, "EXCEPTIONS", (Allowed("kernel on sm_80: spills", "why"),))
    assert [offence.split(": ")[1] for offence in offenders([spilling], [])] == ["f64"]
    monkeypatch.setattr(kernel_report, "EXCEPTIONS", (Allowed("kernel", "why"),) * 6)
    with pytest.raises(ValueError, match="6 exceptions, at most 5"):
        offenders([], [])


def test_a_loop_is_what_lies_between_a_branch_and_its_target() -> None:
    text = """.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() {
    .reg .pred %p<2>; .reg .b32 %r<3>;
    mov.u32 %r1, 0;
    again: add.u32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 4;
    @%p1 bra again;
    mov.u32 %r2, 1;
    ret; }"""
    kernel = parse(text).kernels["k"]
    assert loops(kernel.instructions, kernel.labels) == [False, True, True, True, False, False]


def test_roofline_is_the_slower_of_memory_and_arithmetic() -> None:
    case = dataclasses.replace(next(cases()), least_bytes=2 * 10**9, flops=1, has_16_bits=False)
    assert page.roofline_us(case, A100) == pytest.approx(1e6 * 2e9 / 2.039e12)
    case = dataclasses.replace(case, least_bytes=2, flops=10**12)
    assert page.roofline_us(case, A100) == pytest.approx(1e6 / 19.5)
    assert page.roofline_us(dataclasses.replace(case, has_16_bits=True), H200) == pytest.approx(1e6 / 989.4)


@pytest.mark.emulator
def test_the_command_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "counted", "--cases", "add f32", "--check"]) == 0
    found = capsys.readouterr().out
    assert found.startswith("# Kernel report\n")
    assert sum(line.startswith("| add f32 |") for line in found.splitlines()) == 3


def test_the_tables_of_a_page_are_made_anew() -> None:
    case = next(case for case in cases() if case.name == "add f32")
    measured = [(case, Counts(case.name, ("k",), warp_instructions=1234))]
    text = "before\n<!-- table: elementwise -->\nold\n<!-- end -->\nafter\n"
    once = page.fill(text, measured)
    assert "1,234" in once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end -->\nafter\n")
    assert page.fill(once, measured) == once
    with pytest.raises(ValueError, match="family 'gemm'"):
        page.fill(text.replace("elementwise", "gemm"), measured)


def test_the_documents_show_every_case_of_the_ladders() -> None:
    page = (kernel_report.ROOT / "docs" / "measurements" / "kernel-counts.md").read_text()
    assert all(f"| {case.name} |" in page for case in cases() if case.family in ("gemm", "attention"))


@pytest.mark.emulator
def test_check_fails_on_an_offender(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_report, "LEAST_SECTOR_EFFICIENCY", 1.01)
    assert main(["--only", "counted", "--cases", "add f32", "--check"]) == 1
    assert "add f32: sectors: 100.0 %" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--only", "counted", "--cases", "no such case"])
