"""Engines with roles answer as one engine does, to the bit, whatever happens to them; and nothing stays behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, StepView
from runtime.engine.process.child import Supervision
from runtime.engine.process.spawning import python_module
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.transfer.identity import MismatchError
from runtime.llm import LLM
from runtime.parallel.handing_fleet import HandingFleet
from runtime.parallel.roles import AutoRoles, EngineLoad, OpenAnswers, Roles
from server.vllm_api.operating import _listed
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_stored_prefixes import write_full
from tests.runtime.engine.transfer.handing import joined_engine, run, said
from tests.waiting import TIMEOUT_S, wait_until

NUM_TEMPLATES = 60
Known = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def known(model: Path) -> Known:
    return known_of(model)


def known_of(model: Path, **split: int) -> Known:
    """The answers of one engine that runs each request alone."""
    settings = {**SETTINGS, "num_blocks": 200, "max_num_seqs": 1, "enable_prefix_caching": False, **split}
    alone = build_engine(model, **settings)
    templates = make_requests(1, NUM_TEMPLATES)
    found = said(run(alone, templates), templates)
    alone.close()
    return found


SPLITS = [(2, 1), (1, 2), (2, 2)]
ROLES: dict[str, dict[str, Any]] = {
    "2 + 2": {"prefill_engines": 2, "decode_engines": 2},
    "auto": {"engine_roles": "auto", "data_parallel_size": 2},
}


class OftenChanging(AutoRoles):
    """Engines that change their roles, and the sizes of steps, with every eighth request."""

    def ended(self, num_prompt: int, num_computed: int, num_output: int, others: OpenAnswers) -> None:
        self.means.observe(num_prompt, num_computed, num_output, others.num)
        if self.means.count % 8 == 0:
            self.is_due = True
            self._plan()

    def _plan(self, lock: object = None) -> None:
        number = self.means.count // 8 + 1
        self.num_prefill, self._most_decodes, self._speeds = number % 2, 1, [1000.0, 500.0]
        self.limit_s, self.budgets = (0.0, 0.05, 1e-5)[number % 3], [(16, 9)[number % 2], 16]
        self.most_saved_s = (0.0, 0.01)[number % 2]

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        """The other one, every second time."""
        other = 1 - engine
        return other if self.num_prefill and loads[other].is_ready else engine


class ChangingFleet(HandingFleet):
    def roles_of(self, config: EngineConfig, info: EngineInfo) -> Roles | None:
        if config.engine_roles == "fixed":
            return super().roles_of(config, info)
        return OftenChanging(config.data_parallel_size, None, 1.0, 0.1, rows=info.max_num_seqs)


SLOW_RELAYS = python_module("tests.runtime.parallel.slow_relays")


@pytest.fixture(scope="module", params=ROLES)
def fleet(model: Path, request: pytest.FixtureRequest) -> Iterator[HandingFleet]:
    supervision = Supervision(
        first_delay_s=0.05, most_delay_s=0.2, healthy_s=0.0, hang_timeout_s=30.0, command=SLOW_RELAYS
    )
    settings = {**SETTINGS, "num_blocks": 60, "max_num_batched_tokens": 16, "max_waiting": 500}
    made = ChangingFleet(model, supervision=supervision, **ROLES[request.param], **settings)
    yield made
    made.close()


class Client:
    """A request's client; some cancel, or pause for a while."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.outputs: list[EngineOutput] = []
        self.num_open = request.params.n
        self.is_cancelled = False
        self.done = threading.Event()

    def __call__(self, output: EngineOutput) -> None:
        assert self.num_open > 0, "an output after the last"
        assert not output.is_handed_over
        assert output.offered is None, "an offer to another engine of the fleet"
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.num_open -= 1
            if self.num_open == 0:
                self.done.set()

    def check(self, known: Known) -> None:
        """Each choice has the tokens and bits that are known, all of them unless it was cancelled."""
        name = self.request.request_id.split("/")[0]
        for index in range(self.request.params.n):
            (_, (ours, reasons)), *_ = [
                each for each in said({self.request.request_id: self.outputs}, [self.request]).items()
                if each[0][1] == index
            ]  # fmt: skip
            theirs, ended = known[name, index]
            if self.is_cancelled and reasons == ["abort"]:
                assert ours == theirs[: len(ours)]
            else:
                errors = [each.error for each in self.outputs if each.error]
                assert (ours, reasons) == (theirs, ended), (self.request.request_id, index, errors)
            last = [each for each in self.outputs if each.index == index][-1]
            if last.finish_reason in ("stop", "length") and last.times is not None:
                assert last.times.first_token_s is not None
                assert last.times.last_token_s is not None


