"""The inference runtime. Its public names are handed on lazily: importing one file wakes no other.

Example: `from runtime import LLM, SamplingParams`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.sampling_params import SamplingParams as SamplingParams
    from runtime.llm import LLM as LLM
    from runtime.llm import CompletionOutput as CompletionOutput
    from runtime.llm import RequestOutput as RequestOutput
    from runtime.tensor.tensor import Tensor as Tensor

_HOME = {
    "LLM": "runtime.llm",
    "RequestOutput": "runtime.llm",
    "CompletionOutput": "runtime.llm",
    "SamplingParams": "runtime.engine.sampling_params",
    "Tensor": "runtime.tensor.tensor",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "Tensor"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
