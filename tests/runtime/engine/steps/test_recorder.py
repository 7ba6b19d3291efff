"""Both recorders have all that their protocol names: mypy does not see it of the GPU's, which is imported later."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from runtime.engine.steps.recorder import Recorder
from runtime.engine.steps.recorder_cpu import CpuRecorder
from runtime.engine.steps.recorder_gpu import GpuRecorder

pytestmark = pytest.mark.emulator


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Their names, kinds and defaults, without `self`."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]


@pytest.mark.parametrize("kind", [CpuRecorder, GpuRecorder])
@pytest.mark.parametrize("name", [name for name in vars(Recorder) if not name.startswith("_")])
def test_a_recorder_has_what_the_protocol_names(kind: type, name: str) -> None:
    declared = vars(Recorder)[name]
    assert hasattr(kind, name), f"{kind.__name__} lacks {name}"
    if inspect.isfunction(declared):
        assert parameters(getattr(kind, name)) == parameters(declared)
