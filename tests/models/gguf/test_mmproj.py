"""Models in GGUF that read pictures, beside their twins in safetensors: a file of the text, and one of the tower."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.configuration.preprocessing import read_patch_rule
from models.errors import ConfigError, ModelLoadError
from models.picture_decoder import AxesDecoder
from models.registry import load_config, load_model
from runtime.images.patches import PatchRule
from tests.models.driver import relative_error
from tests.models.gguf.files import Array, write_gguf
from tests.models.vision.cases import CASES, HYBRIDS, IMAGE, PROMPT, load_golden, stored_tensors, write_model
from tests.models.vision.chat_model import LETTERS, PAD, TEMPLATE
from tests.models.vision.test_vision import encoded, run

PIXELS = (4096, 65536)
TOKENS = [*LETTERS, PAD, *(f"<{i}>" for i in range(5))]


def write_text(path: Path, case: str) -> Path:
    """The model's own file: the text, and a vocabulary of placeholders."""
    config, is_turned = CASES[case], case in HYBRIDS
    stored = stored_tensors(load_golden(case).shapes, inputs_first=not is_turned)
    tensors = {name.replace("language_model.", ""): each for name, each in stored.items() if "visual" not in name}
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        for part, half in zip(("gate", "up"), np.split(tensors.pop(name), 2, axis=1 if is_turned else 2)):
            tensors |= _apart(name.replace("gate_up_proj", f"{{}}.{part}_proj.weight"), half, is_turned)
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        tensors |= _apart(name.replace("down_proj", "{}.down_proj.weight"), tensors.pop(name), is_turned)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)

    def add_keys(writer: gguf.GGUFWriter) -> None:
        (metadata,) = writer.kv_data
        metadata.pop(next(key for key in metadata if key.endswith("dimension_sections")))
        writer.add_rope_dimension_sections([*config["text_config"]["rope_parameters"]["mrope_section"], 0])
        if not is_turned:
            metadata.pop(next(key for key in metadata if key.endswith("n_deepstack_layers")))
            writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1 if i != IMAGE else 3 for i in range(len(TOKENS))])
        writer.add_token_merges(["Ċ Ċ", "ĊĊ Ċ"])
        writer.add_chat_template(TEMPLATE)

    kind = config["text_config"]["model_type"] if is_turned else case
    return write_gguf(path, {**config["text_config"], "model_type": kind}, tensors, add_metadata=add_keys)


def _apart(name: str, stack: Array, is_turned: bool) -> dict[str, Array]:
    turned = stack if is_turned else stack.swapaxes(1, 2)
    return {name.format(expert): np.ascontiguousarray(each) for expert, each in enumerate(turned)}


def write_tower(path: Path, case: str, **changes: Any) -> Path:
    """The tower's file, by the rules of llama.cpp's converter; `changes` replace keys, None leaves one out."""
    vision = CASES[case]["vision_config"]
    layers, deepstack = vision["depth"], vision["deepstack_visual_indexes"]
    writer = gguf.GGUFWriter(path, "clip")
    keys: dict[str, Any] = {
        "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True, "clip.vision.projection_dim": vision["out_hidden_size"],
        "clip.vision.image_size": 20, "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"], "clip.vision.block_count": layers,
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.attention.head_count": vision["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.spatial_merge_size": 2,
        "clip.vision.image_mean": [0.5, 0.25, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.125],
        "clip.vision.image_min_pixels": PIXELS[0], "clip.vision.image_max_pixels": PIXELS[1],
        "clip.vision.is_deepstack_layers": [layer in deepstack for layer in range(layers)], **changes,
    }  # fmt: skip
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    for name, array in stored_tensors(load_golden(case).shapes).items():
        if not name.startswith("model.visual."):
            continue
        own = name.removeprefix("model.")
        if found := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(\w+)\.(\w+)", own):
            stored = f"v.deepstack.{deepstack[int(found[1])]}.{found[2].removeprefix('linear_')}.{found[3]}"
        elif found := re.fullmatch(r"visual\.merger\.(\w+)\.(\w+)", own):
            stored = f"{merger[found[1]]}.{found[2]}"
        elif own == "visual.patch_embed.proj.weight":
            for frame, suffix in enumerate(("", ".1")):
                writer.add_tensor(f"v.patch_embd.weight{suffix}", np.ascontiguousarray(array[:, :, frame]))
            continue
        else:
            known = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert known is not None, own
            stored = known
        writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen3_vl_moe", *HYBRIDS])
