"""Golden models with a prediction layer after their own, and their folders
(`tools/references/make_mtp_goldens.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.models.folders import Array, Golden, golden_tensors, load_golden, write_safetensors
from tests.models.golden_weights import golden_tensor

FOLDER = Path(__file__).parent / "mtp"
CASES = ("deepseek_v3_odd", "glm4_moe_groups", "nemotron_h_moe_latent", "qwen3_5_odd", "glm4_moe_lite_odd")
NUM_TOKENS, NUM_STEPS = 9, 3


def prediction_tensors(case: str) -> dict[str, Array]:
    """What a checkpoint has of the layer, with copies of the table and head that differ from the model's."""
    golden = load_golden(case)
    if case.startswith("qwen3_5"):
        return _apart(golden)
    if case.startswith("nemotron_h"):
        return _of_two_layers(golden)
    layers = {int(name.split(".")[2]) for name in golden.shapes if name.startswith("model.layers.")}
    last, own = f"model.layers.{max(layers)}.", f"model.layers.{max(layers) + 1}."
    shapes = {own + name.removeprefix(last): shape for name, shape in golden.shapes.items() if name.startswith(last)}
    vocab, hidden = golden.shapes["lm_head.weight"]
    shapes |= {f"{own}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{own}eh_proj.weight"] = hidden, 2 * hidden
    shapes |= {f"{own}{name}.weight": (vocab, hidden) for name in ("embed_tokens", "shared_head.head")}
    return {name: golden_tensor(name, shape, golden.seed) for name, shape in shapes.items()}


def _apart(golden: Golden) -> dict[str, Array]:
    """The same of a model that has full attention in some layers: one like these."""
    (number,) = {name.split(".")[2] for name in golden.shapes if ".self_attn." in name}
    like = f"model.layers.{number}."
    shapes = {
        f"mtp.layers.0.{name.removeprefix(like)}": shape
        for name, shape in golden.shapes.items()
        if name.startswith(like)
    }
    hidden = golden.shapes["model.norm.weight"][0]
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = hidden, 2 * hidden
    return {name: golden_tensor(name, shape, golden.seed) for name, shape in shapes.items()}


def _of_two_layers(golden: Golden) -> dict[str, Array]:
    """The same of a model whose layers have one part each: one like its attention, one like its experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for own, part in enumerate((".mixer.q_proj.", ".mixer.gate.weight")):
        (number,) = {name.split(".")[2] for name in golden.shapes if part in name}
        like = f"backbone.layers.{number}."
        shapes |= {
            f"mtp.layers.{own}.{name.removeprefix(like)}": shape
            for name, shape in golden.shapes.items()
            if name.startswith(like)
        }
    hidden = golden.shapes["backbone.norm_f.weight"][0]
    norms = ("0.enorm", "0.hnorm", "1.final_layernorm")
    shapes |= {f"mtp.layers.{name}.weight": (hidden,) for name in norms}
    shapes["mtp.layers.0.eh_proj.weight"] = hidden, 2 * hidden
    return {name: golden_tensor(name, shape, golden.seed) for name, shape in shapes.items()}


def write_with_prediction(folder: Path, case: str, **changes: Array) -> Path:
    """A whole model folder; ``changes`` replace tensors of the prediction layer by the ends of their names, `_` for
    a dot."""
    golden = load_golden(case)
    tensors = prediction_tensors(case)
    for end, array in changes.items():
        (name,) = (name for name in tensors if name.endswith(f".{end.replace('__', '.')}.weight"))
        tensors[name] = array
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text((golden.folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", {**golden_tensors(golden), **tensors})
    return folder


def write_bigrams(folder: Path, case: str, *, share: float = 0.0) -> Path:
    """A model whose layers add nothing, so that the last token says the next one, and a prediction layer that says the
    same. ``share``: layers add so much of what they would, so that it is wrong now and then."""
    golden = load_golden(case)
    tensors, own = golden_tensors(golden), prediction_tensors(case)
    for each in (tensors, own):
        for name, array in each.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                array *= share
            elif name.endswith("enorm.weight"):
                array[:] = 1.0
            elif name.endswith("pre_fc_norm_embedding.weight"):
                array[:] = 0.0  # stored less 1
    for name, array in own.items():
        if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            array[:] = np.eye(*array.shape)
        elif name.endswith(("shared_head.norm.weight", "mtp.norm.weight", "final_layernorm.weight")):
            array[:] = next(
                tensors[norm] for norm in ("model.norm.weight", "backbone.norm_f.weight") if norm in tensors
            )
    folder.mkdir()
    (folder / "config.json").write_text((golden.folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", {**tensors, **own})
    return folder
