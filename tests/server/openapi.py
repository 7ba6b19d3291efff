"""OpenAI's own description of its answers, to validate ours against. Not part of the repository."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

DESCRIPTION = Path(__file__).parents[3] / "shared" / "data" / "openai" / "openapi.nullable_fixed.json"


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    components = json.loads(DESCRIPTION.read_text(encoding="utf-8"))["components"]
    assert schema in components["schemas"]
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": components})


def check_answer(schema: str, answer: Any) -> None:
    """Raises when `answer` is not what OpenAI's description of `schema` says. Skips where the description
    is absent."""
    if not DESCRIPTION.is_file():
        pytest.skip("../shared/data/openai is not there")
    errors = list(_validator(schema).iter_errors(answer))
    assert not errors, f"{schema}: {errors[0].message} at {list(errors[0].absolute_path)}"
