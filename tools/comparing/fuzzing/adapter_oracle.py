"""The other side of `fuzz_adapters.py`: PEFT adapts transformers' models and runs them, one JSON line each.

A script for a Python with torch, transformers and peft. `make` is that of `oracle.py`; its answer also names the maps
that PEFT can adapt. `adapt` takes a folder and the fields of `LoraConfig`s: each adapter is saved by PEFT in
`adapter_0` …, its tensors filled from a seed (`adapter_tensors`), and `adapted.npz` has the logits of each prompt with
it (`adapter_0_logits_0` …, float32 arithmetic over the stored weights). The answer has an entry for each adapter: its
tensors' shapes, the error of the model in its own type, or in float32 against float64 (`noise`), and by how much it
changes the logits; or the reason why PEFT refuses it (`Refused`). Any other error ends the oracle.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers.pytorch_utils import Conv1D

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.comparing.fuzzing.adapter_tensors import adapter_tensor
from tools.comparing.fuzzing.oracle import _logits, make


class Refused(Exception):
    """PEFT makes no such adapter, or cannot run what it has made."""


def make_named(request: dict[str, Any]) -> dict[str, Any]:
    """As `make`, with the names of the linear maps, token tables and parameters of experts."""
    answer = make(request)
    if "refused" in answer:
        return answer
    model = _loaded(request, torch.float32)
    kinds = (torch.nn.Linear, Conv1D)
    answer["maps"] = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    answer["tables"] = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    answer["parameters"] = [
        name for name, parameter in model.named_parameters() if ".experts." in name and parameter.ndim == 3
    ]
    return answer


def adapt(request: dict[str, Any]) -> dict[str, Any]:
    """Makes, saves and runs the adapters of one request."""
    folder, answers = Path(request["folder"]), []
    model = _loaded(request, torch.float32)
    arrays: dict[str, Any] = {f"plain_{at}": _logits(model, ids) for at, ids in enumerate(request["prompts"])}
    for number, given in enumerate(request["adapters"]):
        try:
            answers.append(_adapted(request, given, folder / f"adapter_{number}", f"adapter_{number}_", arrays))
        except (Refused, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "size mismatch" not in str(error):
                raise
            answers.append({"refused": " ".join(str(error).split())[:200]})  # or PEFT does not read what it wrote
    np.savez(folder / "adapted.npz", allow_pickle=False, **arrays)
    return {"adapters": answers}


def _adapted(
    request: dict[str, Any], given: dict[str, Any], folder: Path, prefix: str, arrays: dict[str, Any]
) -> dict[str, Any]:
    own = getattr(torch, request["dtype"])
    noise, runs, shapes = 0.0, [], _save(request, given, folder)
    for dtype in (torch.float32, torch.float64 if own is torch.float32 else own):
        adapted = PeftModel.from_pretrained(_loaded(request, dtype), folder).eval()
        if dtype is torch.float64:
            adapted.double()
        try:
            runs.append([_logits(adapted, ids) for ids in request["prompts"]])
        except RuntimeError as error:
            if not _adds_a_wrong_shape(error):
                raise
            raise Refused(f"PEFT adds another shape to a parameter: {error}") from error
    plain = [arrays[f"plain_{index}"] for index in range(len(request["prompts"]))]
    change = float(max(np.abs(ours - theirs).max() / np.abs(theirs).max() for ours, theirs in zip(runs[0], plain)))
    for index, (logits, other) in enumerate(zip(*runs, strict=True)):
        arrays[f"{prefix}logits_{index}"] = logits
        noise = max(noise, float(np.abs(other - logits).max() / np.abs(logits).max()))
    return {"noise": noise, "change": change, "shapes": shapes}


def _save(request: dict[str, Any], given: dict[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Saves an adapter; the shapes of its tensors."""
    model, config = _loaded(request, torch.float32), LoraConfig(**given["fields"])
    try:
        adapted = get_peft_model(model, config).eval()
    except ValueError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    held = get_peft_model_state_dict(adapted)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    made = {name: adapter_tensor(name, shape, given, request["weights"]) for name, shape in shapes.items()}
    filled = {name: held[name] if array is None else torch.from_numpy(array) for name, array in made.items()}
    missing = set_peft_model_state_dict(adapted, filled)
    assert not missing.unexpected_keys, missing.unexpected_keys
    adapted.save_pretrained(folder)
    return shapes


def _adds_a_wrong_shape(error: RuntimeError) -> bool:
    """Whether PEFT's own sum of a parameter and its pair failed: it turns some of gpt-oss's experts, which are stored
    inputs first, the wrong way after loading."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_of_peft = last.filename.endswith("peft/tuners/lora/layer.py") and last.line == "return W + self.delta_weight"
    return is_of_peft and str(error).startswith("The size of tensor a")


def _loaded(request: dict[str, Any], dtype: torch.dtype) -> Any:
    model_class = getattr(transformers, request["architecture"])
    return model_class.from_pretrained(
        request["folder"], dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    operations = {"make": make_named, "adapt": adapt}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(operations[request.pop("op")](request)), flush=True)


if __name__ == "__main__":
    main()
