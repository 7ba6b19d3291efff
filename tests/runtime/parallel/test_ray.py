"""Engines on a real Ray cluster of two nodes on this machine: placed, killed, started again; and servers as a Ray Serve
application, asked through the SDK, from one replica to two."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from openai import OpenAI

from runtime.engine.config import EngineConfig
from runtime.engine.make_client import start_client
from runtime.engine.messages import EngineRequest
from runtime.engine.process.child import Supervision
from runtime.engine.process.client import EngineClient
from runtime.engine.process.wire import Start
from runtime.engine.sampling_params import SamplingParams
from runtime.parallel.fleet import Fleet
from runtime.parallel.handing_fleet import HandingFleet
from runtime.parallel.ray_engines import RayEngines, RayError, _with_ranks
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.process.test_handshake import silence
from tests.runtime.engine.process.test_process_faults import LIGHT, Sink, is_gone, request
from tests.waiting import TIMEOUT_S, wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

WAIT_S = 120.0
"""For what Ray does in its own time."""
PIDFD_GETFD = 438
"""A system call of Linux."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    cluster.add_node(**arguments)
    ray.init(address=cluster.address, log_to_driver=False, namespace="serve")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def light_fleet(cluster: Any, **settings: Any) -> Fleet:
    config = EngineConfig(device="cpu", distributed_executor_backend="ray", max_waiting=100, **settings)
    places = RayEngines(config, cluster.address, LIGHT)
    return Fleet(
        places=places, supervision=Supervision(first_delay_s=0.05, healthy_s=0.0), device="cpu", max_waiting=100,
        distributed_executor_backend="ray", routing_policy="round-robin", **settings,
    )  # fmt: skip


def test_engines_are_placed_and_started_again_when_their_actor_is_killed(cluster: Any) -> None:
    fleet = light_fleet(cluster, data_parallel_size=2)
    try:
        group = fleet._places._group
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        assert len(set(nodes.values())) == 2, "a processor on each node"
        before = [client.pid for client in fleet.engines]
        sinks = [Sink() for _ in range(4)]
        for i, sink in enumerate(sinks):
            fleet.submit(request(f"r{i}", [i], max_tokens=20 if i % 2 else 40_000), sink)
        assert all(sink.started.wait(TIMEOUT_S) for sink in sinks)
        ray.kill(fleet.engines[0]._supervisor.process._actors[0])
        assert [sink.reasons() for sink in sinks] == [["error"], ["length"], ["error"], ["length"]]
        assert sinks[0].outputs[-1].engine_died
        wait_until(lambda: is_gone(before[0] or 0))
        late = Sink()
        fleet.submit(request("late", [7], max_tokens=2), late)
        assert late.token_ids() == [8, 9]
        wait_until(lambda: fleet.engines[0].state == "ready")
        assert fleet.engines[0].pid != before[0]
        times = late.outputs[-1].times
        assert times is not None
        assert times.last_token_s is not None
        assert 0.0 < time.monotonic() - times.last_token_s < 60.0, "told in this machine's time"
    finally:
        pids = [client.pid for client in fleet.engines]
        fleet.close()
    wait_until(lambda: all(pid is None or is_gone(pid) for pid in pids))
    wait_until(lambda: ray.util.placement_group_table(group)["state"] == "REMOVED")


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_of_one_engine_on_two_nodes(cluster: Any, split: dict[str, int], tmp_path: Path) -> None:
    """An actor a rank, each on a node of its own: the tokens are those of transformers; a rank that is killed, a
    connection that is lost, and a node that says nothing any more, end all ranks, and the engine is started again."""
    golden = load_golden("qwen2_tied")
    model = str(write_model(tmp_path, golden))
    settings: Any = {
        "device": "emulated:sm_90a", "dtype": "float32", "max_model_len": 64, "num_blocks": 16, "seed": 0,
        "distributed_executor_backend": "ray", **split,
    }  # fmt: skip
    places = RayEngines(EngineConfig(**settings), cluster.address)
    fleet = Fleet(model, places=places, supervision=Supervision(first_delay_s=0.05, healthy_s=0.0), **settings)

    def ask(name: str, max_tokens: int) -> Sink:
        sink, ids = Sink(), list(golden.prompt_ids)
        fleet.submit(request(name, ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True), sink)
        return sink

    try:
        nodes = ray.util.placement_group_table(places._group)["bundles_to_node_id"]
        assert len(nodes) == len(set(nodes.values())) == 2, "a rank on each node"
        expected = golden.greedy_ids["float32"][:6]
        assert ask("first", 6).token_ids() == expected
        for number, end in enumerate((_kill_second_rank, _break_ranks_connection, _silence_rank)):
            [client] = fleet.engines
            before = client.pid
            ranks = rank_processes()
            assert len(ranks) == 1
            sink = ask(f"long {number}", 40)
            assert sink.started.wait(TIMEOUT_S)
            begun = time.monotonic()
            end(client)
            assert sink.reasons() == ["error"]
            assert time.monotonic() - begun < 5.0
            wait_until(lambda: client.state == "ready" and client.pid != before)  # noqa: B023
            assert ask(f"after {number}", 6).token_ids() == expected
            assert is_gone(before or 0)
            assert all(is_gone(pid) for pid in ranks)
    finally:
        fleet.close()
    wait_until(lambda: not rank_processes())


