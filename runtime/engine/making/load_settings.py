"""Settings of a config for declaring and loading a model, or the part of it that a rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from models.registry import stages_of
from runtime.communicator import Communicator, DeclaredRank, DeclaredStage, Pipeline, RankCommunicator
from runtime.device.device import Device
from runtime.device.errors import InvalidDeviceError
from runtime.engine.config import OPTIONS, EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.ranks.group import device_of_rank
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadSettings


def declared_rank(config: EngineConfig) -> tuple[Communicator | None, Pipeline | None]:
    """The first rank and stage of a split model, for its declaration; all ranks of a stage have the same number of
    bytes. Raises ``RequestError``."""
    num_ranks, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    is_here = config.distributed_executor_backend == "mp"  # otherwise each rank is on another machine
    if config.num_ranks > 1 and is_here and (device := Device.parse(config.device)).kind == "cuda":
        name = "tensor_parallel_size" if num_ranks > 1 else "pipeline_parallel_size"
        try:
            device_of_rank(device, config.num_ranks - 1).require()
        except InvalidDeviceError as error:
            sizes = f"{name} is {getattr(config, name)}"
            if num_ranks > 1 and num_stages > 1:
                sizes += f" and pipeline_parallel_size {num_stages}"
            raise RequestError(f"{sizes} from {device} on: {error}", param=name) from None
    return (
        DeclaredRank(0, num_ranks) if num_ranks > 1 else None,
        DeclaredStage(0, num_stages) if num_stages > 1 else None,
    )


def load_settings(
    config: EngineConfig, communicator: Communicator | None = None, pipeline: Pipeline | None = None,
    stages: tuple[range, ...] = (),
) -> LoadSettings:  # fmt: skip
    """The settings of a config for loading: device and types of the weights, and the rank, the stage and the layers of
    each stage."""
    options = {each.name: getattr(config, each.name) for each in OPTIONS if each.name in LoadSettings.__annotations__}
    options["device"] = Device.parse(config.device)
    own: dict[str, Any] = {"communicator": communicator, "pipeline": pipeline, "stages": stages}
    if config.enable_lora:
        own["addends"] = LowRankMaps(config.max_loras, config.max_lora_rank)
    return cast("LoadSettings", {**options, **own, "pending_tokens": config.pending_tokens})


def layers_of_stages(folder: Path, config: EngineConfig) -> tuple[range, ...]:
    """The layers of each stage of the model in a folder, by its files' headers; empty for one stage. Raises
    ``ConfigError`` unless there are enough layers, and as many as ``pipeline_layers`` has."""
    if config.pipeline_parallel_size == 1:
        return ()
    rank, _ = declared_rank(config)
    return stages_of(
        folder,
        config.pipeline_parallel_size,
        config.stage_layers,
        load_format=config.load_format,
        **load_settings(config, rank),
    )


def declared_settings(config: EngineConfig, layers: tuple[range, ...], stage: int = 0) -> LoadSettings:
    """`load_settings` of a stage's first rank, for a declaration; `layers` are those of all stages."""
    rank, pipeline = declared_rank(config)
    if pipeline is None:
        return load_settings(config, rank)
    return load_settings(config, rank, DeclaredStage(stage, pipeline.num_stages), layers)


def settings_of_rank(folder: Path, config: EngineConfig, communicator: RankCommunicator | None) -> LoadSettings:
    """`load_settings` of the rank that has this communicator; None for a model in one piece."""
    if communicator is None:
        return load_settings(config)
    is_staged = communicator.num_stages > 1
    return load_settings(
        config, communicator if communicator.num_ranks > 1 else None, communicator if is_staged else None,
        layers_of_stages(folder, config),
    )  # fmt: skip
