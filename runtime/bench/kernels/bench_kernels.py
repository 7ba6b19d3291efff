"""`bench kernels`: matrix products, attention, launches, a replayed graph and uploads, compared with the goals.

Everything timed has just been verified on the same input: products and attention against numpy on a sample of
rows, the graph against its eager run, uploads by reading back. Each run begins with a cold second-level cache, times
are those of events on the device, medians with quartiles. An emulated device runs tiny shapes and counts.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.bench.kernels.case import Case, prepare, row_of, timed, verify
from runtime.bench.kernels.counted import Counts, counting
from runtime.bench.kernels.goals import GOALS
from runtime.bench.kernels.host_costs import bandwidth, graph_row, launch_row, upload_row
from runtime.bench.kernels.operations import QWEN3_8B, attention_case, product_case
from runtime.bench.kernels.recurrent import QWEN35_35B, delta_rule_case
from runtime.bench.kernels.timing import Stopwatch
from runtime.bench.metrics import BenchmarkError
from runtime.bench.svg import COLOURS, page, text
from runtime.device.cublas import Cublas, NoCublasError
from runtime.device.gpu import Gpu
from runtime.emulator.driver.architectures import model_of

PARTS = ("gemm", "linear", "prefill", "decode", "state", "launch", "graph", "upload")
NUM_RUNS = 30


def cases(is_quick: bool) -> Iterator[tuple[str, Case]]:
    """(goal, case); `is_quick`: small enough to emulate."""
    if is_quick:
        yield "gemm", product_case("auto", 128, 128, 128, "bf16")
        for rows in (1, 16, 64):
            yield _linear_goal(rows), product_case("auto", rows, 128, 256, "bf16")
        yield "prefill", attention_case("auto", "bf16", 1, 0, 128, 4, 2, 128)
        yield "decode", attention_case("auto", "bf16", 2, 255, 1, 4, 2, 128)
        yield "state", delta_rule_case(2, 1, num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=16)
        return
    yield "gemm", product_case("auto", 8192, 8192, 8192, "bf16")
    for n, k in QWEN3_8B:
        yield "gemm", product_case("auto", 2048, n, k, "bf16")
    for rows in (1, 16, 64):
        for n, k in QWEN3_8B:
            yield _linear_goal(rows), product_case("auto", rows, n, k, "bf16")
    yield "prefill", attention_case("auto", "bf16", 1, 0, 8192, 32, 8, 128)
    yield "decode", attention_case("auto", "bf16", 32, 4095, 1, 32, 8, 128)  # 0.54 GB of K and V
    yield "state", delta_rule_case(256, 1, **QWEN35_35B)  # as many bytes are read, and written


def parts_named(text: str) -> tuple[str, ...]:
    """Those of comma-separated `PARTS`. Raises BenchmarkError for an unknown one."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise BenchmarkError(f"--parts {unknown[0]!r} is none of {', '.join(PARTS)}")
    return names


def roofs(report: Mapping[str, Any]) -> tuple[float, float, str]:
    """Bytes and operations a second, and their origin: measured reads and the best product, including cuBLAS's, or the
    emulated product's data sheet."""
    if report["is_emulated"]:
        model = model_of(report["arch"])
        return model.memory_bytes_per_s, model.bf16_flops, f"{model.name}'s data sheet"
    rates = [
        row["flops"] / each["median_us"] * 1e6
        for row in report["rows"] if row["goal"] == "gemm"
        for each in row["times"].values()
    ]  # fmt: skip
    if not rates:
        raise BenchmarkError("the roofline needs a product that was timed: --parts must have gemm")
    return 1e9 * report["bandwidth"]["read"]["gb_per_s"], max(rates), "measured"


def _linear_goal(rows: int) -> str:
    return "linear_1" if rows == 1 else "linear_few"


