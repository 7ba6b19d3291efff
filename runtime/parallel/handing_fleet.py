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
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

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
from runtime.engine.weights.commands import (
    Command,
    DropWeights,
    EngineCondition,
    GivenArrays,
    LoadWeights,
    Sleep,
    UseWeights,
    WakeUp,
    check_command,
)
from runtime.errors import XservError
from runtime.parallel.fleet import Fleet, join_conditions
from runtime.parallel.fleet_pauses import FleetPauses
from runtime.parallel.lives import Choice, Life
from runtime.parallel.pacing import Pacer
from runtime.parallel.roles import AutoRoles, Roles, StaticRoles
from runtime.parallel.routing import Route

logger = logging.getLogger("xserv.engine")

MOST_DEATHS = 8
"""A request whose engines have died so often may be what kills them: it ends with the next one."""

RETRY_S = 0.05
"""How often a request that no engine can take is tried again."""

CHANGED = "the weights have changed"


class HandingFleet(Fleet):
    """See ``Fleet``, whose arguments it takes. A request ends with ``engine_died`` only if its engines have died again
    and again, or none will come back."""

    def __init__(self, model: str | Path | None = None, **arguments: Any) -> None:
        self._lives: dict[str, Life] = {}  # guarded by the lock
        self._homeless: list[Life] = []
        self._ended = threading.Condition()
        self._pauses = FleetPauses(self, self._ended)
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
        life = Life(request, prepared, sink, route, [Choice() for _ in range(request.params.n)])
        with self._lock:
            self._lives[request.request_id] = life
        try:
            with life.lock:
                if not self._pauses.takes(life):
                    self._place(life, route.engine)
        except BaseException:
            with self._lock:
                del self._lives[request.request_id]
            raise

    def _place(self, life: Life, engine: int) -> None:
        """Give a request to an engine that computes what is missing, and then hands it over, if the roles want that.
        The life's lock is held. Raises as ``ProcessEngineClient.admit`` does."""
        with self._lock:
            num_prompt = self.router.num_prompt[engine]
            decoder = self._decoder(engine) if life.most_left > 1 else engine
        self._forget_pages(life)
        life.lease = f"{self._scheme}:{secrets.token_hex(32)}" if decoder != engine else ""
        life.offerer, life.decoder = engine, None
        # If no other prompt is before it, the next engine is told now, not once the first step is planned; where that
        # would slow a prompt's only step, it is told in the relay.
        may_relay = not life.is_paused and num_prompt <= life.route.num_prompt
        is_slowed = self.info.device == "cpu" and num_prompt <= self.info.max_num_batched_tokens
        is_expected = may_relay and not is_slowed
        self._admit(life, engine, lease=life.lease, is_expected=is_expected, may_relay=may_relay)
        if life.lease and is_expected:
            self._expect(life, decoder)

    def _decoder(self, engine: int) -> int:
        """The one that goes on after this one. The lock is held."""
        assert self._roles is not None
        loads = self.router.engine_loads(self._are_alike(self._clients[engine].weight_version))
        return self._roles.decode_engine(loads, engine)

    def _admit(self, life: Life, engine: int, *, lease: str = "", source: Source | None = None, **flags: bool) -> None:
        """Give a request to an engine. The life's lock is held."""
        life.number += 1
        request = life.request
        if life.is_accepted:
            request = msgspec.structs.replace(request, begun=life.begun, source=source)
        if lease:
            request = msgspec.structs.replace(request, lease=lease, **flags)
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

    def _take(self, life: Life, number: int, output: EngineOutput) -> None:
        """An engine's output. Called on its supervisor's thread."""
        with life.lock:
            if number != life.number:
                return
            choice = life.choices[output.index]
            if choice.has_ended:
                return  # its client has cancelled it while it was taken back
            if not (output.new_token_ids or output.is_last):
                self._expect(life)
                return
            if output.new_token_ids and life.has_output and output.weight_version != life.version:
                self._end_mixed(life)
                return
            if output.offered is not None and output.offered.lease != life.request.lease:
                output = msgspec.structs.replace(output, offered=None)  # to an engine of this fleet, not to its client
            if output.new_token_ids:
                life.version = output.weight_version
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
            elif output.finish_reason == "abort" and life.is_recalled:
                choice.is_here = False
                output = msgspec.structs.replace(output, finish_reason=None)
            elif output.finish_reason == "abort" and life.ending is not None:
                output = msgspec.structs.replace(output, error=life.ending)
            if output.new_token_ids or output.finish_reason is not None or output.proposals is not None:
                self._deliver(life, output)
            self._go_on(life)

    def _note_death(self, life: Life, output: EngineOutput) -> None:
        """An engine has died that had a request."""
        if life.is_here:
            return  # the others' outputs come next
        life.num_deaths += 1
        with self._lock:
            self.router.num_recomputed += 1
            self.router.take_back(life.route)
        if life.num_deaths > MOST_DEATHS:
            self._abort(life, output.error or "the engine has died", has_died=True)
            return
        logger.info("request %s is begun again: its engine has died", life.request.request_id)
        life.is_placed = False
        if not self._has_settled(life):
            self._find_place(life)

    def _go_on(self, life: Life) -> None:
        """Have the next engine continue a request, once its own has no choice of it any more."""
        if not life.open_choices or life.is_here:
            return
        life.is_placed = False
        if self._has_settled(life):
            return
        before, told = life.route.engine, life.decoder
        with self._lock:
            is_ready = self._are_alike(life.version)
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

    def _has_settled(self, life: Life) -> bool:
        """Whether a request that no engine has any more was taken back, or ended."""
        if life.ending is not None:
            self._abort(life, life.ending)
            return True
        if life.is_recalled:
            life.is_recalled = False
            self._forget_pages(life)
            with self._lock:
                self.router.take_back(life.route)
            self._find_place(life)
            return True
        return False

    def _find_place(self, life: Life) -> None:
        """Have any engine compute what is missing of a request; it waits if none can, or must."""
        if self._pauses.takes(life):
            return None
        with self._lock:
            is_ready = self._are_alike(life.version if life.has_output else "")
            is_other = not any(is_ready) and any(self._are_ready())
            if any(is_ready):
                assert self._roles is not None
                num_tokens = life.prepared.num_prompt_tokens + len(life.choices[0].token_ids)
                costs = self._roles.prompt_costs(self.router.engine_loads(is_ready), [num_tokens] * len(is_ready))
                engine = min(range(len(costs)), key=costs.__getitem__)
                self.router.move(life.route, engine)
        if is_other:  # those with the weights that have begun it do not come back
            self.begin_again(life, "")
            return self._find_place(life) if life.open_choices else None
        if any(is_ready):
            try:
                return self._place(life, engine)
            except EngineDeadError:
                pass
        if self._is_closing or all(client.ready_in_s is None for client in self._clients):
            self._abort(life, "all engines have died", has_died=True)
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

    def _expect(self, life: Life, engine: int | None = None) -> None:
        """A request is begun, or, if the next engine is given, soon will be: have that one take its pages as they come,
        and reserve blocks."""
        source = self._source(life, is_early=engine is not None)
        if source is None or life.is_recalled or life.ending is not None:
            return
        with self._lock:
            if engine is None:
                engine = self._decoder(life.route.engine)
            if engine == life.route.engine:
                return
            self.router.promise(life.route, engine)
        life.decoder = engine
        request = None
        if not (life.request.images or life.choices[0].has_ended):  # pages of pictures are found once these are encoded
            begun = [Begun([*each.token_ids, 0]) for each in life.choices]
            prompt_ids = life.prepared.prompt_ids.tolist()
            request = msgspec.structs.replace(life.request, prompt_token_ids=prompt_ids, begun=begun, source=source)
        self._clients[engine].expect(source, request)

    def _source(self, life: Life, *, is_early: bool = False) -> Source | None:
        """The offer of a request's pages."""
        addresses = self._clients[life.offerer].info.transfer_addresses
        address = next((each for each in addresses if each.startswith(self._scheme)), None)
        return Source(address, life.lease, is_early=is_early) if address is not None and life.lease else None

    def _are_alike(self, version: str) -> list[bool]:
        """The engines that are ready and have these weights; "": any."""
        return [client.state == "ready" and version in ("", client.weight_version) for client in self._clients]

    # Outputs

    def _deliver(self, life: Life, output: EngineOutput) -> None:
        """Give an output to the client, in the fleet's books first."""
        if output.finish_reason is not None:
            life.choices[output.index].has_ended = True
            life.choices[output.index].is_here = False
            if output.times is not None and life.number > 1:
                output = msgspec.structs.replace(output, times=self._times(life, output.times))
        if life.num_restarts and output.num_restarts != life.num_restarts:
            output = msgspec.structs.replace(output, num_restarts=life.num_restarts)
        with self._lock:
            self._note(life.route, output)
        if not call_sink(life.sink, output):
            life.sink = ignore
            self.cancel(output.request_id)
        if not life.open_choices:
            self._end(life)

    def _times(self, life: Life, times: RequestTimes) -> RequestTimes:
        """An answer's times, where its last engine does not know the first."""
        first = life.first_times or times
        first_token_s = first.first_token_s or times.first_token_s or life.first_token_s
        return msgspec.structs.replace(times, first_scheduled_s=first.first_scheduled_s, first_token_s=first_token_s)

    def _abort(
        self, life: Life, why: str | None = None, choices: list[int] | None = None, *, has_died: bool = False
    ) -> None:
        """End choices that no engine has, by default all; ``has_died``: with "error", since their engines have died,
        unless the fleet closes."""
        if has_died and self._is_closing:
            has_died, why = False, None
        for index in life.open_choices if choices is None else choices:
            output = EngineOutput(
                request_id=life.request.request_id,
                index=index,
                new_token_ids=[],
                num_prompt_tokens=life.prepared.num_prompt_tokens,
                finish_reason="error" if has_died else "abort",
                error=why,
                engine_died=has_died,
                weight_version=life.version,
            )
            self._deliver(life, output)

    def _end_mixed(self, life: Life) -> None:
        """An engine has gone on with other weights than those that began: its tokens are not delivered."""
        life.number += 1
        self._clients[life.route.engine].cancel(life.request.request_id)
        life.is_placed = False
        self._abort(life, CHANGED)

    def _end(self, life: Life) -> None:
        self._forget_pages(life)
        with self._lock:
            self._lives.pop(life.request.request_id, None)
        self._pauses.forget(life)

    def _forget_pages(self, life: Life) -> None:
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
            is_left = not life.is_placed or life.is_recalled
            self._abort(life, choices=[each for each in left if is_left or not life.choices[each].is_here])

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

    def _life(self, request_id: str) -> Life | None:
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
            self._pauses.is_paused = self._pauses.is_asleep = False  # as those that will be started
            for life in self.open_lives():
                with life.lock:
                    self._abort(life, "the model is unloaded", has_died=True)
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
                self._abort(life, "the engines are closed", has_died=True)

    def _wait_for_all(self, timeout_s: float | None) -> None:
        """Until no request is open but those that a pause holds: engines that drain at once could not hand theirs
        over."""
        with self._ended:
            self._ended.wait_for(
                lambda: not self._lives or self._is_closing or (self._pauses.is_stopped and self._pauses.is_empty),
                timeout_s,
            )

    # Pauses and new weights: this is the `Parts` of its `FleetPauses`

    @property
    def _held(self) -> tuple[int, int]:
        return self._pauses.num_held, self._pauses.num_held_tokens

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def open_lives(self) -> list[Life]:
        return list(self._lives.values())

    def recall(self, life: Life) -> None:
        if life.is_placed:
            life.is_recalled = True
            self._clients[life.route.engine].cancel(life.request.request_id)
        else:
            self._pauses.takes(life)

    def end_for_good(self, life: Life, why: str) -> None:
        life.ending = why
        if life.is_placed:
            self._clients[life.route.engine].cancel(life.request.request_id)
        else:
            self._abort(life, why)

    def set_going(self, life: Life) -> None:
        if life.is_accepted or self._clients[life.route.engine].state != "ready":
            return self._find_place(life)
        life.is_accepted = True  # it has waited for its turn here
        try:
            return self._place(life, life.route.engine)
        except EngineDeadError:
            return self._find_place(life)

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.order`` and `FleetPauses`. An engine that dies meanwhile obeys when it is back."""
        if isinstance(command, GivenArrays | LoadWeights | DropWeights):
            return super().order(command)
        check_command(command)
        if isinstance(command, Sleep | WakeUp | UseWeights):
            self._check_all_ready()
        if isinstance(command, UseWeights):
            self._check_read()
        return self._aside(lambda: self._pauses.obey(command))

    def with_ready(self, command: Command) -> EngineCondition:
        """Order this of the engines that are ready. Raises ``EngineDeadError`` if there are none."""
        sent: list[Future[NDArray[np.float32]]] = []
        for client in self._clients:
            with suppress(EngineDeadError):
                sent.append(client.order(command))
        found: list[EngineCondition] = []
        for each in sent:
            with suppress(EngineDeadError):
                found.append(EngineCondition.of(each.result()))
        if not found:
            raise self._dead()
        return join_conditions(found)

    def with_all(self, command: Command) -> EngineCondition:
        """Order this of all engines; one that dies meanwhile is told again when it is back. Raises the first error of
        one that is alive, when all have answered."""
        left, found, errors = dict(enumerate(self._clients)), list[EngineCondition](), list[XservError]()
        while left:
            sent: dict[int, Future[NDArray[np.float32]]] = {}
            for number, client in left.items():
                with suppress(EngineDeadError):
                    sent[number] = client.order(command)
            for number, future in sent.items():
                try:
                    found.append(EngineCondition.of(future.result()))
                except EngineDeadError:
                    continue
                except XservError as error:
                    errors.append(error)
                del left[number]
            if left and (self._is_closing or all(client.ready_in_s is None for client in left.values())):
                errors.append(self._dead())
                break
            if left:
                time.sleep(RETRY_S)
        if errors:
            raise errors[0]
        return join_conditions(found)

    def use_weights(self, version: str) -> EngineCondition:
        """All engines serve what they have read last."""
        return self._use_weights(UseWeights(version, "abort"))

    def begin_again(self, life: Life, version: str) -> None:
        """Have a request forget tokens of other weights; it ends if its client must not get others instead."""
        if not life.has_output:
            return
        if not life.request.restarts:
            self._abort(life, CHANGED)
            return
        for output in life.forget_output(version):
            self._deliver(life, output)
