"""The other side of `fuzz_models.py`: transformers makes models and runs them, one JSON line each.

A script for a Python with torch and transformers (the extra `reference`); of this project it imports only the golden
weights. A request names a configuration class, its fields, the weights' seed and type, prompts, texts, and a folder.
The folder then holds the model loaded in its type and saved again, with experts' maps separate or fused, a tokenizer
saved after use with truncation and padding, and `oracle.npz`: for each prompt its greedy continuation (`greedy_0` …)
and the logits of both (`logits_0` …, `[tokens, vocabulary]`, float32 arithmetic over the rounded weights). The answer
has the error of the model in its own type, or, in float32, against products in float64 (`noise`, relative to the
largest logit), names and shapes of the weights, and the ids of the texts; or the reason why transformers refuses the
configuration. In float32 it has `condition`, too: how far the logits of float64 move if each weight moves by about
half a unit of float32's last place, which no implementation can know. If the model generates nothing, `oracle.npz` has
each prompt's result instead (`output_0` …): hidden states, labels' scores, or the last token's logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.models.golden_weights import golden_tensor, named_tensors, stored_tensors
from tests.models.vision.gemma4_pixels import drawn_pictures, their_patches

Pictures = tuple[np.ndarray, np.ndarray]  # pixels of patches, and where those are
_TRIES = 4  # of moved weights


def make(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the folder of one request."""
    folder = Path(request["folder"])
    dtype = getattr(torch, request["dtype"])
    try:
        config = getattr(transformers, request["config_class"])(**request["fields"])
        model_class = getattr(transformers, request["architecture"])
        model = model_class._from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AssertionError, StrictDataclassError) as error:
        return {"refused": " ".join(f"{request['config_class']}: {error}".split())[:200]}
    with torch.no_grad():
        tensors = [
            stored
            for name, parameter in named_tensors(model)
            for stored in stored_tensors(name, parameter, config.model_type)
        ]
        for name, place in tensors:
            place.copy_(torch.from_numpy(golden_tensor(name, tuple(place.shape), request["weights"])))
    shapes = {name: list(place.shape) for name, place in tensors}
    with tempfile.TemporaryDirectory() as first:
        model.to(dtype).save_pretrained(first)
        again = model_class.from_pretrained(first, dtype=dtype)
        again.save_pretrained(folder, save_original_format=not request.get("fuses_experts", False))

    def loaded(wanted: torch.dtype) -> Any:  # from the folder, as users load it
        return model_class.from_pretrained(
            folder, dtype=wanted, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    arrays: dict[str, Any] = {}
    noise = 0.0
    try:
        reference = loaded(torch.float32)
        own = loaded(torch.float64 if dtype is torch.float32 else dtype)
        for index, prompt in enumerate(request["prompts"]):
            if "types" in request:
                output, other = (_output(model, prompt, request["types"][index]) for model in (reference, own))
                arrays[f"output_{index}"] = output
                noise = max(noise, float(np.abs(other - output).max() / np.abs(output).max()))
                continue
            pictures = _pictures(request) if "pictures" in request and index == 0 else None
            greedy, logits = _continued(reference, prompt, request["num_new"], pictures=pictures)
            arrays[f"greedy_{index}"], arrays[f"logits_{index}"] = np.array(greedy), logits
            difference = np.abs(_continued(own, prompt, request["num_new"], greedy, pictures)[1] - logits).max()
            noise = max(noise, float(difference / np.abs(logits).max()))
    except ValueError as error:  # a configuration that fails only when the model runs
        return {"refused": f"{request['config_class']}: {error}"[:200]}
    condition = 0.0
    if dtype is torch.float32 and "types" not in request:
        whole = [[*prompt, *arrays[f"greedy_{index}"]] for index, prompt in enumerate(request["prompts"])]
        condition = _condition(own, whole, _pictures(request) if "pictures" in request else None)
    np.savez(folder / "oracle.npz", allow_pickle=False, **arrays)
    texts = request.get("texts", [])
    token_ids = _tokenized(texts, folder) if texts else []
    return {"noise": noise, "condition": condition, "shapes": shapes, "token_ids": token_ids}


def _tokenized(texts: list[str], folder: Path) -> list[list[int]]:
    """The ids of texts by a tokenizer made for them, which is saved in the folder after some use."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    tokenizer(texts, truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(folder)
    # Not AutoTokenizer, which uses a model type's own steps instead of the file's (Qwen2's digits).
    again = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return [again(text)["input_ids"] for text in texts]


def _continued(
    model: Any, prompt: list[int], num_new: int, forced: list[int] | None = None, pictures: Pictures | None = None
) -> tuple[list[int], np.ndarray]:
    """The greedy continuation (or the `forced` one), and the logits of the prompt and of each token but the last: each
    computed from its whole prefix without a cache, since a longrope's factors depend on the length."""
    ids, rows = list(prompt), _logits(model, prompt, pictures=pictures)
    for at in range(num_new):
        if at:
            rows = np.concatenate((rows, _logits(model, ids, pictures=pictures)[-1:]))
        ids.append(int(rows[-1].argmax()) if forced is None else forced[at])
    return ids[len(prompt) :], rows


def _condition(model: Any, texts: list[list[int]], first: Pictures | None) -> float:
    """How far the logits of a model of float64 move, relative to the largest, if each weight moves by 2**-24 of itself
    in one direction or the other: the most of some tries. The model is not the same afterwards. The `first` text has
    pictures, or None."""
    pictures = [first] + [None] * (len(texts) - 1)
    exact = [_logits(model, *each, dtype=torch.float64) for each in zip(texts, pictures, strict=True)]
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for _ in range(_TRIES):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) - 1
                parameter.copy_(weights[name] * (1 + 2.0**-24 * signs))
        for ids, own, expected in zip(texts, pictures, exact, strict=True):
            moved = np.abs(_logits(model, ids, own, torch.float64) - expected).max() / np.abs(expected).max()
            largest = max(largest, float(moved))
    return largest