def bench_kernels(
    device: str, *, parts: tuple[str, ...] = PARTS, num_runs: int = NUM_RUNS,
    report_progress: Callable[[str], None] = lambda line: None, rates: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"device", "is_emulated", "bandwidth", "cublas", "rows", "environment"}. `rates`: an earlier result
    of `bandwidth`, to skip measuring it again.

    Raises AssertionError naming the case if a result is wrong, and stops timing.
    """
    gpu = Gpu.of(device)
    is_quick = gpu.driver.is_emulated
    stopwatch = Stopwatch(gpu, 2 if is_quick else num_runs)
    if rates is None:
        report_progress("bandwidth")
        rates = bandwidth(gpu, stopwatch, is_quick)
    cublas, why = _cublas(gpu)
    rows = []
    try:
        for number, (goal, case) in enumerate(cases(is_quick)):
            if goal.split("_")[0] in parts:
                report_progress(f"{case.name} {case.shape}")
                rows.append(_case_row(gpu, goal, case, number, stopwatch, cublas))
                gpu.synchronize()
                gc.collect()
    finally:
        if cublas is not None:
            cublas.close()
    for part, measure in (("launch", launch_row), ("graph", graph_row), ("upload", upload_row)):
        if part in parts:
            report_progress(part)
            rows.append(measure(gpu, stopwatch, is_quick))
            gc.collect()
    for row in rows:
        _judge(row, rates)
    return {
        "device": gpu.properties.name, "arch": gpu.arch, "is_emulated": is_quick, "bandwidth": rates,
        "cublas": "used" if cublas is not None else why, "rows": rows, "environment": describe_machine(),
    }  # fmt: skip


def _cublas(gpu: Gpu) -> tuple[Cublas | None, str]:
    if gpu.driver.is_emulated:
        return None, "needs a GPU"
    try:
        return Cublas(gpu), ""
    except NoCublasError as error:
        return None, str(error)


def _case_row(
    gpu: Gpu, goal: str, case: Case, seed: int, stopwatch: Stopwatch, cublas: Cublas | None
) -> dict[str, Any]:
    _inputs, ready = prepare(gpu, case, seed)
    with counting(gpu) as counts:
        found = verify(gpu, case, ready)
    row: dict[str, Any] = {"goal": goal} | row_of(case, ready, found)
    if stopwatch.is_emulated:
        return row | {"counted": _counted(counts, case)}
    competitors: dict[str, Callable[[], Any]] = {"ours": ready.run}
    if cublas is not None and ready.operands:
        (m, n, k), (x, weight) = ready.sizes, ready.operands
        theirs = competitors["cublas"] = cublas.bind_linear(m, n, k, ready.dtype, x, weight, ready.out)
        row["cublas_error_share"] = verify(gpu, case, ready, theirs, "cuBLAS's")["error_share"]
    return timed(row, case, competitors, stopwatch)


def _counted(counts: Counts, case: Case) -> dict[str, Any]:
    """The emulator's counts, against the minimum of the work."""
    return {
        "kernels": list(counts.kernels), "warp_instructions": counts.warp_instructions,
        "moved_per_least_byte": round(counts.moved_bytes / case.least_bytes, 3),
        "sector_efficiency": round(counts.sector_efficiency, 4), "bank_conflicts": counts.conflicts,
        "barriers": counts.barriers, "tensor_flops": counts.tensor_flops,
    }  # fmt: skip


def _judge(row: dict[str, Any], rates: Mapping[str, Any]) -> None:
    """Adds the row's "value" and "verdict" against its goal, if known."""
    goal = GOALS[row["goal"]]
    row |= {"measure": goal.measure, "must": goal.must, "ahead": goal.ahead}
    read, bus = (rates[name].get("gb_per_s") for name in ("read", "host to device"))
    if read is None:
        return
    if row["goal"] in ("linear_1", "linear_few", "decode"):
        row["value"] = round(row["gb_per_s"] / read, 3)
    elif row["goal"] == "state":  # copies count twice, too
        row["value"] = round(row["gb_per_s"] / rates["copy"]["gb_per_s"], 3)
    elif row["goal"] == "gemm":
        row["value"] = row.get("share_of_cublas")
    elif row["goal"] == "upload":
        row["value"] = round(row["gb_per_s"] / bus, 3)
    if row.get("value") is not None:
        row["verdict"] = goal.verdict(row["value"])


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """The report as a table for a person."""
    lines = [f"{report['device']} ({report['arch']})"]
    if report["is_emulated"]:
        lines += ["emulated: tiny shapes, counted; times mean nothing", ""]
        lines.append(f"{'':<26}{'shape':<52}{'moved/least':>12}{'sectors':>9}{'conflicts':>11}{'barriers':>10}")
        for row in report["rows"]:
            if "counted" in row:
                counted = row["counted"]
                lines.append(
                    f"{row['case']:<26}{row['shape']:<52}{counted['moved_per_least_byte']:>12.2f}"
                    f"{counted['sector_efficiency']:>9.1%}{counted['bank_conflicts']:>11,}{counted['barriers']:>10,}"
                )
            else:
                lines.append(f"{row['case']:<26}{row['shape']:<52}  verified")
        return lines
    rates = ", ".join(f"{name} {rate['gb_per_s']:,.0f}" for name, rate in report["bandwidth"].items())
    lines += [f"GB/s: {rates}", f"cuBLAS: {report['cublas']}", ""]
    lines.append(f"{'':<26}{'shape':<52}{'us':>10}{'+-':>7}{'GB/s':>9}{'TFLOP/s':>9}{'':>9}  goal")
    for row in report["rows"]:
        ours = row["times"]["ours"]
        spread = (ours["high_us"] - ours["low_us"]) / 2
        value = "" if row.get("value") is None else f"{row['value']:.3f}"
        lines.append(
            f"{row['case']:<26}{row['shape']:<52}{ours['median_us']:>10,.1f}{spread:>7,.1f}"
            f"{row.get('gb_per_s', 0):>9,.0f}{row.get('tflop_per_s', 0):>9,.1f}{value:>9}"
            f"  {row['must']:g} / {row['ahead']:g} {row['measure']} {row.get('verdict', '')}"
        )
    return lines


