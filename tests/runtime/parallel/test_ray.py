"""Engines on a real Ray cluster of two nodes on this machine: placed, killed, started again; and servers as a Ray Serve
application, asked through the SDK, from one replica to two."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from openai import OpenAI

from runtime.engine.config import EngineConfig
from runtime.engine.process.supervision import Supervision
from runtime.parallel.fleet import Fleet
from runtime.parallel.ray_engines import RayEngines, RayError
from tests.runtime.engine.process.test_process_faults import LIGHT, Sink, is_gone, request
from tests.waiting import TIMEOUT_S, wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

WAIT_S = 120.0
"""For what Ray does in its own time."""


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
        ray.kill(fleet.engines[0]._process._actor)
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


def test_what_has_no_room_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.parallel.ray_engines.PLACEMENT_TIMEOUT_S", 0.5)
    with pytest.raises(RayError, match=r"no room for 1 engines of .*'CPU': 2.* on one node"):
        light_fleet(cluster, data_parallel_size=1, tensor_parallel_size=2)


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
    """Engines' processes of this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("runtime.engine.process.main" in each for each in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found
