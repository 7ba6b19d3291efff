"""Lists the kernels that a model needs, by running all kinds of batches on a device that does nothing."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from models.checkpoints.model_files import open_model
from numba_kernels.cuda.specialisation import Specialisation
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import engine_of, lone_rank
from runtime.engine.messages import EngineOutput, EngineRequest, ImageItem, ImageSupport
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError
from runtime.images.patches import FixedRule

MOST_LAYERS = 2
"""Layers beyond these launch the same kernels, if all are of one kind."""

KINDS_OF_LAYERS = ("layer_types", "sliding_window_pattern")
"""Config fields that make layers differ; Gemma's text models have the last one by default."""

TOKEN_GRIDS = ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32), (34, 60))
"""Lines and columns of tokens of images that keep their shape; the last is an image of 1,920 x 1,080 pixels."""

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
    """The kernels that prompts of many lengths and batches of many sizes launch on a device of that architecture, by an
    engine of that config; its device, memory, weights and stages are ignored.

    The process's emulated device of that architecture does nothing afterwards. Raises what `engine_of` raises.
    """
    bindings = cuda_bindings("the kernels' compiler")
    driver = Driver(DryDriver(arch), bindings, arch=arch)
    driver.call("cuInit", 0)
    found = KernelList()
    device = Device(f"emulated:{arch}")
    Gpu(device, driver, kernel_cache=found).install()
    config = replace(
        config, device=device.type, load_format="dummy", num_blocks=None, kv_cache_bytes=None, swap_space_bytes=0,
        preemption="auto", pipeline_parallel_size=1, pipeline_layers="", prefix_cache_dir="",
        data_parallel_size=1, prefill_engines=0, decode_engines=0, engine_roles="fixed",
        kv_transfer_address="", kv_transfer_key_file="", kv_transfer_library="tcp",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        copy = shallow_copy(folder, Path(scratch), config.hf_overrides, config.mmproj)
        config = replace(config, hf_overrides="", mmproj="")
        engine = engine_of(copy, config) if config.tensor_parallel_size == 1 else lone_rank(copy, config)
        client = ThreadEngineClient(engine)
        try:
            run_batches(client)
        finally:
            client.close()
    return found.specialisations


def shallow_copy(model: Path, folder: Path, overrides: str = "", mmproj: str = "") -> Path:
    """Writes the model's config with fewer layers, if its layers are all of one kind. Quantised weights are linked,
    since their headers determine which kernels read them."""
    fields = open_model(model, overrides, mmproj).config().values()
    if "quantization_config" in fields:
        for file in model.glob("*.safetensors*"):
            (folder / file.name).symlink_to(file.resolve())
    for inner in (fields, fields.get("text_config")):  # the latter of models that read images
        if inner is None or any(name in inner for name in KINDS_OF_LAYERS) or inner.get("model_type") == "gemma3_text":
            continue
        for name in ("num_hidden_layers", "n_layer"):
            if name in inner:
                inner[name] = min(inner[name], MOST_LAYERS)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def run_batches(client: ThreadEngineClient) -> None:
    """Run prompts of each length alone, batches of each size, each kind of sampling, and images of many sizes."""
    most = max(1, client.info.max_model_len - 3)
    for length in PROMPT_LENGTHS:
        _run(client, 1, min(length, most), GREEDY)
    for count in NUM_PROMPTS:
        _run(client, min(count, client.info.max_waiting), min(4, most), GREEDY)
    for params in SAMPLED:
        _run(client, min(3, client.info.max_waiting), min(4, most), params)
    if client.info.images is not None:
        run_pictures(client, client.info.images, most)


def run_pictures(client: ThreadEngineClient, support: ImageSupport, most: int) -> None:
    """Run an image of each size that fits, in a prompt of at most `most` tokens, and a prompt with several images."""
    rule = support.rule
    grids = [rule.grid] if isinstance(rule, FixedRule) else [
        (lines * rule.merge_size, columns * rule.merge_size)
        for lines, columns in TOKEN_GRIDS
        if lines * columns * rule.factor**2 <= rule.most_pixels
    ]  # fmt: skip
    for number, grid in enumerate(grids):
        for count in (1, 3):
            ids: list[int] = []
            items: list[ImageItem] = []
            for index in range(count):
                picture = support.picture_ids(*rule.token_grid(*grid))
                digest = hashlib.sha256(f"{number} {count} {index}".encode()).digest()
                patches = bytes(grid[0] * grid[1] * support.patch_bytes)
                first = len(ids) + 1
                ids += [1, *picture, 1]
                items.append(
                    ImageItem(digest=digest, first_token=first, rows=grid[0], columns=grid[1], patches=patches)
                )
            num_tokens = len(ids) - 2 * count
            if len(ids) <= most and num_tokens <= support.max_tokens:
                _submit(client, [EngineRequest(request_id="0", prompt_token_ids=ids, params=GREEDY, images=(*items,))])


def _run(client: ThreadEngineClient, num_prompts: int, length: int, params: SamplingParams) -> None:
    _submit(client, [
        EngineRequest(request_id=str(number), prompt_token_ids=[1] * length, params=params)
        for number in range(num_prompts)
    ])  # fmt: skip


def _submit(client: ThreadEngineClient, requests: Sequence[EngineRequest]) -> None:
    """Submit all at once; return when they have ended."""
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    for request in requests:
        client.submit(request, outputs.put)
    num_open = len(requests)
    while num_open:
        output = outputs.get()
        if output.finish_reason == "error":
            raise XservError(f"a trial run for the model's kernels failed: {output.error}")
        num_open -= output.finish_reason is not None
