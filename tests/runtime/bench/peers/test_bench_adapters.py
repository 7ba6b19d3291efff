"""`bench adapters` on a tiny shape: its report, and that an adapter is measured that changes the answers."""

from __future__ import annotations

from runtime.bench.peers.bench_adapters import OURS, PLAIN, Case, bench_adapters, markdown
from runtime.bench.peers.workloads import QWEN3
from runtime.bench.scheduling.roofline import PRESETS

TINY = {
    **PRESETS[QWEN3], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


def test_ours_alone() -> None:
    cases = Case(1, 0), Case(1, 1), Case(9, 0), Case(9, 8)
    report = bench_adapters({}, ["bfloat16"], num_rounds=2, config=TINY, cases=cases, say=lambda line: None)
    found = {(row["side"], row["sequences"], row["adapters"]): row for row in report["results"]}
    assert set(found) == {(OURS, *case) for case in cases} | {(PLAIN, *case) for case in cases if not case.adapters}
    assert all(len(row["rounds_s"]) == 2 and row["step_s"] > 0 for row in found.values())
    assert {case.adapters: found[OURS, *case]["most"] for case in cases} == {0: 0.01, 1: 0.05, 8: 0.1}
    assert found[PLAIN, 1, 0]["more"] == 0.0
    loads = report["loads_ms"]["bfloat16"]
    assert loads["from_files"] > loads["from_host_memory"]
    assert "| bfloat16 | xserv | 9 | 8 |" in markdown(report)
