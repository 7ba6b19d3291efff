"""The server as a Ray Serve application: replicas started, watched, scaled and routed to by Ray Serve.

Each replica is a whole server with an engine's process (or a fleet of them) of its own; Ray Serve's proxy, not ours,
holds the port, and chooses the less busy of two replicas for each request. So the limits of our own transport (headers,
connections, slow readers) do not apply here, and prefix caches are per replica.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from models.checkpoints.hub import model_name
from runtime.device.device import Device
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError
from runtime.engine.make_client import start_client
from runtime.later import later
from runtime.parallel.ray_engines import RayError
from runtime.text.load import load_tokenizer
from server.app import Application, create_app
from server.config import ServerConfig
from server.loading import warm_up
from server.responses_api.folder import folder_of, tenants_secret
from server.serve import check_adapters, check_files

ray = later("ray")
logger = logging.getLogger("xserv.server")

APPLICATION = "xserv"
"""Its name in Ray Serve."""

HEALTH_PERIOD_S = 5.0
DOWNSCALE_DELAY_S = 60.0
UPSCALE_DELAY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The settings of a deployment.

    engine_options  `start_client`'s
    min_replicas, max_replicas  the bounds of Ray Serve's scaling
    target_requests  open requests per replica that Ray Serve scales for
    num_cpus        processors that a replica reserves, and computes with if it has no GPU
    """

    model: str | None
    engine_options: dict[str, Any]
    config: ServerConfig
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: int = 64
    num_cpus: int = 1

    def __post_init__(self) -> None:
        for name in ("min_replicas", "max_replicas", "target_requests", "num_cpus"):
            if getattr(self, name) < 1:
                raise RayError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_replicas < self.min_replicas:
            raise RayError(f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}")


class Replica:
    """One server and its engine, in a process of Ray's."""

    def __init__(self, deployment: Deployment) -> None:
        if (responses := folder_of(deployment.config)) is not None:
            tenants_secret(responses)  # on this node, and before the model is loaded
        self._client = start_client(deployment.model, **deployment.engine_options)
        self._deployment = deployment

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray Serve, once."""
        warm_up(self._client)
        folder = self._client.info.model_path
        return create_app(
            self._client,
            load_tokenizer(folder, None),
            model_name=model_name(self._deployment.model),
            config=self._deployment.config,
        )

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises: its engine is down for good."""
        try:
            self._client.stats()
        except EngineDeadError as error:
            if error.retry_after_s is None:
                raise

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()


def application(deployment: Deployment) -> Any:
    """The Ray Serve application, for `serve.run`. Raises `RayError` if Ray Serve is not installed, and for wrong
    options."""
    serve = import_serve()
    options = dict(deployment.engine_options)
    config = EngineConfig(**options)
    check_files(deployment.config, config.prefix_cache_dir)
    check_adapters(deployment.config, is_enabled=config.enable_lora)
    num_engines = config.data_parallel_size * config.num_ranks
    device = config.device
    has_gpus = device.startswith("cuda") or (device == "auto" and _cluster_gpus() > 0)
    actor: dict[str, Any] = {"num_cpus": deployment.num_cpus}
    if has_gpus:
        actor["num_gpus"] = num_engines
        options["device"] = "cuda"
    else:
        actor["runtime_env"] = {"env_vars": {"NUMBA_NUM_THREADS": str(deployment.num_cpus)}}
        options["device"] = "cpu" if device == "auto" else Device(device).type
    placed = Deployment(**{**vars(deployment), "engine_options": options})
    scaling: dict[str, Any] = {"num_replicas": deployment.min_replicas}
    if deployment.max_replicas > deployment.min_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": deployment.min_replicas,
                "max_replicas": deployment.max_replicas,
                "target_ongoing_requests": deployment.target_requests,
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
            }
        }
    decorated = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        max_ongoing_requests=config.max_num_seqs + config.max_waiting,
        ray_actor_options=actor,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=deployment.config.drain_timeout_s,
        **scaling,
    )
    return decorated.bind(placed)


def deploy(deployment: Deployment, *, address: str, host: str, port: int) -> None:
    """Deploys it at this port of a cluster's nodes, and returns when it is ready; it outlives this process. Deploying
    again updates it in place, replica by replica. Raises `RayError`."""
    serve = import_serve()
    connect(address)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(deployment), name=APPLICATION, route_prefix="/")
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise RayError(f"Ray Serve could not deploy it: {error}") from error


def remove(address: str) -> None:
    """Removes the deployment. Raises `RayError` if there is none."""
    serve = import_serve()
    connect(address)
    if APPLICATION not in serve.status().applications:
        raise RayError(f"no application {APPLICATION!r} is deployed at {address!r}")
    serve.delete(APPLICATION)


def connect(address: str) -> None:
    """Connects this process to a cluster, unless it is connected. Raises `RayError`."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, namespace="serve")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RayError(f"no Ray cluster is at {address!r}: {error}") from error


def import_serve() -> Any:
    """`ray.serve`. Raises `RayError`."""
    try:
        from ray import serve
    except ImportError as error:
        raise RayError(f"Ray Serve is not installed: pip install '.[ray]' in xserv's checkout ({error})") from None
    return serve


def _cluster_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0
