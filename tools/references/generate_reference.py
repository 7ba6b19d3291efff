"""Makes the goldens of tests/models from Hugging Face transformers; needs the extra `reference` (torch,
transformers).

    python tools/references/generate_reference.py [CASE ...]  # of tests/models/goldens/<case>/, all or the named ones

Each case is a small random model of one family. Its `config.json` declares it: a new case is a folder with a
`config.json` of the fields that differ from its class's defaults. This writes `config.json` as transformers writes it
now, `config_older.json` as written before version 5, `golden.json` (tensor names and shapes, the seed of the weights,
the prompt, greedy continuations) and `logits.npz` (the prompt's logits `[tokens, vocabulary]`, in float32 arithmetic).
A case keeps its seed and its prompt's length. Every model is run twice: with its float32 weights, and with the same
weights rounded to bfloat16.

transformers' own reading of the older spelling must give the same logits, or nothing is written.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.models.golden_weights import (  # noqa: E402
    golden_tensor,
    named_tensors,
    rounded_to_bfloat16,
    stored_tensors,
)

GOLDENS = ROOT / "tests" / "models" / "goldens"
NUM_NEW_TOKENS = 24
NEW_PROMPT_TOKENS = 20
"""The length of a new case's prompt."""
LEAST_ROUTER_MARGIN = 0.03
MOST_NOISE = 1.5e-6
"""The most error of float32 arithmetic, relative to the largest logit, where layers have recurrent states: a norm
divides by a head's result, which may be near 0."""
MOST_ROUNDING = 1.6e-2
"""The same, of products whose inputs are rounded to bfloat16, as some tiles of the cpu do."""
BEAM_MODEL, INTERNLM2 = "llama_default", "internlm2_grouped"
ROPE_POSITIONS = [1, 777, 40_959, 131_071]

# Fields of every config that carry no information for a language model.
_SAYS_NOTHING = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "is_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
)


