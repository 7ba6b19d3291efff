"""Goldens of models with recurrent states and without experts, whose weights are drawn from several seeds."""

from __future__ import annotations

import json
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"
ERRORS = GOLDENS / "bfloat16_errors.json"
"""By `tools/references/make_bfloat16_errors.py`."""
CASES = ("qwen3_5_odd", "lfm2_odd", "granite_hybrid_odd", "mistral4_odd")
NUM_SEEDS = 24


def seed_of(case: str, index: int) -> int:
    """The golden's own seed first."""
    seed: int = json.loads((GOLDENS / case / "golden.json").read_text(encoding="utf-8"))["seed"]
    return seed + 1000 * index
