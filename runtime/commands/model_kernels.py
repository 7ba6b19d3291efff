"""Which kernels a model needs: its engine is run on a device that does nothing, and asked for all kinds of batches."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.device.kernel_list import KernelList

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

MOST_LAYERS = 2
"""Layers beyond these launch what those before them do, where all are of one kind."""

NUM_PROMPTS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 48, 64, 65, 96, 128, 192, 256)
PROMPT_LENGTHS = (1, 5, 16, 17, 33, 64, 65, 129, 300, 513, 1025, 2000)
KV_CACHE_BYTES = 1 << 30


def kernels_of_model(model: str, arch: str, dtype: str) -> list[Specialisation]:
    """Those that prompts of many lengths and batches of many sizes launch on a device of that architecture.

    The process's device of that architecture does nothing from then on. Raises what `LLM` raises for a model.
    """
    from models.hub import resolve_model
    from runtime.device.device import Device
    from runtime.device.driver import Driver, cuda_bindings
    from runtime.device.emulator.driver.dry_driver import DryDriver
    from runtime.device.gpu import Gpu
    from runtime.llm import LLM

    bindings = cuda_bindings("the kernels' compiler")
    driver = Driver(DryDriver(arch), bindings, arch=arch)
    driver.call("cuInit", 0)
    found = KernelList()
    device = Device(f"emulated:{arch}")
    Gpu(device, driver, kernel_cache=found).install()
    with tempfile.TemporaryDirectory() as folder:
        shallow = shallow_copy(Path(resolve_model(model)), Path(folder))
        arguments: dict[str, Any] = {"device": device.type, "dtype": dtype, "kv_cache_bytes": KV_CACHE_BYTES}
        with LLM(shallow, load_format="dummy", skip_tokenizer_init=True, **arguments) as llm:
            run_batches(llm)
    return found.specialisations


def shallow_copy(model: Path, folder: Path) -> Path:
    """The model's config.json with fewer layers, where its layers are all of one kind."""
    fields = json.loads((model / "config.json").read_text())
    if "layer_types" not in fields:
        for name in ("num_hidden_layers", "n_layer"):
            if name in fields:
                fields[name] = min(fields[name], MOST_LAYERS)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def run_batches(llm: Any) -> None:
    """Prompts of each length alone, batches of each size, and each kind of sampling."""
    from runtime.engine.sampling_params import SamplingParams

    most = llm.client.info.max_model_len - 3
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    for length in PROMPT_LENGTHS:
        llm.generate([[1] * min(length, most)], greedy, use_tqdm=False)
    for count in NUM_PROMPTS:
        llm.generate([[1] * min(4, most)] * count, greedy, use_tqdm=False)
    for options in (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 1},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2},
    ):
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, **options)  # type: ignore[arg-type]
        llm.generate([[1] * min(4, most)] * 3, params, use_tqdm=False)
