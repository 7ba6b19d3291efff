"""Which kernels a model needs: its engine is run on a device that does nothing, and asked for all kinds of batches."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from models.model_files import open_model
from runtime.device.kernel_list import KernelList
from runtime.engine.config import EngineConfig
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

MOST_LAYERS = 2
"""Layers beyond these launch what those before them do, where all are of one kind."""

NUM_PROMPTS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 48, 64, 65, 96, 128, 192, 256)
PROMPT_LENGTHS = (1, 5, 16, 17, 33, 64, 65, 129, 300, 513, 1025, 2000)
_PARAMS = {"max_tokens": 2, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0.0, **_PARAMS)  # type: ignore[arg-type]
SAMPLED = tuple(
    SamplingParams(**_PARAMS, **options)  # type: ignore[arg-type]
    for options in (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 1},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2},
    )
)


def kernels_of_model(folder: Path, arch: str, config: EngineConfig) -> list[Specialisation]:
    """Those that prompts of many lengths and batches of many sizes launch on a device of that architecture, by an
    engine of that config, whose device, memory, weights and stages are no matter.

    The process's emulated device of that architecture does nothing from then on. Raises what `engine_of` raises.
    """
    from runtime.device.device import Device
    from runtime.device.driver import Driver, cuda_bindings
    from runtime.device.emulator.driver.dry_driver import DryDriver
    from runtime.device.gpu import Gpu
    from runtime.engine.make_engine import engine_of, lone_rank

    bindings = cuda_bindings("the kernels' compiler")
    driver = Driver(DryDriver(arch), bindings, arch=arch)
    driver.call("cuInit", 0)
    found = KernelList()
    device = Device(f"emulated:{arch}")
    Gpu(device, driver, kernel_cache=found).install()
    config = replace(
        config, device=device.type, load_format="dummy", num_blocks=None, kv_cache_bytes=None, swap_space_bytes=0,
        preemption="auto", pipeline_parallel_size=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        copy = shallow_copy(folder, Path(scratch))
        engine = engine_of(copy, config) if config.tensor_parallel_size == 1 else lone_rank(copy, config)
        client = ThreadEngineClient(engine)
        try:
            run_batches(client)
        finally:
            client.close()
    return found.specialisations


def shallow_copy(model: Path, folder: Path) -> Path:
    """The model's config with fewer layers, where its layers are all of one kind. Quantised weights are linked to, as
    their headers say which kernels read them."""
    fields = open_model(model).config().values()
    if "quantization_config" in fields:
        for file in model.glob("*.safetensors*"):
            (folder / file.name).symlink_to(file.resolve())
    if "layer_types" not in fields:
        for name in ("num_hidden_layers", "n_layer"):
            if name in fields:
                fields[name] = min(fields[name], MOST_LAYERS)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def run_batches(client: ThreadEngineClient) -> None:
    """Prompts of each length alone, batches of each size, and each kind of sampling."""
    most = max(1, client.info.max_model_len - 3)
    for length in PROMPT_LENGTHS:
        _run(client, 1, min(length, most), GREEDY)
    for count in NUM_PROMPTS:
        _run(client, min(count, client.info.max_waiting), min(4, most), GREEDY)
    for params in SAMPLED:
        _run(client, min(3, client.info.max_waiting), min(4, most), params)


def _run(client: ThreadEngineClient, num_prompts: int, length: int, params: SamplingParams) -> None:
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    for number in range(num_prompts):
        client.submit(EngineRequest(request_id=str(number), prompt_token_ids=[1] * length, params=params), outputs.put)
    num_open = num_prompts
    while num_open:
        output = outputs.get()
        if output.finish_reason == "error":
            raise XservError(f"a trial run for the model's kernels failed: {output.error}")
        num_open -= output.finish_reason is not None