def _kill_second_rank(client: Any) -> None:
    ray.kill(client._supervisor.process._actors[1])


def _break_ranks_connection(client: Any) -> None:
    """What is left of it when a network between two nodes goes: neither side is told by the other's end."""
    _, connection = _ranks_connection()
    subprocess.run(
        ["ss", "-K", "dst", connection.raddr.ip, "dport", "=", str(connection.raddr.port)], check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _silence_rank(client: Any) -> None:
    """Its process goes on, and nothing reaches it."""
    rank, connection = _ranks_connection()
    process = os.pidfd_open(rank)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, connection.fd, 0)
    os.close(process)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=descriptor) as its:
        silence(its)


def _ranks_connection() -> tuple[int, Any]:
    """The only rank's process id, and its connection to the engine."""
    [rank] = rank_processes()
    [connection] = [each for each in psutil.Process(rank).net_connections() if each.status == "ESTABLISHED"]
    return rank, connection


def rank_processes() -> list[int]:
    """Of actors of this machine."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "ppid"])
        if any("runtime.engine.ranks.main" in each for each in process.info["cmdline"] or ())
        and not is_gone(process.pid)
        and any("EngineActor" in each for each in psutil.Process(process.info["ppid"]).cmdline())
    ]


def test_each_rank_is_shown_the_gpus_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two nodes: NCCL wants all of a node's to be seen by each."""
    import ray

    made = [FakeActor(host, gpus) for host, gpus in (("10.0.0.1", ["2"]), ("10.0.0.2", ["0"]), ("10.0.0.1", ["5"]))]
    monkeypatch.setattr(ray, "get", lambda result, timeout=None: result)
    start = Start(model=None, config=EngineConfig(device="auto"), log_level=0, hang_timeout_s=1.0)
    found = _with_ranks(start, made, True)
    assert [actor.shown for actor in made] == [["2", "5"], ["0"], ["2", "5"]]
    assert found.config.device == "cuda:0"
    assert [(rank.host, rank.port, rank.device) for rank in found.remote_ranks] == [
        ("10.0.0.2", 1234, "cuda:0"), ("10.0.0.1", 1234, "cuda:1")
    ]  # fmt: skip
    assert [rank.secret for rank in found.remote_ranks] == [actor.secret for actor in made[1:]]
    assert len({rank.secret for rank in found.remote_ranks}) == 2
    assert [actor.is_started for actor in made] == [False, True, True]


class FakeActor:
    """Whose methods run at once, in this process."""

    def __init__(self, host: str, gpus: list[str]) -> None:
        self.shown, self.secret, self.is_started = list[str](), b"", False
        self._where = host, gpus

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"now_{name}"))

    def now_place(self) -> tuple[str, list[str]]:
        return self._where

    def now_show_gpus(self, numbers: list[str]) -> None:
        self.shown = numbers

    def now_listen(self, host: str, secret: bytes) -> int:
        assert host == self._where[0]
        self.secret = secret
        return 1234

    def now_start_rank(self, command: list[str], timeout_s: float) -> None:
        self.is_started = True


@pytest.mark.exhaustive
def test_what_has_no_room_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.parallel.ray_engines.PLACEMENT_TIMEOUT_S", 0.5)
    with pytest.raises(RayError, match=r"no room for 1 engines of .*'CPU': 2.* on one node"):
        light_fleet(cluster, data_parallel_size=1, tensor_parallel_size=2)