def _output(model: Any, ids: list[int], types: list[int] | None) -> np.ndarray:
    """The labels' scores of a classifier, or of each token, the logits of a generator's last token, else the hidden
    states."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        result = model(input_ids=torch.tensor([ids]), **given)
    if hasattr(result, "start_logits"):
        return torch.stack([result.start_logits[0], result.end_logits[0]], dim=-1).float().numpy()
    rows = (result.last_hidden_state if hasattr(result, "last_hidden_state") else result.logits)[0].float().numpy()
    return rows[-1] if type(model).__name__.endswith("ForCausalLM") else rows


def _pictures(request: dict[str, Any]) -> Pictures:
    vision = request["fields"]["vision_config"]
    return their_patches(vision, drawn_pictures(vision, request["pictures"]["grids"], request["weights"]))


def picture_arguments(model: Any, ids: list[int], pictures: Pictures) -> dict[str, Any]:
    """Arguments of a Gemma 4 beside the ids. The masks are those of its `generate`: 12B's `forward` makes others."""
    kinds = {"mm_token_type_ids": torch.tensor([[int(token == model.config.image_token_id) for token in ids]])}
    words, count = model.get_input_embeddings()(torch.tensor([ids])), len(ids)
    masks = model.create_masks_for_generate(
        config=model.config, inputs_embeds=words, attention_mask=torch.ones(1, count), cache=None,
        position_ids=torch.arange(count)[None], **kinds,
    )  # fmt: skip
    pixels, places = map(torch.from_numpy, pictures)
    return {**kinds, "attention_mask": masks, "pixel_values": pixels, "image_position_ids": places}


def _logits(model: Any, ids: list[int], pictures: Pictures | None = None, dtype: Any = torch.float32) -> np.ndarray:
    with torch.inference_mode():
        given = {} if pictures is None else picture_arguments(model, ids, pictures)
        logits = model(torch.tensor([ids]), use_cache=False, **given).logits[0].to(dtype).numpy()
    assert logits.shape[0] == len(ids)
    return logits


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        del request["op"]
        print(json.dumps(make(request)), flush=True)


if __name__ == "__main__":
    main()
