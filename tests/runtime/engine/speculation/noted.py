"""An engine that tries all that its drafter over hidden states says, and what that is."""

from __future__ import annotations

from typing import Any

from runtime.engine.engine import Engine
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.page_proposer import PageProposer
from runtime.engine.speculation.state_proposer import StateProposer

Proposals = dict[tuple[str, int], list[int]]
"""By request and number of output tokens."""


def note_proposals(engine: Engine) -> tuple[Any, Proposals]:
    """From now on all of them; the drafter, and what it says."""
    assert engine.speculator is not None
    engine.speculator.tries_all()
    engine.speculator._hang_s = 1000.0  # the machine may be busy
    drafter, said = engine.speculator._drafter, Proposals()
    assert isinstance(drafter, StateProposer | PageProposer)
    propose = drafter.propose

    def noted(sequence: Sequence, most: int) -> tuple[Ids, int]:
        ids, confidence = propose(sequence, most)
        said[sequence.request.request_id, sequence.num_output_tokens] = ids.tolist()
        return ids, confidence

    drafter.propose = noted  # type: ignore[method-assign]
    return drafter, said