@pytest.mark.exhaustive
def test_ray_serve_from_one_replica_to_two(cluster: Any) -> None:
    from ray import serve

    from server.config import ServerConfig
    from server.ray_serve import APPLICATION, Deployment, deploy, remove

    def deployed(count: int) -> Deployment:
        options = {"device": "cpu", "num_blocks": 128, "max_model_len": 256}
        return Deployment(
            model=None, engine_options=options, config=ServerConfig(), min_replicas=count, max_replicas=count
        )

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        deploy(deployed(1), address=cluster.address, host="127.0.0.1", port=port)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=WAIT_S, max_retries=5)
        messages: Any = [{"role": "user", "content": "What is 17 plus 25?"}]
        answer = client.chat.completions.create(model="xserv-demo", messages=messages, temperature=0.0, max_tokens=16)
        assert "42" in (answer.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model="xserv-demo", messages=messages, temperature=0.0, max_tokens=16, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "42" in "".join(pieces)
        assert len(pieces) > 1

        deploy(deployed(2), address=cluster.address, host="127.0.0.1", port=port)
        states = serve.status().applications[APPLICATION].deployments["replica"].replica_states
        assert states == {"RUNNING": 2}
        for _ in range(8):
            answer = client.chat.completions.create(
                model="xserv-demo", messages=messages, temperature=0.0, max_tokens=16
            )
            assert "42" in (answer.choices[0].message.content or "")
    finally:
        before = engines_here()
        remove(cluster.address)
        serve.shutdown()
    wait_until(lambda: not set(before) & set(engines_here()))


def engines_here() -> list[int]:
    """Engines' processes of Ray's, on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("runtime.engine.process.main" in each for each in process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                if any("ray::" in word for parent in process.parents() for word in parent.cmdline()):
                    found.append(process.pid)
    return found


SPLITS: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_engines_with_roles_hand_over_by_tcp(cluster: Any, split: dict[str, Any]) -> None:
    """Each on a node of its own, with its ranks; the answers are those of one engine of as many ranks, also if an
    actor, and then a rank, is killed."""
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "max_model_len": 256, **split}
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=80 << 20) for _ in range(2 if split else 0)]
    try:
        hands_over_as_one(cluster, [*range(60)], settings)
    finally:
        for node in nodes:
            cluster.remove_node(node)


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_ranks_on_nodes_of_their_own_hand_over(cluster: Any) -> None:
    """As those of GPUs: an actor a rank, on four nodes."""
    settings: dict[str, Any] = {
        "device": "emulated:sm_90a", "max_model_len": 64, "num_blocks": 32, "exact": True, "tensor_parallel_size": 2,
    }  # fmt: skip
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    try:
        hands_over_as_one(cluster, [*range(20)], settings)
    finally:
        for node in nodes:
            cluster.remove_node(node)


def hands_over_as_one(cluster: Any, prompt_ids: list[int], settings: dict[str, Any]) -> None:
    """Engines with roles answer as one without, before and after kills."""
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, seed=i) for i in range(4)]
    asked = [EngineRequest(request_id=f"r{i}", prompt_token_ids=prompt_ids, params=params[i]) for i in range(4)]
    roles: dict[str, Any] = {"prefill_engines": 1, "decode_engines": 1, "distributed_executor_backend": "ray"}
    places = RayEngines(EngineConfig(**roles, **settings), cluster.address)
    supervision = Supervision(first_delay_s=0.05, healthy_s=0.0)
    fleet = HandingFleet(places=places, supervision=supervision, **roles, **settings)

    def begin(client: EngineClient) -> list[Sink]:
        sinks = [Sink() for _ in asked]
        for each, sink in zip(asked, sinks):
            client.submit(each, sink)
        return sinks

    def said(sinks: list[Sink]) -> list[Any]:
        return [
            (sink.token_ids(), [pair for output in sink.wait() for pair in output.logprobs or ()]) for sink in sinks
        ]

    with closing(fleet):
        with closing(start_client(**settings)) as one:
            known = said(begin(one))
        assert said(begin(fleet)) == known
        assert fleet.routing.num_handed_over == 4
        wait_until(lambda: fleet.stats().num_arrived + fleet.stats().num_lost_transfers == 4)
        assert fleet.stats().num_arrived > 0
        node = ray.util.get_node_ip_address()
        assert [each for each in fleet.info.transfer_addresses if each.startswith(f"tcp:{node}:")]
        for engine in (1, 0):
            client = fleet.engines[engine]
            before = client.pid
            sinks = begin(fleet)
            assert all(sink.started.wait(TIMEOUT_S) for sink in sinks)
            process: Any = client._supervisor.process
            if engine == 1:
                ray.kill(process._actors[0])
            else:  # a rank, or the engine if it is alone
                ranks = rank_processes() if len(process._actors) > 1 else _ranks_of(before)
                psutil.Process(ranks[0] if ranks else before).kill()
            assert said(sinks) == known
            wait_until(lambda: all(each.state == "ready" for each in fleet.engines))
        wait_until(lambda: fleet.stats().num_open_transfers == 0)
        for client in fleet.engines:
            wait_until(lambda client=client: client.stats().num_free_blocks == client.stats().num_blocks)


def _ranks_of(engine: int | None) -> list[int]:
    return [each.pid for each in psutil.Process(engine).children()]
