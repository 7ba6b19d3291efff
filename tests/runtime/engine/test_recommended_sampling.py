"""What a generation config recommends, from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.recommended_sampling import recommended_sampling


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": False, "top_p": 0, "top_k": 2.5}, {"temperature": 0.0}),
        ({"min_p": 0.1, "max_new_tokens": 99}, {"min_p": 0.1, "max_tokens": 99}),
    ],
)
def test_recommendations(tmp_path: Path, content: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert recommended_sampling(tmp_path) == expected
