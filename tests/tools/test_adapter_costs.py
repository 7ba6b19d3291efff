"""The modelled costs of adapters that docs/adapters.md shows are those that the model says now."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.kernel_costs.adapter_costs import costs

ROOT = Path(__file__).resolve().parents[2]
MODELLED = ROOT / "docs" / "measurements" / "2026-11-30-gpu-adapters-modelled.json"

pytestmark = pytest.mark.emulator


def test_the_stored_costs_are_the_models() -> None:
    stored = json.loads(MODELLED.read_text(encoding="utf-8"))["cases"]
    for was, each in zip(stored, costs(), strict=True):
        now = asdict(each)
        assert was.pop("weights") == now.pop("weights")
        assert was.pop("share") == pytest.approx(each.share, abs=1e-4)
        assert was == pytest.approx(now)


def test_the_page_shows_them() -> None:
    shares: dict[tuple[int, int], list[float]] = {}
    for each in costs():
        shares.setdefault((each.sequences, each.adapters), []).append(100 * each.share)
    page = " ".join((ROOT / "docs" / "adapters.md").read_text(encoding="utf-8").split())
    one, eight = (" / ".join(f"{share:.1f}" for share in shares[key]) for key in ((1, 1), (32, 8)))
    assert all(share <= 10 for share in shares[32, 8])
    assert all(
        each.base_s * (1 + each.share) <= 2.9e-3 for each in costs() if each.weights != "bf16" and each.sequences > 1
    )
    assert f"adds {one}%" in page
    assert f"eight among 32 sequences {eight}%" in page