def older_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """The same config in the format of transformers before version 5."""
    older = dict(fields)
    older["torch_dtype"] = older.pop("dtype", None) or "float32"
    rope = older.pop("rope_parameters", None)
    if rope is not None and "full_attention" in rope:  # older files scaled those layers
        rope, local = rope["full_attention"], rope["sliding_attention"]
        if older["model_type"] == "gemma3_text":
            older["rope_local_base_freq"] = local["rope_theta"]
        elif older["model_type"] == "modernbert-decoder":
            older["global_rope_theta"], older["local_rope_theta"] = rope["rope_theta"], local["rope_theta"]
            rope = None
    if rope is not None and rope["rope_type"] == "yarn" and "llama_4_scaling_beta" in rope:
        older["rope_parameters"] = rope  # never written otherwise
    elif rope is not None:
        rope = dict(rope)
        if "partial_rotary_factor" in rope:
            older["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        older["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if scaling["rope_type"] == "linear" and "rope_local_base_freq" not in older:
            scaling = {"type": "linear", "factor": scaling["factor"]}
        older["rope_scaling"] = scaling if scaling.get("rope_type") != "default" else None
    if older["model_type"] == "gpt_neox":
        older["rotary_pct"], older["rotary_emb_base"] = older.pop("partial_rotary_factor"), older.pop("rope_theta")
    if older["model_type"] == "gemma4_text":  # sizes of the full layers' heads instead of an object for each layer
        (own, *_), older["rope_parameters"] = older.pop("per_layer_config").values(), fields["rope_parameters"]
        for name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            older.pop(name)
        older["global_head_dim"] = own["head_dim"]
        older["num_global_key_value_heads"] = own.get("num_key_value_heads")
    kinds = older.get("layer_types")
    # Full layers first: equivalent to max_window_layers, except for EXAONE 4, which lacks the field.
    has_states = kinds is not None and "linear_attention" in kinds
    if kinds is not None and kinds == sorted(kinds) and older["model_type"] != "exaone4" and not has_states:
        del older["layer_types"]
    older["transformers_version"] = "4.40.0"
    return older


def load(config: Any, seed: int, is_rounded: bool) -> Any:
    """The transformers model of a config with the golden weights of a seed, in float32."""
    model_class = getattr(transformers, config.architectures[0])  # "Auto" classes lack some
    model = model_class._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in named_tensors(model):
            for stored, place in stored_tensors(name, parameter, config.model_type):
                array = golden_tensor(stored, tuple(place.shape), seed)
                place.copy_(torch.from_numpy(rounded_to_bfloat16(array) if is_rounded else array))
    return model.eval()


def run(model: Any, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits `[tokens, vocabulary]` of the prompt, and the greedy continuation."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert np.isfinite(logits).all()
    return logits, output[0, len(prompt) :].tolist()


def random_prompt(config: Any, num_tokens: int, seed: int) -> list[int]:
    raw = np.random.PCG64(seed).random_raw(num_tokens)
    prompt: list[int] = (raw % np.uint64(config.vocab_size)).tolist()
    return prompt


def layers_with_experts(model: Any) -> list[Any]:
    names = ("block_sparse_moe", "mlp", "feed_forward", "mixer")
    parts = [
        layer if hasattr(layer, "experts") else next(part for name in names if (part := getattr(layer, name, None)))
        for layer in model.model.layers
    ]
    return [part for part in parts if hasattr(part, "experts")]


def chosen_experts(config: Any) -> int:
    """How many experts a token goes to; 0 without experts."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0


def choice_margin(config: Any, experts: Any, logits: torch.Tensor) -> float:
    """The margin of a layer's router, `logits [tokens, experts]`: in logits, or in four times sigmoids, of groups of
    experts and of experts within the best groups."""
    if config.model_type == "phimoe":
        return sparsemixer_margin(config, logits)
    if config.model_type == "gemma4_text":  # which gives probabilities, of logits that are divided by this root
        logits = logits.log() * config.hidden_size**0.5
    if config.model_type == "ernie4_5_moe":
        logits = 4 * (logits.softmax(-1) + experts.gate.moe_statics.e_score_correction_bias)
    correction = getattr(getattr(experts, "gate", None), "e_score_correction_bias", None)
    correction = getattr(experts, "expert_bias", correction)
    groups, best_groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    numbers, least, kept = logits, float("inf"), chosen_experts(config)
    if correction is not None:
        numbers = 4 * (logits.sigmoid() + correction)
        by_group = numbers.view(len(logits), groups, -1)
        ranks, best = by_group.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True)
        if groups > best_groups:
            least = float((ranks[:, best_groups - 1] - ranks[:, best_groups]).min())
        chosen = best[:, :best_groups, None].expand(-1, -1, by_group.shape[-1])
        numbers = by_group.gather(1, chosen).flatten(1)
    top = numbers.sort(dim=-1, descending=True).values
    return min(least, float((top[:, kept - 1] - top[:, kept]).min())) if top.shape[-1] > kept else least


def sparsemixer_margin(config: Any, logits: torch.Tensor) -> float:
    """The same for one expert after another, and for the threshold of experts that share each one's softmax."""
    best = logits.sort(dim=-1, descending=True).values
    least = float((best[:, :2] - best[:, 1:3]).min())
    for peak in (best[:, :1], best[:, 1:2]):
        distance = (peak - logits) / logits.abs().clamp(min=peak) - 2 * config.router_jitter_noise
        least = min(least, float(distance.abs().min()))
    return least


def least_router_margin(config: Any, prompt: list[int], seed: int) -> float:
    """The smallest margin between the logits of the last chosen and the first rejected expert, with either kind of
    weights, over the prompt and its continuation: rounding to bfloat16 must not change the choice. Infinite for a model
    without experts."""
    least = float("inf")
    if not chosen_experts(config):
        return least
    for is_rounded in (False, True):
        model, ids = load(config, seed, is_rounded), prompt
        for is_continued in (False, True):
            if is_continued:
                ids = prompt + run(model, prompt)[1]
            with torch.no_grad():
                found = model(torch.tensor([ids]), output_router_logits=True).router_logits
            for layer, logits in zip(layers_with_experts(model), found, strict=True):
                least = min(least, choice_margin(config, layer, logits))
            if least < LEAST_ROUTER_MARGIN:
                return least
    return least


def is_steady(config: Any, seed: int) -> Callable[[list[int]], bool]:
    """Whether a prompt's logits have little noise: by float32 arithmetic, and by inputs of maps that are rounded to
    bfloat16, which do not change the continuation either. Without states any prompt's have."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return lambda prompt: True
    plain, narrow, rounded = (load(config, seed, each) for each in (False, True, True))
    pairs = [(plain, copy.deepcopy(plain).double()), (narrow, copy.deepcopy(narrow).double())]
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (given[0].to(torch.bfloat16).to(torch.float32),))

    def error(model: Any, exact: Any, ids: torch.Tensor) -> float:
        with torch.no_grad():
            logits, expected = model(ids).logits[0], exact(ids).logits[0]
        return float((logits - expected).abs().max() / expected.abs().max())

    def judge(prompt: list[int]) -> bool:
        ids = torch.tensor([prompt])
        if error(rounded, narrow, ids) >= MOST_ROUNDING or any(error(*pair, ids) >= MOST_NOISE for pair in pairs):
            return False
        return bool(run(rounded, prompt)[1] == run(narrow, prompt)[1])

    return judge


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def config_of(name: str) -> Any:
    """transformers' config of a case; Gemma 3's text model is a class of its own."""
    return transformers.AutoConfig.from_pretrained(GOLDENS / name)


def seeds() -> dict[str, tuple[int, int]]:
    """Each case's seed, and its prompt's length, in the order of seeds; new cases come last."""
    found, names = {}, sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
    for name in names:
        if (path := GOLDENS / name / "golden.json").exists():
            golden = read_json(path)
            found[name] = golden["seed"], len(golden["prompt_ids"])
    found = dict(sorted(found.items(), key=lambda item: item[1]))
    last = max(seed for name, (seed, _) in found.items() if name != INTERNLM2)
    return found | {
        name: (last + i, NEW_PROMPT_TOKENS) for i, name in enumerate((n for n in names if n not in found), 1)
    }


def write_golden(
    name: str, seed: int, prompt: list[int], tensors: dict[str, list[int]],
    results: dict[str, tuple[np.ndarray, list[int]]],
) -> None:  # fmt: skip
    """Writes the results by the weights' type: logits and greedy continuations."""
    golden = {
        "seed": seed, "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "prompt_ids": prompt, "greedy_ids": {kind: greedy for kind, (_, greedy) in results.items()}, "tensors": tensors,
    }  # fmt: skip
    (GOLDENS / name / "golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    logits = {kind: rows for kind, (rows, _) in results.items()}
    np.savez(GOLDENS / name / "logits.npz", allow_pickle=False, **logits)
    top = np.sort(logits["float32"], axis=1)
    print(f"{name}: std {logits['float32'].std():.2f}, least top-1 margin {(top[:, -1] - top[:, -2]).min():.1e}")


def make_case(name: str, seed: int, num_prompt_tokens: int) -> None:
    folder, config = GOLDENS / name, config_of(name)
    config.dtype = "float32"
    config.to_json_file(folder / "config.json", use_diff=False)
    fields = {
        key: value
        for key, value in read_json(folder / "config.json").items()
        if key not in _SAYS_NOTHING and not key.startswith("summary_")
    }
    for file, content in (("config.json", fields), ("config_older.json", older_spelling(fields))):
        (folder / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    prompt = random_prompt(config, num_prompt_tokens, seed)
    steady = is_steady(config, seed)
    for attempt in range(1, 3000):
        if steady(prompt) and least_router_margin(config, prompt, seed) > LEAST_ROUTER_MARGIN:
            break
        prompt = random_prompt(config, num_prompt_tokens, seed + 1000 * attempt)
    else:
        raise AssertionError(
            f"{name}: no prompt whose experts are clear, and whose states are well-conditioned, was found"
        )
    found = {}
    spellings = [transformers.AutoConfig.from_pretrained(folder, _configuration_file=file)
                 for file in ("config.json", "config_older.json")]  # fmt: skip
    for weights in ("float32", "bfloat16"):
        results = [run(load(spelling, seed, weights == "bfloat16"), prompt) for spelling in spellings]
        assert np.array_equal(results[0][0], results[1][0]), f"{name}: the two spellings differ in transformers"
        found[weights] = results[0]
    tensors = {
        key: list(place.shape)
        for each, parameter in named_tensors(load(spellings[0], seed, is_rounded=False))
        for key, place in stored_tensors(each, parameter, config.model_type)
    }
    write_golden(name, seed, prompt, tensors, found)


def make_internlm2(seed: int, num_prompt_tokens: int) -> None:
    """InternLM 2, which transformers lacks: Llama's arithmetic with its names, queries, keys and values in one."""
    fields = read_json(GOLDENS / INTERNLM2 / "config.json")
    q_heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    group, head_dim = q_heads // kv_heads + 2, fields["hidden_size"] // q_heads
    rope = {"rope_type": "dynamic", "rope_theta": fields["rope_theta"], "factor": fields["rope_scaling"]["factor"]}
    same = ("bos_token_id", "eos_token_id", "hidden_size", "intermediate_size", "max_position_embeddings",
            "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps",
            "vocab_size")  # fmt: skip
    config = transformers.LlamaConfig(
        **{key: fields[key] for key in same}, attention_bias=fields["bias"], rope_parameters=rope
    )
    parts = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    places = {"q_proj": slice(0, group - 2), "k_proj": slice(group - 2, group - 1), "v_proj": slice(group - 1, group)}
    shapes: dict[str, list[int]] = {}
    found, prompt = {}, random_prompt(config, num_prompt_tokens, seed)
    for weights in ("float32", "bfloat16"):
        model = load(config, seed, weights == "bfloat16")
        with torch.no_grad():
            for theirs, place in model.named_parameters():
                stored, shape, rows = theirs, list(place.shape), slice(None)
                for old, new in parts.items():
                    stored = stored.replace(old, new)
                for projection, some in places.items():
                    if projection in theirs:
                        stored, rows = theirs.replace(f"self_attn.{projection}", "attention.wqkv"), some
                        shape[0] = kv_heads * group * head_dim
                shapes[stored] = shape
                array = golden_tensor(stored, tuple(shape), seed)
                array = rounded_to_bfloat16(array) if weights == "bfloat16" else array
                if "wqkv" in stored:
                    array = array.reshape(kv_heads, group, head_dim, *shape[1:])[:, rows].reshape(tuple(place.shape))
                place.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        found[weights] = run(model, prompt)
    write_golden(INTERNLM2, seed, prompt, shapes, found)


def rope(kind: str, theta: float, **options: float | bool) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **options}


def yarn(original: int, factor: float, theta: float, **options: float | bool) -> dict[str, Any]:
    return rope("yarn", theta, factor=factor, original_max_position_embeddings=original, **options)


def make_rope_references() -> None:
    """Frequencies, and cosines and sines far into the context, of real models' rotary positions."""
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    shapes = {
        "llama2": (128, rope("linear", 10000.0, factor=1.0)),
        "llama31": (128, rope("llama3", 5e5, factor=8.0, **llama3)),
        "llama32": (64, rope("llama3", 5e5, factor=32.0, **llama3)),
        "qwen3": (128, rope("default", 1e6)),
        "linear": (80, rope("linear", 10000.0, factor=3.0)),
        "qwen3_yarn": (128, yarn(32768, 4.0, 1e6)),
        "yarn_options": (64, yarn(4096, 16.0, 1e4, beta_fast=20.0, beta_slow=2.0, truncate=False)),
        "yarn_mscale": (64, yarn(4096, 40.0, 1e4, mscale=1.0, mscale_all_dim=0.707)),
    }
    references = {}
    for name, (head_dim, rope_parameters) in shapes.items():
        config = transformers.LlamaConfig(
            vocab_size=97, num_hidden_layers=2, hidden_size=2 * head_dim, intermediate_size=8, num_attention_heads=2,
            num_key_value_heads=2, head_dim=head_dim, rope_parameters=rope_parameters, max_position_embeddings=1 << 17,
        )  # fmt: skip
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.tensor([ROPE_POSITIONS]))
        references[name] = {
            "head_dim": head_dim,
            "rope_parameters": rope_parameters,
            "positions": ROPE_POSITIONS,
            "frequencies": rotary.inv_freq.tolist(),
            "cos": cos[0, :, : head_dim // 2].tolist(),
            "sin": sin[0, :, : head_dim // 2].tolist(),
        }
    (GOLDENS / "rope.json").write_text(json.dumps(references) + "\n", encoding="utf-8")


def make_beam_searches() -> None:
    """The beams of `BEAM_MODEL`, and their log probabilities, for widths, penalties and ids that end a beam."""
    config, (seed, num_prompt_tokens) = config_of(BEAM_MODEL), seeds()[BEAM_MODEL]
    model = load(config, seed, is_rounded=False)
    random = np.random.default_rng(16)
    searches = []
    for eos_token_ids in ([], [11], [3, 40], [5, 17, 60]):
        for beam_width, length_penalty in ((1, 1.0), (2, 1.0), (3, 0.0), (4, -1.0), (5, 2.0)):
            prompt = random.integers(0, config.vocab_size, num_prompt_tokens).tolist()
            max_tokens = int(random.integers(4, 20))
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=96,
                num_beams=beam_width, num_return_sequences=beam_width, length_penalty=length_penalty,
                eos_token_id=eos_token_ids or None, return_dict_in_generate=True, output_scores=beam_width > 1,
            )  # fmt: skip
            beams = []
            for row in output.sequences.tolist():
                new = row[len(prompt) :]
                ends = [place for place, token_id in enumerate(new) if token_id in eos_token_ids]
                beams.append(new[: ends[0] + 1] if ends else new)
            asked = {"eos_token_ids": eos_token_ids, "beam_width": beam_width, "length_penalty": length_penalty}
            scores = output.sequences_scores.tolist() if beam_width > 1 else None
            searches.append({**asked, "max_tokens": max_tokens, "prompt": prompt, "beams": beams, "scores": scores})
    (GOLDENS / "beam_search.json").write_text(
        json.dumps({"model": BEAM_MODEL, "searches": searches}) + "\n", encoding="utf-8"
    )


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    if not wanted:
        make_rope_references()
    if not wanted or "beam_search" in wanted:
        make_beam_searches()
    for name, (seed, num_prompt_tokens) in seeds().items():
        if wanted and name not in wanted:
            continue
        if name == INTERNLM2:
            make_internlm2(seed, num_prompt_tokens)
        else:
            make_case(name, seed, num_prompt_tokens)


if __name__ == "__main__":
    main()
