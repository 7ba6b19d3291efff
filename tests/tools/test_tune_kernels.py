"""Tables of the fastest kernels: written by the tool, read by plans, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from numba_kernels.cuda import gemm, tables
from numba_kernels.cuda.tables import Choice, choose, read, table_of
from tools import tune_kernels
from tools.tune_kernels import main, merged, write

DEVICE = "emulated:sm_90a"


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "bf16", "n": 256, "k": 128, "m": 64, "tier": "tensor_core", "tile": "", "us": 1.5} | changes


def write_table(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "sm_90a.json"
    path.write_text(json.dumps({"device": "d", "date": "2026-01-01", "products": list(entries)}))
    return path


def test_the_nearest_number_of_rows_is_chosen(tmp_path: Path) -> None:
    write_table(tmp_path, entry(), entry(m=16, tier="gemv"), entry(m=1024, tile="128x128x32_s5"))

    def chosen(m: int, **sizes: int) -> Choice | None:
        return choose(m, sizes.get("n", 256), sizes.get("k", 128), "bf16", "sm_90a", tmp_path)

    assert chosen(16) == chosen(20) == chosen(8) == Choice("gemv", "")
    assert chosen(64) == chosen(128) == Choice("tensor_core", "")
    assert chosen(2048) == Choice("tensor_core", "128x128x32_s5")
    assert chosen(7) is chosen(4096) is chosen(300) is None  # more than twice as far
    assert chosen(64, n=512) is chosen(64, k=64) is None
    assert choose(64, 256, 128, "f16", "sm_90a", tmp_path) is None
    assert choose(64, 256, 128, "bf16", "sm_80", tmp_path) is None
    table_of.cache_clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"m": "64"}, "m is '64', must be int"), ({"us": None}, "us is None"), ({"tile": 3}, "tile is 3")],
)
def test_a_broken_table_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write_table(tmp_path, entry(), entry(**change))
    with pytest.raises(ValueError, match=f"{path.name}: product 1: {words}"):
        read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no table of products"):
        read(path)


def candidates(m: int, n: int, k: int, dtype: str, arch: str) -> list[tables.Choice]:
    return gemm.candidates(gemm.Product(m, n, k, dtype), gemm.machine_of(arch))


def test_every_packaged_table_can_be_read_and_planned() -> None:
    for path in tables.FOLDER.glob("*.json"):
        for (dtype, n, k), rows in read(path).items():
            for m, choice in rows:
                assert choice in candidates(m, n, k, dtype, path.stem)


def test_an_earlier_tables_other_sizes_stay(tmp_path: Path) -> None:
    path = write_table(tmp_path, entry(), entry(m=16))
    write(path, "GPU", [entry(m=16, us=9.0), entry(m=32)])
    assert [(each["m"], each["us"]) for each in merged(path, [])] == [(16, 9.0), (32, 1.5), (64, 1.5)]
    assert json.loads(path.read_text())["device"] == "GPU"
    assert len(path.read_text().splitlines()) == 5  # a product a line


def test_plans_take_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(m: int, **options: Any) -> str:
        launch = gemm.plan(gemm.Product(m, 256, 128, "bf16", **options), gemm.machine_of("sm_80"))
        assert launch is not None
        return launch.specialisation.name

    before = kernel(64)
    names = {str(tile) for tile in gemm.tensor_core.TILES}
    other = next(name for name in sorted(names) if name not in before)
    (tmp_path / "sm_80.json").write_text(json.dumps({"products": [entry(tile=other)]}))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    table_of.cache_clear()
    assert other in kernel(64)
    (tmp_path / "sm_80.json").write_text(json.dumps({"products": [entry(m=64, tier="skinny", tile="")]}))
    table_of.cache_clear()
    assert "skinny" in kernel(60)
    assert "skinny" not in kernel(90)  # the nearest that was measured, but more rows than it takes
    (tmp_path / "sm_80.json").write_text(json.dumps({"products": [entry(tile=other)]}))
    table_of.cache_clear()
    assert other not in kernel(64, exact=True)  # exact goes by the weight's shape alone
    assert other not in kernel(64, is_aligned=False)
    table_of.cache_clear()


@pytest.mark.emulator
@pytest.mark.exhaustive  # compiles every candidate
def test_the_tool_writes_a_table_that_plans_can_read(tmp_path: Path) -> None:
    assert main(["--device", DEVICE, "--quick", "--rows", "16", "--folder", str(tmp_path)]) == 0
    ((dtype, n, k),) = read(tmp_path / "sm_90a.json")
    assert (dtype, n, k) == ("bf16", *tune_kernels.QUICK_SHAPES[0])
    (each,) = json.loads((tmp_path / "sm_90a.json").read_text())["products"]
    assert len(each["all_us"]) == len(candidates(16, n, k, "bf16", "sm_90a")) > 1
    assert each["us"] == min(each["all_us"].values())


def test_an_emulated_devices_times_go_to_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", DEVICE, "--quick"])
    assert "its times mean nothing" in capsys.readouterr().err
