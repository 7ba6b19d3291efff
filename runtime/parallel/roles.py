"""Roles of a fleet's engines: which of them compute prompts, and which one writes a request's answer.

    roles = StaticRoles(num_prefill=1, num_engines=4)
    costs = roles.prompt_costs(loads, num_new)           # the router sends the prompt to the engine with the least
    engine = roles.decode_engine(loads, prefill_engine)  # where its answer is written; often the same engine

Like the router, the module has no clocks, threads and processes: a fleet and the simulator run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError


class EngineLoad(NamedTuple):
    """An engine's load.

    num_prompt   prompt tokens that it has still to compute
    num_decodes  open choices with a first token
    num_context  tokens of those choices' prompts
    is_ready     False: it gets no request
    """

    num_prompt: int
    num_decodes: int
    num_context: int
    is_ready: bool = True


class Roles(Protocol):
    """The division of work among engines."""

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: NDArray[np.int64]) -> NDArray[np.float64]:
        """The cost of a prompt on each engine, ``[num_engines]``, of which ``num_new`` tokens must be computed there;
        infinite for an engine that takes no prompts. At least one ready engine has a finite cost."""
        ...

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        """The engine that goes on with a request whose prompt ``engine`` has computed: a ready one, or ``engine``."""
        ...


class StaticRoles:
    """The first ``num_prefill`` engines compute prompts, the others write answers. If no engine of a kind is ready,
    those of the other kind take its work."""

    def __init__(self, num_prefill: int, num_engines: int) -> None:
        if not 0 < num_prefill < num_engines:
            raise InvalidArgumentError(
                f"{num_prefill} of {num_engines} engines compute prompts: at least one must, and one must not",
                param="prefill_engines",
            )
        self.num_prefill, self.num_engines = num_prefill, num_engines

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: NDArray[np.int64]) -> NDArray[np.float64]:
        able = ready_of(loads, range(self.num_prefill)) or ready_of(loads, range(self.num_prefill, self.num_engines))
        costs = np.full(len(loads), np.inf)
        for engine in able:
            costs[engine] = loads[engine].num_prompt + num_new[engine]
        return costs

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        able = ready_of(loads, range(self.num_prefill, self.num_engines))
        return min(able, key=lambda each: (loads[each].num_context, loads[each].num_decodes), default=engine)


def ready_of(loads: Sequence[EngineLoad], engines: Sequence[int]) -> list[int]:
    """Those of these engines that are ready."""
    return [engine for engine in engines if loads[engine].is_ready]
