"""Random configurations of models that generate nothing: encoders, and decoders with a classifier."""

from __future__ import annotations

import random
from collections.abc import Callable

from runtime.pooling import POOLINGS
from tools.comparing.fuzzing.draw import Draw, Fields

LONGEST = 512
_GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")


def _sizes(draw: Draw) -> Fields:
    """Fields of every encoder. Positions reach the longest prompt."""
    head_dim, heads = draw.head_dim(), draw.integer(1, 7)
    while head_dim * heads > 300 and heads > 1:
        heads = draw.integer(1, heads - 1)
    return {
        "vocab_size": draw.integer(30, 420),
        "hidden_size": head_dim * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": draw.integer(1, 2 if draw.is_emulated else 4),
        "intermediate_size": draw.choice((1, draw.integer(2, 8), *(draw.integer(17, 260) for _ in range(6)))),
        "max_position_embeddings": draw.integer(LONGEST, LONGEST + 60),
        "tie_word_embeddings": draw.flip(),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _labels(draw: Draw) -> Fields:
    return {
        "id2label": {str(number): f"label {number}" for number in range(draw.choice((1, 1, 2, draw.integer(3, 9))))}
    }


def _bert(draw: Draw) -> Fields:
    return {
        **_sizes(draw), "hidden_act": draw.choice((*_GELUS, "silu")), "type_vocab_size": draw.choice((1, 2, 2, 3)),
        "layer_norm_eps": draw.choice((1e-12, 1e-5, 1e-3)), "pad_token_id": 0,
    }  # fmt: skip


def _roberta(draw: Draw) -> Fields:
    """Positions begin after the padding's id, which no prompt has."""
    fields, pad = _bert(draw), draw.choice((0, 1, 1, 5))
    positions = fields["max_position_embeddings"] + pad + 1
    return {**fields, "pad_token_id": pad, "max_position_embeddings": positions, "type_vocab_size": draw.integer(1, 2)}


def _modernbert(draw: Draw) -> Fields:
    fields, entries = _sizes(draw), {name: draw.rope(is_entry=True) for name in ("full", "sliding")}
    fields |= {
        "hidden_activation": draw.choice((*_GELUS, "silu")), "norm_eps": draw.choice((1e-5, 1e-3)),
        "local_attention": draw.choice((2, 3, 8, 17, 64, 128, 700)), "pad_token_id": 0, "cls_token_id": None,
        "sep_token_id": None, "rope_parameters": {f"{name}_attention": entry for name, entry in entries.items()},
        **{name: draw.flip(0.3) for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")},
        "classifier_pooling": draw.choice(("cls", "mean")),
        "classifier_activation": draw.choice((*_GELUS, "silu", "relu")),
    }  # fmt: skip
    if draw.flip():
        return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])}
    return {**fields, "global_attn_every_n_layers": draw.integer(1, 4)}


def _nomic_bert(draw: Draw) -> Fields:
    return {
        **_sizes(draw), "type_vocab_size": draw.choice((1, 2, 3)), "layer_norm_eps": draw.choice((1e-12, 1e-5, 1e-3)),
        "pad_token_id": 0, "rope_parameters": draw.rope(),
    }  # fmt: skip


def _distilbert(draw: Draw) -> Fields:
    fields = _bert(draw)
    names = {
        "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim", "hidden_act": "activation",
    }  # fmt: skip
    kept = {name: value for name, value in fields.items() if name not in ("type_vocab_size", "layer_norm_eps")}
    return {names.get(name, name): value for name, value in kept.items()}


def _electra(draw: Draw) -> Fields:
    fields = _bert(draw)
    return {**fields, "embedding_size": draw.choice((fields["hidden_size"], 16, draw.integer(3, 90)))}


def _mpnet(draw: Draw) -> Fields:
    """Positions begin after the padding's id, which is 1 whatever the config says."""
    kept = {name: value for name, value in _bert(draw).items() if name != "type_vocab_size"}
    return {**kept, "pad_token_id": 1, "max_position_embeddings": kept["max_position_embeddings"] + 2}