def test_the_twin_s_logits(tmp_path: Path, case: str) -> None:
    """Equal to the bit where no heads are stored in another order, and so transformers'; the file is found beside the
    model, or named."""
    golden = load_golden(case)
    (tmp_path / "other").mkdir()
    model = write_text(tmp_path / "model.gguf", case)
    tower = write_tower(tmp_path / "other" / "tower.gguf", case)
    twin = load_model(write_model(tmp_path / "twin", case, golden.shapes))
    assert isinstance(twin, AxesDecoder)
    expected = run(twin, encoded(twin, case), PROMPT, [len(PROMPT)])
    ours = load_model(model, mmproj=str(tower))
    assert isinstance(ours, AxesDecoder)
    logits = run(ours, encoded(ours, case), PROMPT, [len(PROMPT)])
    if case in HYBRIDS:
        assert relative_error(logits, golden.arrays["logits"][: len(PROMPT)]) < 1e-4
    else:
        np.testing.assert_array_equal(logits, expected)
        assert relative_error(expected, golden.arrays["logits"][: len(PROMPT)]) < 1e-5
    assert not isinstance(load_model(model), AxesDecoder)  # nothing lies beside it
    tower.rename(tmp_path / "mmproj-F32.gguf")
    assert load_config(model).architecture == CASES[case]["architectures"][0]
    assert load_config(model, mmproj="none").architecture.endswith("ForCausalLM")


def test_how_pictures_are_cut(tmp_path: Path) -> None:
    model = write_text(tmp_path / "model.gguf", "qwen3_vl")
    write_tower(tmp_path / "mmproj.gguf", "qwen3_vl")
    rule = read_patch_rule(model, PatchRule(patch_size=4, min_pixels=1, max_pixels=2))
    assert rule == PatchRule(
        patch_size=4, min_pixels=PIXELS[0], max_pixels=PIXELS[1], mean=(0.5, 0.25, 0.5), std=(0.5, 0.5, 0.125)
    )


def test_only_a_tower_that_fits_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_text(tmp_path / "model.gguf", "qwen3_vl")
    write_tower(tmp_path / "mmproj-a.gguf", "qwen3_vl", **{"clip.projector_type": "gemma3"})
    write_tower(tmp_path / "mmproj-b.gguf", "qwen3_vl", **{"clip.vision.projection_dim": 48})
    assert load_config(model).architecture == "Qwen3ForCausalLM"
    flags = "clip.vision.is_deepstack_layers"  # which older files leave out
    write_tower(tmp_path / "mmproj-c.gguf", "qwen3_vl", **{flags: None})
    write_tower(tmp_path / "mmproj-d.gguf", "qwen3_vl")
    assert load_config(model).architecture == "Qwen3VLForConditionalGeneration"
    assert "pictures are read by mmproj-c.gguf; --mmproj FILE chooses another tower" in caplog.text
    other = write_text(tmp_path / "other.gguf", "qwen3_5_vl")  # as wide, but without inner layers that are merged
    assert load_config(other).architecture == "Qwen3_5ForCausalLM"
    with pytest.raises(
        ConfigError, match=r"merges 2 of its inner layers, but .* has qwen35.n_deepstack_layers = 0: give"
    ):
        load_config(other, mmproj=str(tmp_path / "mmproj-d.gguf"))


def test_a_tower_above_a_folder_of_shards(tmp_path: Path) -> None:
    """As repositories have it."""
    folder = tmp_path / "snapshots" / "0123"
    (folder / "Q4_K_M").mkdir(parents=True)
    model = write_text(folder / "Q4_K_M" / "model.gguf", "qwen3_vl")
    write_tower(folder / "mmproj-F16.gguf", "qwen3_vl")
    assert load_config(model).architecture == "Qwen3VLForConditionalGeneration"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"clip.projector_type": "gemma3"}, "clip.projector_type = 'gemma3' is not supported"),
    ({"clip.vision.projection_dim": 48}, "projection_dim = 48 must be the model's embedding_length = 40"),
    ({"clip.vision.is_deepstack_layers": [True, False, False]}, "merges 1 of its inner layers, but .* = 2: give the"),
    ({"clip.vision.attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon = 1e-05 is not supported"),
    ({"clip.vision.block_count": 2}, "tensor|deepstack_visual_indexes"),
    ({"clip.vision.patch_size": None}, "clip.vision.patch_size is missing"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_tower_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = write_text(tmp_path / "model.gguf", "qwen3_vl")
    tower = write_tower(tmp_path / "tower.gguf", "qwen3_vl", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(model, mmproj=str(tower))


def test_towers_of_models_that_have_none(tmp_path: Path) -> None:
    model = write_text(tmp_path / "model.gguf", "qwen3_vl")
    with pytest.raises(ModelLoadError, match="the file is missing"):
        load_config(model, mmproj=str(tmp_path / "no.gguf"))
    with pytest.raises(
        ConfigError, match=r"general.architecture is 'qwen3vl', must be 'clip': give the file of the tow"
    ):
        load_config(model, mmproj=str(model))
    folder = write_model(tmp_path / "twin", "qwen3_vl", load_golden("qwen3_vl").shapes)
    with pytest.raises(ConfigError, match=r"mmproj is 'a.gguf', but the model is no GGUF file: leave it out"):
        load_config(folder, mmproj="a.gguf")
