"""What real engines of this process were asked while a test ran.

A draw with a seed from the system gives an answer that nobody has seen before: a test that wants that says so, by
`@pytest.mark.unseeded`."""

from __future__ import annotations

from runtime.engine.open_requests import OpenRequests
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request

arrived: list[tuple[SamplingParams, bool]] = []
"""Each request's parameters, and whether its draws have a seed that the test knows."""

_make, _admit = OpenRequests.__init__, OpenRequests.admit
_unseeded: set[int] = set()  # engines, by the ids of their open requests


def _make_and_note(self: OpenRequests, scheduler: object, seed: int | None) -> None:
    (_unseeded.add if seed is None else _unseeded.discard)(id(self))
    _make(self, scheduler, seed)  # type: ignore[arg-type]


def _admit_and_note(self: OpenRequests, request: Request) -> None:
    params = request.params
    arrived.append((params, params.is_greedy or params.seed is not None or id(self) not in _unseeded))
    _admit(self, request)


def watch() -> None:
    """From now on requests are noted."""
    OpenRequests.__init__, OpenRequests.admit = _make_and_note, _admit_and_note  # type: ignore[method-assign]


def shown(params: SamplingParams) -> str:
    """The parameters that are not the usual ones."""
    usual = SamplingParams()
    fields = [(name, getattr(params, name)) for name in ("temperature", "seed", *params.__struct_fields__)]
    return ", ".join(
        f"{name}={value!r}" for name, value in dict(fields).items()
        if name in ("temperature", "seed") or value != getattr(usual, name)
    )  # fmt: skip
