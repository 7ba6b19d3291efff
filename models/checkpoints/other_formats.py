"""Explains a folder without safetensors: the unsupported formats in it, and how to convert them."""

from __future__ import annotations

import json
from pathlib import Path

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_STATES = ("optimizer.", "scheduler.", "rng_state", "training_args.", "scaler.")  # trainers' state beside weights
_FOREIGN = {
    ".onnx": "ONNX", ".h5": "TensorFlow", ".msgpack": "Flax", ".npz": "MLX", ".engine": "TensorRT-LLM",
    ".tflite": "LiteRT", ".nemo": "NeMo", ".mlmodel": "Core ML",
}  # fmt: skip


def remedy(folder: Path) -> str:
    """Advice on getting a loadable folder, by the files found in this one."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(_STATES))

    def found(*suffixes: str) -> str:
        return ", ".join([name for name in names if name.endswith(suffixes)][:5])

    if "adapter_config.json" in names:
        return (
            f"the folder is a LoRA adapter of {_base_of(folder / 'adapter_config.json')}: merge it into that model"
            " (peft: `merge_and_unload`, then `save_pretrained`) and give the merged folder"
        )
    if advice := _on_modules(folder / "modules.json"):
        return advice
    if found(".gguf"):
        return f"the folder holds {found('.gguf')}: give that file"
    if "params.json" in names and found(".pth"):
        return (
            f"{found('.pth')} are Meta's own files: take the repository's model*.safetensors, or convert them"
            " (transformers: `convert_llama_weights_to_hf.py`)"
        )
    if found(*_PICKLES):
        return (
            f"{found(*_PICKLES)} cannot be used, since a pickle may run code: save the model as safetensors"
            " (transformers: `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`)"
        )
    if found(".safetensors") and ("params.json" in names or any(name.startswith("consolidated") for name in names)):
        return (
            f"{found('.safetensors')} has Mistral's own tensor names: take the repository's model*.safetensors, or"
            f" make a GGUF file (llama.cpp: `convert_hf_to_gguf.py {folder} --mistral-format --outfile NEW.gguf`, which"
            " needs params.json and mistral_common)"
        )
    if found(*_FOREIGN):
        kinds = ", ".join(kind for suffix, kind in _FOREIGN.items() if found(suffix))
        return f"{found(*_FOREIGN)} ({kinds}) cannot be used: take the model's safetensors, or a GGUF file"
    return (
        "a model is a folder with config.json, model.safetensors (or shards and their index) and tokenizer.json, or a"
        " GGUF file (of a hub's repository: owner/name:Q4_K_M); pickles (.bin) are not read"
    )


def _on_modules(modules: Path) -> str:
    """Advice on sentence-transformers' folder if its first module is no Transformer, or lies deeper; else ""."""
    try:
        first = json.loads(modules.read_bytes())[0]
        kind, path = first["type"].rpartition(".")[2], first.get("path", "")
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return ""
    if kind != "Transformer":
        return (
            f"modules.json begins with the module {kind:.80}, which is not implemented: it must begin with a"
            " Transformer"
        )
    return f'modules.json: [0]: path = {path!r:.80} must be "": move that folder\'s files up to it' if path else ""


def _base_of(adapter_config: Path) -> str:
    try:
        base = json.loads(adapter_config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError, AttributeError):
        base = None
    return f"{base:.200}" if base and isinstance(base, str) else "another model"
