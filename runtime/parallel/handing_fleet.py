"""``HandingFleet``: a fleet whose engines have roles. One computes a prompt, another continues the answer.

    submit ──▶ engine A: prompt, first token ──▶ engine B: the other tokens
                  └── pages, while later chunks are computed ──▶

The fleet knows what a client has got of each request. So a request outlives its engine: another one gets it with those
tokens, finds what pages it can, computes the rest, and goes on with the same bits.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import (
    Begun,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    RequestTimes,
    Source,
    StepView,
)
from runtime.engine.process.client import OutputSink, call_sink, ignore
from runtime.engine.scheduling.sequence import Request
from runtime.engine.transfer.identity import MismatchError
from runtime.parallel.fleet import Fleet
from runtime.parallel.pacing import Pacer
from runtime.parallel.roles import AutoRoles, Roles, StaticRoles
from runtime.parallel.routing import Route

logger = logging.getLogger("xserv.engine")

MOST_DEATHS = 8
"""A request whose engines have died so often may be what kills them: it ends with the next one."""

RETRY_S = 0.05
"""How often a request that no engine can take is tried again."""


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    mirostat_mu: float | None = None
    has_ended: bool = False
    is_here: bool = True  # its engine owes it a last output


@dataclass(eq=False)
class _Life:
    """A request, from its submission to the last output of its last choice.

    number       of the engine's part of it: outputs of an earlier one are dropped
    lease        under which the engine that has it offers its pages, or has done so; "": it keeps the request
    offerer      that engine
    decoder      the engine that was told of the lease
    is_placed    an engine has it
    is_accepted  one has had it: queue limits do not apply any more
    first_times  of the engine that handed it over first
    """

    request: EngineRequest
    prepared: Request
    sink: OutputSink
    route: Route
    choices: list[_Choice]
    lock: threading.RLock = field(default_factory=threading.RLock)
    number: int = 0
    lease: str = ""
    offerer: int = 0
    decoder: int | None = None
    is_placed: bool = False
    is_accepted: bool = False
    is_paused: bool = False
    num_deaths: int = 0
    first_times: RequestTimes | None = None
    first_token_s: float | None = None

    @property
    def open_choices(self) -> list[int]:
        return [index for index, choice in enumerate(self.choices) if not choice.has_ended]

    @property
    def begun(self) -> list[Begun]:
        return [Begun(each.token_ids, each.mirostat_mu, each.has_ended) for each in self.choices]

    @property
    def most_left(self) -> int:
        """Tokens that the choice with the fewest may still get."""
        return self.prepared.max_tokens - max(len(self.choices[index].token_ids) for index in self.open_choices)


class HandingFleet(Fleet):
    """See ``Fleet``, whose arguments it takes. A request ends with ``engine_died`` only if its engines have died again
    and again, or none will come back."""

    def __init__(self, model: str | Path | None = None, **arguments: Any) -> None:
        self._lives: dict[str, _Life] = {}  # guarded by the lock
        self._homeless: list[_Life] = []
        self._ended = threading.Condition()
        self._retrier: threading.Thread | None = None
        self._refuses = False  # requests, until those that are open have ended
        self.pacer: Pacer | None = None
        super().__init__(model, **arguments)

    def roles_of(self, config: EngineConfig, info: EngineInfo) -> Roles | None:
        count, targets = config.data_parallel_size, (config.ttft_target_s, config.tpot_target_s)
        if config.engine_roles == "fixed":
            return StaticRoles(config.prefill_engines, count)
        return AutoRoles(count, None, *targets, max_chunk=info.max_num_batched_tokens, rows=info.max_num_seqs)

    def wait_until_started(self) -> None:
        super().wait_until_started()
        if isinstance(self._roles, AutoRoles):
            self.pacer = Pacer(self._roles, self._lock)
            self.watch(self._pace)
        first = self._clients[0].info.identity
        assert first is not None
        for engine, client in enumerate(self._clients):
            other = client.info.identity
            assert other is not None
            try:
                first.check(other)
            except MismatchError as error:
                self.close()
                raise RequestError(f"engines 0 and {engine}: {error}", param="prefill_engines") from None

    @property
    def _scheme(self) -> str:
        """The engines' transport: shared memory on this machine, TCP where Ray places them."""
        return "unix" if self._places is None else "tcp"

    def _pace(self, view: StepView) -> None:
        """An engine has run a step. Called on its supervisor's thread."""
        assert self.pacer is not None
        if not self._is_closing and self.pacer.see(view):
            threading.Thread(
                target=self.pacer.renew, args=(self._clients, self.info), name="xserv-pacer", daemon=True
            ).start()

    # A request's way

    def _begin(self, route: Route, request: EngineRequest, prepared: Request, sink: OutputSink) -> None:
        life = _Life(request, prepared, sink, route, [_Choice() for _ in range(request.params.n)])
        with self._lock:
            self._lives[request.request_id] = life
        try:
            with life.lock:
                self._place(life, route.engine)
        except BaseException:
            with self._lock:
                del self._lives[request.request_id]
            raise

    def _place(self, life: _Life, engine: int) -> None:
        """Give a request to an engine that computes what is missing, and then hands it over, if the roles want that.
        The life's lock is held. Raises as ``ProcessEngineClient.admit`` does."""
        with self._lock:
            loads = self.router.engine_loads(self._are_ready())
            assert self._roles is not None
            decoder = self._roles.decode_engine(loads, engine) if life.most_left > 1 else engine
        self._forget_pages(life)
        life.lease = f"{self._scheme}:{secrets.token_hex(32)}" if decoder != engine else ""
        life.offerer, life.decoder = engine, None
        self._admit(life, engine, lease=life.lease)

    def _admit(self, life: _Life, engine: int, *, lease: str = "", source: Source | None = None) -> None:
        """Give a request to an engine. The life's lock is held."""
        life.number += 1
        request = life.request
        if life.is_accepted:
            request = msgspec.structs.replace(request, begun=life.begun, source=source)
        if lease:
            request = msgspec.structs.replace(request, lease=lease)
        for choice in life.choices:
            choice.is_here = not choice.has_ended
        client = self._clients[engine]
        life.is_placed = True
        try:
            client.admit(request, life.prepared, partial(self._take, life, life.number))
        except BaseException:
            life.is_placed = False
            raise
        life.is_accepted = True
        assert life.route.engine == engine, "the router's books have it elsewhere"
        if life.is_paused:
            client.pause(request.request_id)

    def _take(self, life: _Life, number: int, output: EngineOutput) -> None:
        """An engine's output. Called on its supervisor's thread."""
        with life.lock:
            if number != life.number:
                return
            if not (output.new_token_ids or output.is_last):
                self._expect(life)
                return
            if output.offered is not None and output.offered.lease != life.request.lease:
                output = msgspec.structs.replace(output, offered=None)  # to an engine of this fleet, not to its client
            choice = life.choices[output.index]
            choice.token_ids += output.new_token_ids
            if output.mirostat_mu is not None:
                choice.mirostat_mu = output.mirostat_mu
            if output.new_token_ids and life.first_token_s is None:
                life.first_token_s = time.monotonic()
            if output.is_handed_over:
                choice.is_here = False
                life.first_times = life.first_times or output.times
                output = msgspec.structs.replace(output, is_handed_over=False, times=None, mirostat_mu=None)
            elif output.engine_died and not self._is_closing:
                choice.is_here = False
                self._note_death(life, output)
                return
            if output.new_token_ids or output.finish_reason is not None:
                self._deliver(life, output)
            self._go_on(life)

    def _note_death(self, life: _Life, output: EngineOutput) -> None:
        """An engine has died that had a request."""
        if any(choice.is_here and not choice.has_ended for choice in life.choices):
            return  # the others' outputs come next
        life.num_deaths += 1
        with self._lock:
            self.router.num_recomputed += 1
            self.router.take_back(life.route)
        if life.num_deaths > MOST_DEATHS:
            self._fail(life, output.error or "the engine has died")
            return
        logger.info("request %s is begun again: its engine has died", life.request.request_id)
        life.is_placed = False
        self._find_place(life)

    def _go_on(self, life: _Life) -> None:
        """Have the next engine continue a request, once its own has no choice of it any more."""
        if not life.open_choices or any(life.choices[index].is_here for index in life.open_choices):
            return
        life.is_placed = False
        before, told = life.route.engine, life.decoder
        with self._lock:
            is_ready = self._are_ready()
            engine = before if told is None else told
            if told is None or not is_ready[told]:
                engine = self.router.hand_over(life.route, is_ready)
            else:
                self.router.go_on(life.route, engine)
            self.router.take_back(life.route)
        if told is not None and told != engine:
            self._clients[told].drop_pages(life.lease)
        life.decoder = engine
        try:
            self._admit(life, engine, source=self._source(life) if engine != before else None)
        except EngineDeadError:
            self._find_place(life)

    def _find_place(self, life: _Life) -> None:
        """Have any engine compute what is missing of a request; it waits if none can."""
        with self._lock:
            is_ready = self._are_ready()
            if any(is_ready):
                assert self._roles is not None
                num_tokens = life.prepared.num_prompt_tokens + len(life.choices[0].token_ids)
                num_new = np.full(len(is_ready), num_tokens, np.int64)
                costs = self._roles.prompt_costs(self.router.engine_loads(is_ready), num_new)
                engine = int(np.argmin(np.where(is_ready, costs, np.inf)))
                self.router.move(life.route, engine)
        if any(is_ready):
            try:
                return self._place(life, engine)
            except EngineDeadError:
                pass
        if self._is_closing or all(client.ready_in_s is None for client in self._clients):
            self._fail(life, "all engines have died")
            return None
        with self._ended:
            self._homeless.append(life)
            if self._retrier is None:
                self._retrier = threading.Thread(target=self._retry, name="xserv-homeless", daemon=True)
                self._retrier.start()
        return None

    def _retry(self) -> None:
        """Place requests that no engine could take, until there are none."""
        while True:
            time.sleep(RETRY_S)
            with self._ended:
                homeless, self._homeless = self._homeless, []
                if not homeless:
                    self._retrier = None
                    return
            for life in homeless:
                with life.lock:
                    if life.open_choices and not life.is_placed:
                        self._find_place(life)

    def _expect(self, life: _Life) -> None:
        """A request is begun: have the next engine take its pages as they come, and reserve blocks for it."""
        with self._lock:
            assert self._roles is not None
            is_ready = self._are_ready()
            engine = self._roles.decode_engine(self.router.engine_loads(is_ready), life.route.engine)
            source = self._source(life)
            if source is None or not is_ready[engine] or engine == life.route.engine:
                return
            self.router.promise(life.route, engine)
        life.decoder = engine
        request = None
        if not (life.request.images or life.choices[0].has_ended):  # pages of pictures are found once these are encoded
            begun = [Begun([*each.token_ids, 0]) for each in life.choices]
            prompt_ids = life.prepared.prompt_ids.tolist()
            request = msgspec.structs.replace(life.request, prompt_token_ids=prompt_ids, begun=begun, source=source)
        self._clients[engine].expect(source, request)

    def _source(self, life: _Life) -> Source | None:
        """The offer of a request's pages."""
        addresses = self._clients[life.offerer].info.transfer_addresses
        address = next((each for each in addresses if each.startswith(self._scheme)), None)
        return Source(address, life.lease) if address is not None and life.lease else None

    # Outputs

    def _deliver(self, life: _Life, output: EngineOutput) -> None:
        """Give an output to the client, in the fleet's books first."""
        if output.finish_reason is not None:
            life.choices[output.index].has_ended = True
            life.choices[output.index].is_here = False
            if output.times is not None and life.number > 1:
                output = msgspec.structs.replace(output, times=self._times(life, output.times))
        with self._lock:
            self._note(life.route, output)
        if not call_sink(life.sink, output):
            life.sink = ignore
            self.cancel(output.request_id)
        if not life.open_choices:
            self._end(life)

    def _times(self, life: _Life, times: RequestTimes) -> RequestTimes:
        """An answer's times, where its last engine does not know the first."""
        first = life.first_times or times
        first_token_s = first.first_token_s or times.first_token_s or life.first_token_s
        return msgspec.structs.replace(times, first_scheduled_s=first.first_scheduled_s, first_token_s=first_token_s)

    def _fail(self, life: _Life, error: str) -> None:
        for index in life.open_choices:
            output = EngineOutput(
                request_id=life.request.request_id,
                index=index,
                new_token_ids=[],
                num_prompt_tokens=life.prepared.num_prompt_tokens,
                finish_reason="abort" if self._is_closing else "error",
                error=None if self._is_closing else error,
                engine_died=not self._is_closing,
            )
            self._deliver(life, output)

    def _end(self, life: _Life) -> None:
        self._forget_pages(life)
        with self._lock:
            self._lives.pop(life.request.request_id, None)
        with self._ended:
            self._ended.notify_all()

    def _forget_pages(self, life: _Life) -> None:
        """No engine has to keep the pages of the last lease."""
        if life.lease:
            for engine in {life.offerer, life.offerer if life.decoder is None else life.decoder}:
                self._clients[engine].drop_pages(life.lease)
            life.lease = ""

    # What a client wants

    def cancel(self, request_id: str, index: int | None = None) -> None:
        life = self._life(request_id)
        if life is None:
            return
        with life.lock:
            if life.is_placed:
                self._clients[life.route.engine].cancel(request_id, index)
            left = [each for each in life.open_choices if index in (None, each)]
            for each in left:
                if not life.is_placed or not life.choices[each].is_here:
                    self._deliver(
                        life,
                        EngineOutput(
                            request_id=request_id,
                            index=each,
                            new_token_ids=[],
                            num_prompt_tokens=life.prepared.num_prompt_tokens,
                            finish_reason="abort",
                        ),
                    )

    def pause(self, request_id: str) -> None:
        self._set_paused(request_id, is_paused=True)

    def resume(self, request_id: str) -> None:
        self._set_paused(request_id, is_paused=False)

    def _set_paused(self, request_id: str, *, is_paused: bool) -> None:
        life = self._life(request_id)
        if life is None:
            return
        with life.lock:
            life.is_paused = is_paused
            if life.is_placed:
                client = self._clients[life.route.engine]
                (client.pause if is_paused else client.resume)(request_id)

    def _life(self, request_id: str) -> _Life | None:
        if not self._origin.is_here:
            return None
        with self._lock:
            return self._lives.get(request_id)

    @property
    def state(self) -> EngineState:
        return "closing" if self._refuses else super().state

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        if self._refuses:
            raise EngineDeadError("the engines end their requests")
        super().submit(request, sink)

    def unload(self, drain_timeout_s: float) -> None:
        self._refuses = True
        try:
            self._wait_for_all(drain_timeout_s)
            super().unload(drain_timeout_s)
        finally:
            self._refuses = False

    def close(self, drain: bool = False) -> None:
        if not self._origin.is_here:
            return
        if drain:
            self._refuses = True
            self._wait_for_all(None)
        with self._ended:
            self._is_closing = True
            self._ended.notify_all()
        super().close(drain)
        with self._lock:
            lives = list(self._lives.values())
        for life in lives:
            with life.lock:
                self._fail(life, "the engines are closed")

    def _wait_for_all(self, timeout_s: float | None) -> None:
        """Until no request is open: engines that drain at once could not hand theirs over."""
        with self._ended:
            self._ended.wait_for(lambda: not self._lives or self._is_closing, timeout_s)
