"""Writes transformers' results for the tiny models of `tests/models/vision`.

    python -m tools.references.make_vision_goldens [CASE ... | configs | adapters]   # needs transformers, torch, peft

Without cases, all of them are written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.numpy import save_file

from tests.models.driver import mean_relative_error, relative_error
from tests.models.golden_weights import golden_tensor, named_tensors, rounded_to_bfloat16
from tests.models.vision import gemma4_cases, pixtral_cases, square_cases
from tests.models.vision.adapter_cases import ADAPTED, ADAPTER, adapter_tensor
from tests.models.vision.cases import CASES, FOLDER, GRIDS, HYBRIDS, IMAGE, PROMPT, SEED, patches_of, stored_tensors
from tests.models.vision.gemma4_pixels import their_patches
from tools.comparing.fuzzing.oracle import picture_arguments

NUM_NEW = 6
"""Tokens sampled after the prompt."""


OTHERS = {case: module for module in (square_cases, pixtral_cases) for case in module.CASES}
"""The cases of families whose towers see patches of fixed places."""


def main() -> None:
    for case in sys.argv[1:] or (*CASES, *OTHERS, *gemma4_cases.CASES, "configs", "adapters"):
        if case == "configs":
            make_configs()
        elif case == "adapters":
            make_adapters()
        elif case in gemma4_cases.CASES:
            make_gemma4(case)
        elif case in OTHERS:
            make_other_case(OTHERS[case], case)
        else:
            make_case(case)


def made_model(config: dict[str, Any]) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """transformers' model of a config with the golden weights, and the shapes of its tensors."""
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    model_class: Any = transformers.AutoModelForImageTextToText
    model = model_class.from_config(made, attn_implementation="eager", experts_implementation="eager").eval()
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shapes[name] = tuple(parameter.shape)
            parameter.copy_(torch.from_numpy(golden_tensor(name, shapes[name], SEED)))
    return model, shapes


def write(case: str, shapes: dict[str, tuple[int, ...]], found: dict[str, Any]) -> None:
    (FOLDER / f"{case}.json").write_text(json.dumps(shapes, separators=(",", ":")), encoding="utf-8")
    np.savez_compressed(FOLDER / f"{case}.npz", **found)
    print(case, {name: np.shape(array) for name, array in found.items()}, found.get("greedy"))


def make_configs() -> None:
    """`resaved_configs.json`: the configs of all families' cases, written by `save_pretrained` of a model loaded by
    `from_pretrained(dtype=...)`."""
    found = {}
    for case, config in (CASES | square_cases.CASES | pixtral_cases.CASES | gemma4_cases.CASES).items():
        made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        with TemporaryDirectory() as folder:
            model: Any = transformers.AutoModelForImageTextToText.from_config(made)
            model.save_pretrained(folder)
            type(model).from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
            found[case] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(found, separators=(",", ":"))
    (FOLDER / "resaved_configs.json").write_text(text, encoding="utf-8")