def disturb(fleet: HandingFleet, rng: random.Random, *, restarts: bool) -> None:
    """Something happens to an engine, or to pages under way."""
    what = rng.random()
    client = rng.choice(fleet.engines)
    if 0.45 <= what < 0.65 and rng.random() < 0.5:  # the one that has most to do: an idle one loses nothing
        loads = fleet.router.loads()
        client = fleet.engines[loads.index(max(loads))]
    pid = client.pid
    if what < 0.45:
        with fleet._lock:
            lives = [each for each in fleet._lives.values() if each.lease]
        for life in lives:
            for each in fleet.engines:
                each.drop_pages(life.lease)
    elif pid is None or client.state != "ready":
        return
    elif what < 0.85:
        with suppress(psutil.NoSuchProcess):
            engine = psutil.Process(pid)
            process = rng.choice([engine, *engine.children()])  # its ranks
            if what < 0.65:
                process.kill()
            else:
                process.suspend()
                time.sleep(rng.choice([0.05, 0.3]))
                process.resume()
    elif restarts or what > 0.95:
        threading.Thread(target=renew, args=(client,), daemon=True).start()


class Relayed:
    """Requests of which an engine for prompts has computed a second token."""

    def __init__(self, fleet: HandingFleet) -> None:
        self.requests: set[str] = set()
        self.stop = fleet.watch(self._see)

    def _see(self, view: StepView) -> None:
        if view.engine < 2:
            self.requests.update(each.request_id for each in view.chunks if each.start >= each.num_prompt_tokens)


