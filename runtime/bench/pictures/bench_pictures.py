"""The report of `bench pictures`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError
from runtime.bench.pictures.decoding import bench_decoding
from runtime.bench.pictures.engine import bench_gaps, bench_reuse
from runtime.bench.pictures.shapes import write_qwen3_vl
from runtime.bench.pictures.tower import bench_tower

PARTS = ("decoding", "tower", "reuse", "gaps")


def bench_pictures(
    parts: Sequence[str],
    *,
    side: int,
    tower_layers: int,
    text_layers: int,
    num_rounds: int,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:
    """`side`: pixels of a picture's side, but of decoding's. Raises BenchmarkError."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise BenchmarkError(f"parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if side % 32 or not 64 <= side <= 2048:
        raise BenchmarkError(f"side = {side} must be a multiple of 32 in 64 … 2048")
    for name, value, least, most in (("tower_layers", tower_layers, 1, 24), ("text_layers", text_layers, 4, 28)):
        if not least <= value <= most:
            raise BenchmarkError(f"{name} = {value} is outside of {least} … {most}")
    report: dict[str, Any] = {"environment": describe_machine(), "side": side, "text_layers": text_layers}
    with tempfile.TemporaryDirectory() as place:
        folder = str(write_qwen3_vl(Path(place) / "model", tower_layers=tower_layers, text_layers=text_layers))
        if "decoding" in parts:
            report_progress("decoding")
            report["decoding"] = bench_decoding(4 * num_rounds)
        if "tower" in parts:
            report_progress("tower")
            report["tower"] = bench_tower(folder, side // 16, num_rounds)
        if {"reuse", "gaps"} & set(parts):
            report |= _of_engine(folder, parts, side, num_rounds, report_progress)
    return report


def _of_engine(
    folder: str, parts: Sequence[str], side: int, num_rounds: int, report_progress: Callable[[str], None]
) -> dict[str, Any]:
    from runtime.llm import LLM

    found: dict[str, Any] = {}
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 4}
    with LLM(folder, num_blocks=1024, compile_ahead=False, use_tqdm_on_load=False, **options) as llm:
        if "reuse" in parts:
            report_progress("reuse")
            found["reuse"] = bench_reuse(llm, side, num_rounds)
        if "gaps" in parts:
            report_progress("gaps")
            found["gaps"] = bench_gaps(llm, side, 100, num_rounds)
    return found


def lines_of(report: dict[str, Any]) -> dict[str, Any]:
    """What a person reads."""
    lines: dict[str, Any] = {}
    for name, found in report.get("decoding", {"rules": {}})["rules"].items():
        for part, value in found["processor_ms"].items():
            lines[f"1080p JPEG, {name}: {part} (ms of a core)"] = value["median"]
            lines[f"1080p JPEG, {name}: {part}, at least (ms of a core)"] = value["least"]
        lines[f"1080p JPEG, {name}: by the server's process (ms)"] = found["by_process_ms"]["median"]
    if found := report.get("tower"):
        lines["tower (s)"] = found["tower_s"]
        lines["its products alone (GFLOP/s)"] = found["products_gflop_per_s"]
        lines["share of the products' rate"] = found["share"]
    if found := report.get("reuse"):
        lines["first token, a new picture (s)"] = found["cold_s"]
        lines["with its embeddings kept: times faster"] = found["times_faster_with_features"]
        lines["with its pages kept: times faster"] = found["times_faster_with_pages"]
    if found := report.get("gaps"):
        lines["p99 gap of decodes, alone (ms)"] = found["alone_ms"]["p99"]
        lines["while pictures are encoded: times as long as alone"] = found["p99_encoding_times_of_alone"]
        lines["beside pictures, their prompts too: times as long as alone"] = found["p99_times_of_alone"]
        lines["beside pictures: times as long as beside prompts"] = found["p99_times_of_prompts"]
    return lines