_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 960.0, 40.0, 520.0


def roofline_svg(report: Mapping[str, Any], bytes_per_s: float, flops_per_s: float, source: str) -> str:
    """Operations a second over operations a byte, both logarithmic: the two roofs, and a point for each row.

    A timed row stands at its measured rate; a counted one is an open circle on its roof, at its operations per moved
    byte. `source` is the roofs' origin.
    """
    points = []
    for row in report["rows"]:
        if "flops" not in row:
            continue
        if "counted" in row:
            intensity = row["flops"] / (row["least_bytes"] * row["counted"]["moved_per_least_byte"])
            points.append((row, intensity, min(flops_per_s, intensity * bytes_per_s)))
        else:
            points.append((row, row["flops"] / row["least_bytes"], 1e12 * row["tflop_per_s"]))
    ridge = flops_per_s / bytes_per_s
    low = 10 ** math.floor(math.log10(min([ridge / 100, *(x for _, x, _ in points)])))
    high = 10 ** math.ceil(math.log10(max([ridge * 10, *(x for _, x, _ in points)])))
    most = flops_per_s * 2
    least = min([low * bytes_per_s, *(y for _, _, y in points)]) / 2

    def at(x: float, y: float) -> tuple[float, float]:
        right = math.log(x / low) / math.log(high / low)
        up = math.log(y / least) / math.log(most / least)
        return _LEFT + right * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    corners = " ".join(
        f"{x:.1f},{y:.1f}" for x, y in (at(low, low * bytes_per_s), at(ridge, flops_per_s), at(high, flops_per_s))
    )
    title = f"{report['device']}: {bytes_per_s / 1e12:.2f} TB/s, {flops_per_s / 1e12:,.0f} TFLOP/s ({source})"
    parts = [
        text(_LEFT, 20, title, style="title"),
        f'<polyline points="{corners}" fill="none" stroke="#222"/>',
        text(_RIGHT, _BOTTOM + 30, "operations a byte of device memory", anchor="end"),
        text(10, _TOP - 6, "TFLOP/s"),
    ]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x, _ = at(10.0**power, most)
        parts.append(text(x, _BOTTOM + 14, f"{10.0**power:g}", anchor="middle"))
    goals = list(dict.fromkeys(row["goal"] for row, _, _ in points))
    for row, intensity, rate in points:
        x, y = at(intensity, rate)
        colour = COLOURS[goals.index(row["goal"]) % len(COLOURS)]
        fill = "none" if "counted" in row else colour
        words = escape(f"{row['case']} {row['shape']}: {rate / 1e12:.3g} TFLOP/s")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" fill="{fill}"><title>{words}</title>')
        parts.append("</circle>")
    for place, goal in enumerate(goals):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<circle cx="{_LEFT + 10}" cy="{560 + 16 * place}" r="4" fill="{colour}"/>')
        parts.append(text(_LEFT + 20, 564 + 16 * place, goal))
    return page(parts, 1000, 570 + 16 * len(goals))