def _both_ways(drawn: Callable[[Draw], Fields]) -> Callable[[Draw], Fields]:
    """A decoder whose config makes it see later tokens."""

    def both(draw: Draw) -> Fields:
        fields = reaching(drawn)(draw)
        kept = {name: value for name, value in fields.items() if name not in _WINDOWS}
        if "layer_types" in fields:
            kept["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
        else:
            kept["sliding_window"] = None
        return {**kept, "is_causal": False}

    return both


_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def with_labels(drawn: Callable[[Draw], Fields]) -> Callable[[Draw], Fields]:
    """The same fields with names of labels. Padding has no id: the last token is the last of a row."""
    return lambda draw: {"pad_token_id": None, **drawn(draw), **_labels(draw)}


def reaching(drawn: Callable[[Draw], Fields]) -> Callable[[Draw], Fields]:
    """The same fields with positions for the longest prompt."""

    def longer(draw: Draw) -> Fields:
        fields = drawn(draw)
        name = "n_positions" if "n_positions" in fields else "max_position_embeddings"
        return {**fields, name: fields[name] + LONGEST}

    return longer


def seeing_both_ways(drawn: Callable[[Draw], Fields]) -> Callable[[Draw], Fields]:
    """EmbeddingGemma's: Gemma 3 whose tokens see later ones, half of a window on each side."""

    def both(draw: Draw) -> Fields:
        fields = reaching(drawn)(draw)
        # A norm after an MLP of one column divides one number by its size, and any rounding by as much.
        fields["intermediate_size"] = draw.integer(17, 260)
        window = draw.choice((2, 7, 16, 33, 512))  # transformers writes 1 as 0
        return {
            **fields,
            "use_bidirectional_attention": True,
            "sliding_window": window,
            "final_logit_softcapping": None,
        }

    return both


_Family = tuple[str, str, Callable[[Draw], Fields]]

_KINDS = (
    ("bert", "Bert", _bert), ("roberta", "Roberta", _roberta), ("xlm_roberta", "XLMRoberta", _roberta),
    ("camembert", "Camembert", _roberta), ("distilbert", "DistilBert", _distilbert),
    ("modernbert", "ModernBert", _modernbert), ("nomic_bert", "NomicBert", _nomic_bert),
    ("electra", "Electra", _electra), ("mpnet", "MPNet", _mpnet),
)  # fmt: skip
ENCODERS: dict[str, _Family] = {
    f"{name}{suffix}": (f"{kind}Config", f"{kind}{ending}", with_labels(drawn) if has_labels else drawn)
    for name, kind, drawn in _KINDS
    for suffix, ending, has_labels in (
        ("", "Model", False), ("_labels", "ForSequenceClassification", True),
        ("_tokens", "ForTokenClassification", True), ("_spans", "ForQuestionAnswering", False),
    )
    if (kind, suffix) != ("NomicBert", "_spans")
}  # fmt: skip

_CLASSIFYING = (
    "gpt2", "llama", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3", "gemma2", "ministral3", "glm",
    "glm4", "gpt_oss", "deepseek_v2", "deepseek_v3", "mistral4", "mixtral", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
_BOTH_WAYS = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "ministral3", "glm", "glm4",
    "glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gemma", "cohere", "starcoder2", "gpt_neox", "olmo",
    "seed_oss", "exaone4", "ernie", "ernie_moe", "hunyuan", "apertus", "granite_moe", "granite_moe_shared", "phimoe",
)  # fmt: skip


def pooled_families(generating: dict[str, _Family]) -> dict[str, _Family]:
    """Encoders, and classifiers and embedding models of the decoders, whose fields they have."""
    found = dict(ENCODERS)
    for name in _CLASSIFYING:
        config, model, drawn = generating[name]
        kind = model.replace("ForCausalLM", "").replace("LMHeadModel", "") + "ForSequenceClassification"
        found[f"{name}_labels"] = config, kind, with_labels(reaching(drawn))
    for name, kind in (("llama", "Llama"), ("qwen3", "Qwen3"), ("gpt2", "GPT2"), ("gpt_neox", "GPTNeoX")):
        config, _, drawn = generating[name]
        found[f"{name}_tokens"] = config, f"{kind}ForTokenClassification", with_labels(reaching(drawn))
    for name, kind in (("llama", "Llama"), ("qwen3", "Qwen3"), ("gpt2", "GPT2"), ("mixtral", "Mixtral")):
        config, _, drawn = generating[name]
        found[f"{name}_spans"] = config, f"{kind}ForQuestionAnswering", reaching(drawn)
    config, _, drawn = generating["gemma3"]
    found["gemma3_labels"] = config, "Gemma3TextForSequenceClassification", with_labels(reaching(drawn))
    found["embedding_gemma"] = config, "Gemma3TextModel", seeing_both_ways(drawn)
    for name in _BOTH_WAYS:
        config, model, drawn = generating[name]
        found[f"{name}_both_ways"] = config, model.replace("ForCausalLM", "Model"), _both_ways(drawn)
    for name in ("modernbert_decoder", "qwen3"):
        config, model, drawn = generating[name]
        found[f"{name}_embedding"] = config, model.replace("ForCausalLM", "Model"), reaching(drawn)
    found["qwen3_reranker"] = config, model, reaching(drawn)
    return found


def draw_pooled(case: Fields, rng: random.Random, is_short: bool) -> Fields:
    """The case with prompts of 1 to `LONGEST` tokens, some of them pairs, and two poolings."""
    vocab = case["fields"]["vocab_size"]
    unused = case["fields"].get("pad_token_id")
    ids = [each for each in range(vocab) if each != unused]
    most = 24 if is_short else rng.choice((40, 40, 130, LONGEST))
    lengths = [1, most, *(rng.randint(1, most) for _ in range(1 if is_short else 3))]
    num_types = (
        case["fields"].get("type_vocab_size", 1) if case["family"].startswith(("bert", "nomic", "electra")) else 1
    )
    types = [[rng.randrange(num_types) for _ in range(each)] if num_types > 1 and at % 2 else None
             for at, each in enumerate(lengths)]  # fmt: skip
    prompts = [[rng.choice(ids) for _ in range(length)] for length in lengths]
    tokens = rng.sample(range(vocab), 2)
    return {**case, "prompts": prompts, "types": types, "poolings": rng.sample(POOLINGS, 2), "score_tokens": tokens}