def renew(client: Any) -> None:
    with suppress(EngineDeadError):
        client.renew(TIMEOUT_S)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 200), *(pytest.param(seed, 1_000, marks=pytest.mark.exhaustive) for seed in range(1, 11))]
)
def test_nothing_is_lost_and_no_bit_differs(fleet: HandingFleet, known: Known, seed: int, count: int) -> None:
    """With `exhaustive` 10,000 requests over the same four engines, and 10,000 over two that take either role."""
    is_auto = isinstance(fleet.router.roles, AutoRoles)
    before = fleet.routing
    rng, relayed = random.Random(seed), Relayed(fleet)
    serve(fleet, known, rng, count - count // 4, restarts=seed > 0)
    serve(fleet, known, rng, count // 4, restarts=seed > 0, most_open=2)  # an engine has nothing else to do
    relayed.stop()
    assert is_auto or len(relayed.requests) > count // 20
    for more in range(1, 6):  # what is computed again depends on when an engine died
        if fleet.routing.num_recomputed == before.num_recomputed:
            serve(fleet, known, random.Random(100 * more), 100)
    # Often no engine of a kind is there; of two engines for so long that there may be no hand-over at all.
    assert is_auto or fleet.routing.num_handed_over - before.num_handed_over > count // 10
    assert fleet.routing.num_recomputed > before.num_recomputed


@pytest.mark.parametrize(
    ("ranks", "stages", "count"),
    [(2, 1, 0), *(pytest.param(*each, 500, marks=pytest.mark.exhaustive) for each in SPLITS)],
)
def test_engines_of_several_ranks(model: Path, ranks: int, stages: int, count: int) -> None:
    """The answers are those of one engine of as many ranks, also if one of the ranks is killed."""
    split = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    known = known_of(model, **split)
    supervision = Supervision(first_delay_s=0.05, most_delay_s=0.2, healthy_s=0.0, hang_timeout_s=30.0)
    settings = {**SETTINGS, "num_blocks": 60, "max_num_batched_tokens": 16, "max_waiting": 500, **split}
    fleet = HandingFleet(model, supervision=supervision, prefill_engines=1, decode_engines=1, **settings)
    try:
        serve(fleet, known, random.Random(1), 20, disturbs=False)
        found = [each.stats() for each in fleet.engines]
        assert found[0].num_lost_transfers == found[1].num_lost_transfers == 0
        assert found[1].num_arrived > 10
        assert found[1].prefix_cache_restored > 0
        for engine in fleet.engines:
            clients = [Client(each) for each in make_requests(1, NUM_TEMPLATES)[:12]]
            for client in clients:
                fleet.submit(client.request, client)
            assert engine.pid is not None
            others = psutil.Process(engine.pid).children()
            assert len(others) == ranks * stages - 1
            with fleet._lock:
                lives = list(fleet._lives.values())
            for life in lives[::2]:
                for each in fleet.engines:
                    each.drop_pages(life.lease)
            others[-1].kill()
            for client in clients:
                assert client.done.wait(TIMEOUT_S)
                client.check(known)
            wait_until(lambda: all(each.state == "ready" for each in fleet.engines))
        assert fleet.routing.num_recomputed > 0
        serve(fleet, known, random.Random(2), count, restarts=True)
    finally:
        fleet.close()


def test_engines_of_other_ranks_refuse_pages(model: Path) -> None:
    with (
        joined_engine(model, **SETTINGS, num_blocks=60, tensor_parallel_size=2) as first,
        joined_engine(model, **SETTINGS, num_blocks=60) as second,
    ):
        ours, theirs = first.info.identity, second.info.identity
        assert ours is not None
        assert theirs is not None
        with pytest.raises(MismatchError, match="tensor_parallel_size is 2 here and 1 there"):
            ours.check(theirs)


def serve(
    fleet: HandingFleet,
    known: Known,
    rng: random.Random,
    count: int,
    *,
    restarts: bool = False,
    disturbs: bool = True,
    most_open: int = 24,
) -> None:
    """Many requests while things happen; then nothing of them is left."""
    templates = make_requests(1, NUM_TEMPLATES)
    clients: list[Client] = []
    for number in range(count):
        template = rng.choice(templates)
        client = Client(msgspec.structs.replace(template, request_id=f"{template.request_id}/{number}"))
        while sum(not each.done.is_set() for each in clients[-200:]) >= most_open:
            time.sleep(0.002)
        while True:
            try:
                fleet.submit(client.request, client)
                break
            except EngineDeadError:  # no engine is ready
                time.sleep(0.05)
        clients.append(client)
        if rng.random() < 0.05:
            client.is_cancelled = True
            threading.Timer(rng.random() / 10, fleet.cancel, [client.request.request_id]).start()
        if rng.random() < 0.05:
            fleet.pause(client.request.request_id)
            threading.Timer(rng.random() / 5, fleet.resume, [client.request.request_id]).start()
        if disturbs and rng.random() < 0.05:
            disturb(fleet, rng, restarts=restarts)
    for client in clients:
        assert client.done.wait(2 * TIMEOUT_S), (client.request.request_id, client.outputs)
        client.check(known)
    wait_until(lambda: not fleet._lives)
    assert not fleet._routes
    wait_until(lambda: all(each.state == "ready" for each in fleet.engines))
    assert fleet.router.loads() == [0] * len(fleet.engines)
    for each in fleet.engines:
        wait_until(lambda each=each: each.stats().num_running == 0)
        wait_until(lambda each=each: each.stats().num_free_blocks == each.stats().num_blocks)
        wait_until(lambda each=each: each.stats().num_open_transfers == 0)


def test_engines_that_change_their_roles_answer_as_one(model: Path, known: Known) -> None:
    made = ChangingFleet(model, **ROLES["auto"], **SETTINGS, num_blocks=200)
    clients = [Client(each) for each in make_requests(1, NUM_TEMPLATES)]
    for first in range(0, NUM_TEMPLATES, 12):
        for client in clients[first : first + 12]:
            made.submit(client.request, client)
        for client in clients[first : first + 12]:
            assert client.done.wait(2 * TIMEOUT_S)
            client.check(known)
    assert made.routing.num_handed_over >= 5
    assert min(made.routing.num_requests) >= 5
    made.close()


def test_a_drain_hands_over_what_is_open(model: Path, known: Known) -> None:
    made = HandingFleet(model, prefill_engines=1, decode_engines=1, **SETTINGS, num_blocks=200)
    clients = [Client(each) for each in make_requests(1, NUM_TEMPLATES)[:20]]
    for client in clients:
        made.submit(client.request, client)
    made.close(drain=True)
    for client in clients:
        assert client.done.is_set()
        client.check(known)
    with pytest.raises(EngineDeadError):
        made.submit(clients[0].request, clients[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_engines": 1}, "prefill_engines is 1, decode_engines 0: both kinds must have an engine"),
        ({"decode_engines": 2}, "decode_engines is 2, prefill_engines 0: both kinds must have an engine"),
        ({"prefill_engines": 40, "decode_engines": 40}, "80, must be at most 64 together"),
        ({"prefill_engines": 1, "decode_engines": 1, "data_parallel_size": 3}, "data_parallel_size is 3, but"),
        ({"prefill_engines": 1, "decode_engines": 1, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"prefill_engines": -1}, "prefill_engines must be"),
        ({"engine_roles": "auto"}, "data_parallel_size is 1: prompts and answers need at least 2 engines"),
        ({"engine_roles": "auto", "prefill_engines": 1, "decode_engines": 1}, "give data_parallel_size 2 instead"),
        ({"engine_roles": "auto", "data_parallel_size": 2, "batching": "orca"}, "needs batching 'stall-free', not"),
        (
            {"engine_roles": "auto", "data_parallel_size": 2, "enable_prefix_caching": False},
            "engine_roles needs enable",
        ),
        ({"engine_roles": "some"}, "engine_roles must be"),
    ],
)
def test_bad_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(**settings)


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, stop=["q"], ignore_eos=True),
    SamplingParams(n=2, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True),  # without a seed of its own
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")),
    SamplingParams(seed=3, max_tokens=12, min_tokens=3, repetition_penalty=1.2, dry_multiplier=0.5),
    SamplingParams(seed=4, max_tokens=12, mirostat=2, mirostat_tau=3.0, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=1, logprobs=0),
]


def test_texts_grammars_and_mirostat_are_those_of_one() -> None:
    prompts = [f"Question {i}: what is {i} plus {i + 2}?" for i in range(18)]
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "max_model_len": 512, "seed": 1}

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, [PARAMS[i % len(PARAMS)] for i in range(len(prompts))])
        return [
            (each.prompt_logprobs, [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in each.outputs])
            for each in outputs
        ]

    with LLM(prefill_engines=1, decode_engines=1, **settings) as two, LLM(**settings) as one:
        fleet = two.client
        assert isinstance(fleet, HandingFleet)
        assert answers(two) == answers(one)
        assert fleet.routing.num_handed_over >= 12
        listed = [(each.num_routed, each.num_continued) for each in _listed(fleet).engines]
        assert listed == [(18, 0), (0, fleet.routing.num_handed_over)]
        assert fleet.stats().num_arrived > 0
