"""An argument of one value a prompt, or one for all."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.prompts import one_each


@pytest.mark.parametrize("given", ["a0", 5, {"x": 1}])
def test_what_is_neither_a_value_nor_a_list_is_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestError, match=f"lora_request must be a SamplingParams, .* got {type(given).__name__}"):
        one_each("lora_request", ["x", "y"], given, SamplingParams)


def test_lists_of_another_length_are_refused() -> None:
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        one_each("sampling_params", ["x", "y"], [SamplingParams()], SamplingParams)