def make_adapters() -> None:
    """`adapters.npz`: the towers' embeddings of cases with an adapter of PEFT, and its tensors' shapes."""
    found: dict[str, Any] = {}
    for case in ADAPTED:
        config = {**CASES, **square_cases.CASES, **pixtral_cases.CASES}[case]
        adapted = get_peft_model(made_model(config)[0], LoraConfig(**ADAPTER)).eval()
        shapes = {name: tuple(each.shape) for name, each in get_peft_model_state_dict(adapted).items()}
        given = {name: torch.from_numpy(adapter_tensor(name, shape)) for name, shape in shapes.items()}
        assert not set_peft_model_state_dict(adapted, given).unexpected_keys
        model = adapted.base_model.model
        with torch.no_grad():
            if case in CASES:
                grids = torch.tensor([[1, *grid] for grid in GRIDS])
                pixels = torch.from_numpy(np.concatenate([patches_of(case, index) for index in range(len(GRIDS))]))
                made = model.model.get_image_features(pixels, grids)
            elif case in pixtral_cases.CASES:
                batch, sizes = pixtral_cases.batch_of(case)
                made = model.model.get_image_features(
                    torch.from_numpy(batch), vision_feature_layer=-1, image_sizes=torch.tensor(sizes)
                )
            else:
                names = ("vision_feature_layer", "vision_feature_select_strategy")
                choices = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
                made = model.model.get_image_features(torch.from_numpy(square_cases.pixels_of(case)), **choices)
        found[f"{case}_embeddings"] = torch.cat(list(made.pooler_output)).numpy()
        for index, deep in enumerate(getattr(made, "deepstack_features", None) or ()):
            found[f"{case}_deepstack_{index}"] = (torch.cat(list(deep)) if isinstance(deep, tuple) else deep).numpy()
        found[f"{case}_shapes"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        print(case, len(shapes), found[f"{case}_embeddings"].shape)
    np.savez_compressed(FOLDER / "adapters.npz", **found)


def make_case(case: str) -> None:
    model, shapes = made_model(CASES[case])
    with torch.no_grad():
        grids = torch.tensor([[1, *grid] for grid in GRIDS])
        pixels = torch.from_numpy(np.concatenate([patches_of(case, index) for index in range(len(GRIDS))]))
        made = model.model.get_image_features(pixels, grids)
        kinds = torch.tensor([[int(token == IMAGE) for token in PROMPT]])
        ids = torch.tensor([PROMPT])
        positions, deltas = positions_of(model, ids, kinds, grids)
        found = {
            "embeddings": torch.cat(list(made.pooler_output)).numpy(),
            "positions": positions[:, 0].numpy().astype(np.int32),
            "delta": deltas.numpy().ravel(),
        }
        for index, deep in enumerate(getattr(made, "deepstack_features", None) or ()):
            found[f"deepstack_{index}"] = (torch.cat(list(deep)) if isinstance(deep, tuple) else deep).numpy()
        logits = []
        for _ in range(NUM_NEW):
            count = ids.shape[1] - len(PROMPT)
            tail = (torch.arange(len(PROMPT), ids.shape[1]) + deltas.item()).expand(3, 1, -1)
            extended = torch.cat([positions, tail], dim=2).long()
            kinds_now = torch.cat([kinds, torch.zeros(1, count, dtype=kinds.dtype)], dim=1)
            out = model(
                input_ids=ids, pixel_values=pixels, image_grid_thw=grids, position_ids=extended,
                mm_token_type_ids=kinds_now,
            )  # fmt: skip
            logits = out.logits[0].numpy()
            chosen = int(logits[-1].argmax())
            ids = torch.cat([ids, torch.tensor([[chosen]])], dim=1)
        found["logits"] = logits
        found["greedy"] = ids[0, len(PROMPT) :].numpy().astype(np.int32)
    check_stored(model, shapes, inputs_first=case not in HYBRIDS)
    write(case, shapes, found)


def make_gemma4(case: str) -> None:
    config = gemma4_cases.CASES[case]
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    made._attn_implementation = "eager"
    model: Any = transformers.AutoModelForImageTextToText.from_config(made).eval()
    shapes = {}
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            shapes[name] = tuple(tensor.shape)
            tensor.copy_(torch.from_numpy(golden_tensor(name, shapes[name], SEED)))
        patches = their_patches(config["vision_config"], gemma4_cases.pictures_of(case))
        made_rows = model.model.get_image_features(*map(torch.from_numpy, patches)).pooler_output
        embeddings = torch.cat(list(made_rows)).numpy()
        ids = gemma4_cases.prompt_of(case)[0]

        def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
            given = picture_arguments(model, ids, patches)
            logits: np.ndarray[Any, Any] = model(input_ids=torch.tensor([ids]), **given).logits[0].float().numpy()
            return logits

        greedy: list[int] = []
        for _ in range(NUM_NEW):
            logits = logits_of(model, [*ids, *greedy])
            greedy.append(int(logits[-1].argmax()))
        errors = []
        for seed in gemma4_cases.SEEDS:
            both = []
            for dtype in (torch.bfloat16, torch.float32):
                other: Any = transformers.AutoModelForImageTextToText.from_config(made, dtype=dtype).eval()
                for name, tensor in named_tensors(other):
                    weights = rounded_to_bfloat16(golden_tensor(name, tuple(tensor.shape), seed))
                    tensor.copy_(torch.from_numpy(weights))
                both.append(logits_of(other, [*ids, *greedy[:-1]]))
            errors.append(relative_error(*both))
    found = {
        "embeddings": embeddings, "logits": logits, "greedy": np.array(greedy, np.int32),
        "bfloat16_errors": np.array(errors),  # of transformers' own, beside float32 arithmetic over the same weights
    }  # fmt: skip
    write(case, shapes, found)


def check_stored(model: Any, shapes: dict[str, tuple[int, ...]], *, inputs_first: bool) -> None:
    """Checks that transformers makes this model of the tests' checkpoint."""
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(
            stored_tensors(shapes, inputs_first=inputs_first),
            Path(folder) / "model.safetensors",
            metadata={"format": "pt"},
        )
        loaded = type(model).from_pretrained(folder)
    parameters = dict(loaded.named_parameters())
    assert all(torch.equal(parameters[name], each) for name, each in model.named_parameters())


def positions_of(model: Any, ids: Any, kinds: Any, grids: Any) -> tuple[Any, Any]:
    """transformers' `get_rope_index`. It treats a run of picture tokens as one picture: of two adjacent ones, the
    second is given as a video of one frame, which has the same axis rule."""
    kinds = kinds.clone()
    first = int(torch.nonzero(kinds[0])[0])
    count = GRIDS[0][0] * GRIDS[0][1] // 4
    second = slice(first + count, first + count + GRIDS[1][0] * GRIDS[1][1] // 4)
    kinds[0, second] = 2
    positions, deltas = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=grids[[0, 2, 3]], video_grid_thw=grids[[1]]
    )
    return positions, deltas


def make_other_case(module: ModuleType, case: str) -> None:
    model, shapes = made_model(module.CASES[case])
    with torch.no_grad():
        sizes = {}
        if module is pixtral_cases:
            batch, each = module.batch_of(case)
            pixels, sizes = torch.from_numpy(batch), {"image_sizes": torch.tensor(each)}
        else:
            pixels = torch.from_numpy(module.pixels_of(case))
        names = ("vision_feature_layer", "vision_feature_select_strategy")
        choices = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
        made = model.model.get_image_features(pixels, **choices, **sizes)
        ids = module.prompt_of(case)[0]
        found: dict[str, Any] = {}
        logits = logits_of(model, ids, pixels, **sizes)
        if case in square_cases.GEMMA3:
            found["greedy"] = []
            for _ in range(NUM_NEW):
                found["greedy"].append(int(logits[-1].argmax()))
                logits = logits_of(model, [*ids, *found["greedy"]], pixels)
            ids, logits = [*ids, *found["greedy"][:-1]], logits[:-1]
        rough = logits_of(model.bfloat16(), ids, pixels.bfloat16(), **sizes)
    put = torch.cat if module is pixtral_cases else torch.stack
    found |= {
        "bfloat16_mean_error": np.float64(mean_relative_error(rough, logits)), "logits": logits,
        "embeddings": put(list(made.pooler_output)).numpy(),
        "bfloat16_error": np.float64(relative_error(rough, logits)),
    }  # fmt: skip
    write(case, shapes, found)


def logits_of(model: Any, ids: list[int], pixels: Any, **more: Any) -> np.ndarray[Any, Any]:
    """Logits of all positions; Gemma gets a mask of pictures, so that their tokens see each other."""
    if model.config.model_type == "gemma3":
        more["token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in ids]])
    made = model(input_ids=torch.tensor([ids]), pixel_values=pixels, **more)
    logits: np.ndarray[Any, Any] = made.logits[0].float().numpy()
    return logits


if __name__ == "__main__":
    main()
