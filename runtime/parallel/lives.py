"""``Life``: a request of a fleet whose engines have roles, from its submission to the last output of its last choice.

The fleet knows what its client has got. So a request outlives its engine, and can be taken back from it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from runtime.engine.messages import Begun, EngineOutput, EngineRequest, RequestTimes
from runtime.engine.process.client import OutputSink
from runtime.engine.scheduling.sequence import Request
from runtime.parallel.routing import Route


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    mirostat_mu: float | None = None
    has_ended: bool = False
    is_here: bool = True  # its engine owes it a last output


@dataclass(eq=False)
class Life:
    """See the module.

    lock         guards all but ``is_held``
    number       of the engine's part of it: outputs of an earlier one are dropped
    lease        under which the engine that has it offers its pages, or has done so; "": it keeps the request
    offerer      that engine
    decoder      the engine that was told of the lease
    is_placed    an engine has it
    is_accepted  one has had it: queue limits do not apply any more
    is_recalled  its engine was told to end it, and it is to go on later
    ending       the reason if it was told so for good
    is_held      it waits for the end of a pause; see `FleetPauses`
    version      of the weights that computed its latest tokens
    first_times  of the engine that handed it over first
    """

    request: EngineRequest
    prepared: Request
    sink: OutputSink
    route: Route
    choices: list[Choice]
    lock: threading.RLock = field(default_factory=threading.RLock)
    number: int = 0
    lease: str = ""
    offerer: int = 0
    decoder: int | None = None
    is_placed: bool = False
    is_accepted: bool = False
    is_recalled: bool = False
    is_held: bool = False
    is_paused: bool = False
    ending: str | None = None
    version: str = ""
    num_restarts: int = 0
    num_deaths: int = 0
    first_times: RequestTimes | None = None
    first_token_s: float | None = None

    @property
    def open_choices(self) -> list[int]:
        return [index for index, choice in enumerate(self.choices) if not choice.has_ended]

    @property
    def has_output(self) -> bool:
        """Whether an open choice has tokens: these are of ``version``, and so must the next ones be."""
        return any(self.choices[index].token_ids for index in self.open_choices)

    @property
    def is_here(self) -> bool:
        """Whether an engine owes it an output."""
        return any(self.choices[index].is_here for index in self.open_choices)

    @property
    def begun(self) -> list[Begun]:
        return [Begun(each.token_ids, each.mirostat_mu, each.has_ended) for each in self.choices]

    @property
    def most_left(self) -> int:
        """Tokens that the choice with the fewest may still get."""
        return self.prepared.max_tokens - max(len(self.choices[index].token_ids) for index in self.open_choices)

    def forget_output(self, version: str) -> list[EngineOutput]:
        """Begin again from the prompt, with weights of this version. Returns what the client is told."""
        begun = [index for index in self.open_choices if self.choices[index].token_ids]
        for index in self.open_choices:
            self.choices[index] = Choice(is_here=False)
        self.num_restarts += 1
        self.version, self.first_times, self.first_token_s = "", None, None
        return [
            EngineOutput(
                request_id=self.request.request_id, index=index, new_token_ids=[], begins_again=True,
                num_prompt_tokens=self.prepared.num_prompt_tokens, weight_version=version,
                num_restarts=self.num_restarts,
            )
            for index in begun
        ]  # fmt: skip
