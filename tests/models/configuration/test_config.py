"""config.json and generation_config.json: both spellings, transformers' defaults, and refusal by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from models.configuration.generation_config import load_end_ids, load_generation_config
from models.configuration.harmless_fields import HARMLESS, NEUTRAL
from models.configuration.json_fields import Fields, read_json_object
from models.configuration.rope_config import RopeConfig
from models.decoder import DecoderConfig
from models.encoder import DecoderBothWays, has_bidirectional
from models.errors import ConfigError
from models.families import architecture_named, known_architectures
from models.quantized.gptq import AwqScheme
from models.quantized.scheme import read_quantization
from models.registry import load_config, parse_config
from runtime.dtype import bfloat16, float16, float32
from tests.models.encoder_cases import CASES as ENCODERS
from tests.models.folders import CASES, GOLDENS
from tests.models.published_configs import PUBLISHED
from tokenizer.warn import warn_once

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
}


def variant(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`base` with fields replaced; `...` removes one."""
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def like(kind: str, **changes: Any) -> dict[str, Any]:
    names = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return variant(LLAMA, **{"architectures": [names[kind]], "model_type": kind, "num_key_value_heads": 4, **changes})


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_a_config_mean_the_same(case: str) -> None:
    newer = read_json_object(GOLDENS / case / "config.json")
    older = read_json_object(GOLDENS / case / "config_older.json")
    assert "torch_dtype" in older
    assert "dtype" not in older
    is_new = case.startswith(("ministral3", "mistral4", "gemma4"))  # which no older version knew
    assert ("rope_parameters" in older) == is_new
    assert parse_config(older) == parse_config(newer)


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    config = parse_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert config.layer_ropes[0] == RopeConfig(10000.0, 16)
    assert not config.tie_word_embeddings
    assert config.dtype is None
    assert config.eos_token_ids == ()
    assert config.layer_windows == (None, None, None)

    config = parse_config(GPT2)
    assert (config.intermediate_size, config.norm_eps, config.activation) == (192, 1e-5, "tanh")
    assert config.tie_word_embeddings
    assert config.attention_scales == (12**-0.5, 12**-0.5)

    assert parse_config(like("mistral")).layer_windows == (4096,) * 3
    assert parse_config(like("mistral", sliding_window=None)).layer_windows == (None,) * 3
    assert parse_config(like("qwen2")).attention_bias
    assert parse_config(like("qwen2", sliding_window=9)).layer_windows == (None,) * 3
    assert parse_config(like("qwen3")).head_dim == 128
    assert parse_config(like("qwen3")).qk_norm


def test_architecture_comes_from_model_type_where_no_architecture_is_named() -> None:
    assert parse_config(variant(LLAMA, architectures=...)).architecture == "LlamaForCausalLM"
    assert parse_config(variant(LLAMA, model_type=...)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gelu", "erf"),
        ("gelu_new", "tanh"),
        ("gelu_pytorch_tanh", "tanh"),
        ("gelu_fast", "tanh"),
        ("quick_gelu", "sigmoid"),
    ],
)
def test_the_three_gelus(name: str, kind: str) -> None:
    assert parse_config(variant(GPT2, activation_function=name)).activation == kind


def test_sliding_windows_by_layer() -> None:
    values = like("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert parse_config(values).layer_windows == (None, 8, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_config({**values, "layer_types": kinds}).layer_windows == (8, None, 8)
    assert parse_config(like("qwen3", use_sliding_window=True, max_window_layers=0)).layer_windows == (4096,) * 3


def test_attention_scales_of_gpt2() -> None:
    by_layer = parse_config(variant(GPT2, scale_attn_by_inverse_layer_idx=True))
    assert by_layer.attention_scales == (12**-0.5, 12**-0.5 / 2)
    assert parse_config(variant(GPT2, scale_attn_weights=False)).attention_scales == (1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, bfloat16),
        ({"torch_dtype": "float16"}, float16),
        ({"torch_dtype": "torch.float32"}, float32),
        ({"dtype": "auto"}, None),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, bfloat16),
        ({"torch_dtype": "float"}, float32),
        ({"torch_dtype": "half"}, float16),
        ({"dtype": "float64"}, float32),
        ({"dtype": "uint8"}, None),  # of a quantised file: those of the tensors count
    ],
)
def test_dtype_in_either_spelling(fields: dict[str, Any], dtype: Any) -> None:
    assert parse_config({**LLAMA, **fields}).dtype is dtype


def test_token_ids_may_be_one_or_several() -> None:
    config = parse_config({**LLAMA, "eos_token_id": [5, 6, 5], "bos_token_id": 1, "pad_token_id": -1})
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((5, 6), 1, None)


def test_rope_spellings() -> None:
    assert parse_config({**LLAMA, "rope_theta": 5e5}).layer_ropes[0] == RopeConfig(5e5, 16)
    linear = RopeConfig(10000.0, 16, "linear", 4.0)
    assert parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4}}).layer_ropes[0] == linear
    assert parse_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}).layer_ropes[0] == linear
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    expected = RopeConfig(5e5, 16, "llama3", 8.0, 1.0, 4.0, 128)
    assert parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": llama3}).layer_ropes[0] == expected
    assert parse_config({**LLAMA, "rope_parameters": {**llama3, "rope_theta": 5e5}}).layer_ropes[0] == expected


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # as Qwen's README says
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "yarn", "factor": 2.0}, 512),
        ({"type": "linear", "factor": 4.0}, 1024),  # as vicuna-7b-v1.5-16k has it
        ({"rope_type": "default"}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
)
def test_a_stretched_context_is_as_long_as_vllm_makes_it(rope: dict[str, Any], length: int) -> None:
    assert parse_config({**LLAMA, "rope_scaling": rope}).max_position_embeddings == length


def test_a_stretch_of_some_layers_is_none() -> None:
    rope = {"factor": 8.0, "rope_type": "linear"}
    gemma = {**PUBLISHED["gemma-3-1b"], "rope_scaling": rope, "num_hidden_layers": 6}
    assert parse_config(gemma).max_position_embeddings == gemma["max_position_embeddings"]


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    # missing, of another type, out of range
    (variant(LLAMA, hidden_size=None), "hidden_size is missing"),
    (variant(GPT2, n_layer=None), "n_layer is missing"),
    (variant(GPT2, n_embd=48.0), "n_embd must be an integer, not 48.0"),
    (variant(LLAMA, hidden_size="64"), "hidden_size must be an integer, not '64'"),
    (variant(LLAMA, hidden_size=True), "hidden_size must be an integer, not True"),
    (variant(LLAMA, num_hidden_layers=0), "num_hidden_layers must be from 1 to 16384, not 0"),
    (variant(LLAMA, vocab_size=10**9), "vocab_size must be from 1 to 16777216, not 1000000000"),
    (variant(LLAMA, vocab_size=10**100), "vocab_size must be .* not one of 333 bits"),
    (variant(LLAMA, rms_norm_eps=math.nan), "rms_norm_eps must be finite, at least 0, at most 1, not nan"),
    (variant(LLAMA, rms_norm_eps=-1e-5), "rms_norm_eps must be finite, at least 0, at most 1, not -1e-05"),
    (variant(LLAMA, rms_norm_eps=10**400), "rms_norm_eps must be finite"),
    (variant(LLAMA, tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, not 'yes'"),
    (variant(LLAMA, hidden_act=3), "hidden_act must be a string, not 3"),
    (variant(LLAMA, eos_token_id="</s>"), "eos_token_id must be a token id"),
    (variant(LLAMA, eos_token_id=[1, 2.5]), "eos_token_id must be a token id"),
    # numbers that do not go together
    (variant(LLAMA, num_attention_heads=5), "num_attention_heads = 5 must divide hidden_size = 64"),
    (variant(LLAMA, num_key_value_heads=3), "num_key_value_heads = 3 must divide num_attention_heads = 4"),
    (variant(LLAMA, head_dim=15), "head_dim must be even for rotary positions, not 15"),
    (variant(GPT2, n_head=5), "n_head = 5 must divide n_embd = 48"),
    (variant(GPT2, hidden_size=64), "n_embd is 48, but hidden_size is 64"),
    # architectures
    (
        variant(LLAMA, architectures=["BloomForCausalLM"], model_type="bloom"),
        "BloomForCausalLM.*not supported",
    ),
    (
        variant(LLAMA, architectures=["LlamaForMultipleChoice"]),
        "LlamaForMultipleChoice.*not supp",
    ),
    (variant(LLAMA, architectures=..., model_type="gemma3n"), "model_type 'gemma3n' is not supported"),
    (variant(LLAMA, architectures=..., model_type=...), "architectures is missing, and model_type too"),
    (variant(LLAMA, architectures="LlamaForCausalLM"), "architectures must be a list of names"),
    (variant(LLAMA, model_type="qwen2"), "model_type 'qwen2' contradicts the architecture LlamaForCausalLM"),
    # features that are not there
    (
        variant(LLAMA, quantization_config={"quant_method": "aqlm"}),
        "quantization_config: quant_method 'aqlm' is not supported; supported are .*gptq, .*awq,",
    ),
    (variant(LLAMA, hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported are silu, swish"),
    (variant(GPT2, activation_function="relu"), "activation_function 'relu' is not supported"),
    (variant(GPT2, add_cross_attention=True), "add_cross_attention = True is not supported"),
    (variant(LLAMA, final_logit_softcapping=30.0), "final_logit_softcapping = 30.0 is not supported"),
    (variant(LLAMA, attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0 is not supported"),
    (variant(LLAMA, num_local_experts=8), "num_local_experts = 8 is not supported"),
    (variant(LLAMA, num_experts=64), "num_experts = 64 is not supported"),
    (variant(LLAMA, sliding_window=4096), "sliding_window = 4096 is not supported for LlamaForCausalLM"),
    (
        variant(LLAMA, layer_types=["sliding_attention"] * 3),
        r"layer_types \[0\] = 'sliding_attention', but the",
    ),
    (variant(LLAMA, residual_multiplier=0.22), "residual_multiplier = 0.22 is not supported"),
    (like("mistral", attention_bias=True), "attention_bias = True is not supported for MistralForCausalLM"),
    (like("mistral", sliding_window=0), "sliding_window must be from 1 to .*, not 0"),
    (like("qwen2", attention_bias=False), "attention_bias = False is not supported for Qwen2ForCausalLM"),
    (like("qwen3", layer_types=["full_attention"]), "layer_types must be a list of 3 names"),
    (
        like("qwen3", layer_types=["linear_attention"] * 3),
        r"layer_types \[0\] = 'linear_attention' is not supported",
    ),
    (
        like("qwen3", layer_types=["sliding_attention"] * 3),
        r"layer_types \[0\] .* sliding window of that layer is None",
    ),
    # fields that no family reads
    *(
        (variant(LLAMA, **{name: value}), f"{name} = {value!r} is not supported for LlamaForCausalLM")
        for name, value in (
            ("use_parallel_residual", True),
            ("logit_softcapping", 30.0),
            ("rope_local_base_freq", 10000.0),
            ("attn_output_gate", True),
            ("norm_after", True),
            ("sliding_window_pattern", 6),
            ("use_bidirectional_attention", True),
            ("a_field_of_tomorrow", 2),
            ("a_feature_of_tomorrow", True),
            ("attention_scale", 1.0),
            ("embedding_multiplier", 0.0),
            ("normalise_hidden", False),
            ("use_rotary", False),
        )
    ),
    (variant(GPT2, rope_theta=1e4), "rope_theta = 10000.0 is not supported for GPT2LMHeadModel"),
    (variant(LLAMA, rope_parameters={"llama_4_scaling_beta": 0.1}), "rope_parameters: llama_4_scaling_beta = 0.1"),
    # rotary positions
    (
        variant(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling={"type": "su"}),
        "rope_scaling: rope_type is 'su', but rope_parameters says 'default'",
    ),
    (
        variant(LLAMA, rope_scaling={"rope_type": "default", "type": "mrope"}),
        "rope_scaling: rope_type is 'default', but type says 'mrope'",
    ),
    (
        variant(LLAMA, rope_parameters={"rope_type": "linear", "factor": 2.0}, rope_scaling={"type": "linear"}),
        "rope_parameters has factor, but rope_scaling has not",
    ),
    (
        variant(
            LLAMA,
            rope_parameters={"rope_type": "linear", "factor": 2.0},
            rope_scaling={"type": "linear", "factor": 4},
        ),
        "rope_scaling: factor is 4, but rope_parameters says 2.0",
    ),
    (
        variant(LLAMA, rope_scaling={"type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}),
        "beta_fast 1 must not be less than beta_slow, 2",
    ),
    (
        variant(LLAMA, rope_scaling={"rope_type": "ntk", "factor": 2.0}),
        "rope_type 'ntk' is not supported",
    ),
    (
        variant(LLAMA, rope_parameters={"rope_type": "longrope"}),
        "rope_parameters: short_factor is missing",
    ),
    (variant(LLAMA, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported"),
    (
        variant(LLAMA, rope_parameters={"partial_rotary_factor": 0.25}),
        "rope_parameters: partial_rotary_factor = 0.25 is not supported",
    ),
    (variant(LLAMA, rope_scaling={"type": "linear"}), "factor is missing"),
    (
        variant(LLAMA, rope_scaling={"type": "linear", "factor": 0.5}),
        "factor must be finite, at least 1, at most 1e.12, not 0.5",
    ),
    (
        variant(LLAMA, rope_scaling={**LLAMA3_ROPE, "attention_factor": 2.0}),
        "attention_factor = 2.0 is not supported",
    ),
    (
        variant(LLAMA, rope_scaling={**LLAMA3_ROPE, "high_freq_factor": 1.0}),
        "high_freq_factor 1 must be greater",
    ),
    (variant(LLAMA, rope_theta=0.0), "rope_theta must be finite, at least 1e-06, at most 1e.12, not 0.0"),
    (
        variant(LLAMA, rope_theta=1e6, rope_parameters={"rope_theta": 1e4}),
        "rope_theta is 1e.06, but rope_parameters",
    ),
    (
        variant(LLAMA, rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "rope_parameters: full_attention = .* is not supported",
    ),
    (variant(LLAMA, rope_scaling=[1]), r"rope_scaling must be an object, not \[1\]"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_wrong_or_not_supported_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^some/config.json: .*" + message):
        parse_config(values, "some/config.json")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gpt2_unscaled", "is_causal = False is not supported for GPT2LMHeadModel"),
        ("gemma4_keys_odd", "is_causal = False is not supported for Gemma4ForCausalLM"),
        ("lfm2_odd", "is_causal = false is not implemented for a model with short_conv layers"),
        ("qwen3_5_odd", "is_causal = false is not implemented for a model with delta_rule layers"),
        ("deepseek_v2_odd", "is_causal = false is not implemented for a model with latent layers"),
        ("mistral_window", "is_causal = false beside windows is not implemented"),
    ],
)
def test_a_decoder_that_cannot_see_later_tokens_is_refused(case: str, message: str) -> None:
    fields = read_json_object(GOLDENS / case / "config.json")
    with pytest.raises(ConfigError, match=message):
        parse_config({**fields, "is_causal": False})


def test_every_decoder_whose_layers_run_one_by_one_has_a_form_in_both_directions() -> None:
    names = [name for name, each in known_architectures().items() if has_bidirectional(each)]
    assert {"GemmaForCausalLM", "GPTNeoXForCausalLM", "Qwen2ForCausalLM"} <= set(names)
    for name in names:
        assert issubclass(architecture_named(f"Bidirectional{name}").model_class, DecoderBothWays)


def test_is_causal_false_says_nothing_new_of_an_encoder() -> None:
    fields = ENCODERS["bert"]
    assert parse_config({**fields, "is_causal": False}) == parse_config(fields)


SAVED = json.loads((Path(__file__).parent / "saved_configs.json").read_text())


@pytest.mark.parametrize("name", SAVED)
def test_every_field_that_a_version_of_transformers_knows_is_read_or_harmless(name: str) -> None:
    """`Config().to_dict()` of that version, every field in it: files hold only those that differ from a default."""
    config = parse_config(SAVED[name])
    assert config.num_layers == SAVED[name].get("num_hidden_layers", SAVED[name].get("n_layer"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fields_of_published_models_load(name: str) -> None:
    """Those from before transformers had a class of theirs spell it otherwise."""
    named = {"PhiMoEForCausalLM": "PhimoeForCausalLM", "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}
    name_in_file = PUBLISHED[name]["architectures"][0]
    assert parse_config(PUBLISHED[name]).architecture == named.get(name_in_file, name_in_file)


def test_the_sliding_layers_of_olmo3_have_a_base_of_their_own() -> None:
    """An entry that is missing takes the family's base (transformers 5); older files have one base for all layers."""
    older = {name: value for name, value in PUBLISHED["Olmo-3-7B"].items() if not name.startswith("rope")}
    for rope, bases in (
        ({"rope_theta": 1e4}, (1e4, 1e4)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": None}}, (5e5, 1e4)),
    ):
        config = parse_config({**older, **rope})
        assert isinstance(config, DecoderConfig)
        sliding, full = config.layer_ropes[0], config.layer_ropes[3]
        assert sliding is not None
        assert full is not None
        assert (sliding.theta, full.theta) == bases


def test_attention_over_one_chunk_is_the_usual_one(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    qwen = PUBLISHED["Qwen2.5-7B-Instruct-1M"]
    assert parse_config(qwen).max_position_embeddings == 4096  # by vLLM's rule positions differ from there on
    assert "dual_chunk_attention_config: sequences have at most 4096 tokens" in caplog.text
    plain = parse_config({**qwen, "dual_chunk_attention_config": None})
    assert plain.max_position_embeddings == qwen["max_position_embeddings"]


def test_the_pattern_of_command_models_as_transformers_saves_it() -> None:
    command = {**PUBLISHED["c4ai-command-r7b-12-2024"], "num_hidden_layers": 4, "layer_switch": None}
    command["_sliding_window_pattern"] = command.pop("sliding_window_pattern") // 2
    assert parse_config(command).layer_windows == (4096, None, 4096, None)


def test_the_base_of_ministral3_that_its_rope_object_leaves_out() -> None:
    values = read_json_object(GOLDENS / "ministral3_positions" / "config.json")
    del values["rope_parameters"]["rope_theta"]
    config = parse_config(values)
    assert isinstance(config, DecoderConfig)
    assert config.layer_ropes[0] is not None
    assert config.layer_ropes[0].theta == 1e4  # as transformers 5.23 has it, whose 1e6 is of a missing object


def test_harmless_fields_load_and_a_feature_that_is_switched_off() -> None:
    plain = parse_config(LLAMA)
    assert parse_config({**LLAMA, **dict.fromkeys(HARMLESS - {"architectures", "model_type"}, 0.5)}) == plain
    for name, values in NEUTRAL.items():
        for value in values:
            assert parse_config({**LLAMA, name: value}) == plain
    assert parse_config({**LLAMA, "logit_softcapping": None, "a_field_of_tomorrow": None}) == plain
    assert parse_config({**LLAMA, "trl_version": "0.12", "pad_token": "<pad>"}) == plain


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON .*line 1"),
        (b"", "not JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"vocab_size": 1' + b"0" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        load_config(tmp_path)


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: the file is missing"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: there is no such folder"):
        load_config(tmp_path / "nowhere")


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def test_generation_config(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [3, 4],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "x": 1,
    }
    write(tmp_path, {**LLAMA, "eos_token_id": 9, "pad_token_id": 7}, generation)
    config = load_generation_config(tmp_path)
    assert config.eos_token_ids == (3, 4)
    assert config.pad_token_id == 7
    assert config.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_what_transformers_alone_generates_by_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": [], "top_h": 0.0}
    write(tmp_path, LLAMA, neutral | {"cache_implementation": "hybrid", "chat_format": "chatml"})
    load_generation_config(tmp_path)
    assert not caplog.records
    write(tmp_path, LLAMA, {"num_beams": 4, "bad_words_ids": [[3]], "stop_strings": ["</x>"]})
    load_generation_config(tmp_path)
    assert "by num_beams = 4, bad_words_ids = [[3]], stop_strings = ['</x>'], too" in caplog.text


def test_without_generation_config_the_ids_are_the_models(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": 9, "bos_token_id": 1})
    config = load_generation_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.sampling) == ((9,), 1, {})


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"temperature": -0.5}, "temperature must be finite, at least 0, at most 10000, not -0.5"),
        ({"temperature": "0.7"}, "temperature must be a number, not '0.7'"),
        ({"top_p": 1.5}, "top_p must be finite, greater than 0, at most 1, not 1.5"),
        ({"top_p": 0, "do_sample": True}, "top_p must be finite, greater than 0, at most 1, not 0"),
        ({"repetition_penalty": 1e5}, "repetition_penalty must be finite"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": -7}, "top_k must be from -1 to 2147483647, not -7"),
        ({"do_sample": "yes"}, "do_sample must be true or false, not 'yes'"),
        ({"eos_token_id": {}}, "eos_token_id must be a token id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be a token id"),
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1"),
    ],
)
def test_a_value_that_makes_no_sense_is_a_warning(
    tmp_path: Path, generation: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": 9}, {**generation, "min_p": 0.25, "top_h": None})
    config = load_generation_config(tmp_path)
    assert (config.sampling, config.max_new_tokens) == ({"min_p": 0.25}, None)
    assert f"{tmp_path / 'generation_config.json'}: {message}" in caplog.text


def test_values_that_mean_something_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, LLAMA, {"temperature": 0, "do_sample": True, "top_k": 40.0})
    assert load_generation_config(tmp_path).sampling == {"temperature": 0.0, "top_k": 40}
    assert "temperature is 0 beside do_sample true: the most probable token is always taken" in caplog.text
    write(tmp_path, LLAMA, {"top_k": -1, "temperature": None})
    assert load_generation_config(tmp_path).sampling == {"top_k": -1}
    (tmp_path / "generation_config.json").write_text("{,}")
    assert load_generation_config(tmp_path).sampling == {}
    assert "generation_config.json: not JSON" in caplog.text


def with_tokenizer(folder: Path, *special: str, **config: Any) -> None:
    """A tokenizer of ten letters, then these special tokens."""
    added = [{"id": 10 + i, "content": token, "special": True} for i, token in enumerate(special)]
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate("abcdefghij")}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_what_ends_an_answer_is_what_any_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_tokenizer(tmp_path, "<x>", "<|im_end|>", "<y>", "<|endoftext|>", "<z>", eos_token="<y>")
    write(tmp_path, {**LLAMA, "eos_token_id": 14, "text_config": {"eos_token_id": [10]}}, {"eos_token_id": [13]})
    assert load_end_ids(tmp_path) == (13, 14, 10, 12, 11)
    assert load_generation_config(tmp_path).eos_token_ids == (13,)
    write(tmp_path, {**LLAMA, "eos_token_id": 2}, {"eos_token_id": 13})  # LlamaConfig's default, which is "c" here
    assert load_end_ids(tmp_path) == (13, 12, 11)
    assert "config.json: eos_token_id [2] is ordinary text by the tokenizer and ends no answer" in caplog.text
    (tmp_path / "generation_config.json").unlink()
    assert load_end_ids(tmp_path) == (2, 12, 11, 13)
    (tmp_path / "tokenizer.json").write_text("{")
    assert load_end_ids(tmp_path) == (2,)
    assert "answers end at the ids of the configs alone" in caplog.text


def test_harmonys_end_of_a_message_ends_no_answer(tmp_path: Path) -> None:
    with_tokenizer(tmp_path, "<|end|>", "<|return|>", "<|call|>", eos_token="<|return|>")
    write(tmp_path, LLAMA)
    assert load_end_ids(tmp_path) == (11, 12)
    with_tokenizer(tmp_path, "<|end|>", "<|assistant|>", "<|endoftext|>", eos_token="<|endoftext|>")  # as Phi-3's
    assert load_end_ids(tmp_path) == (12, 10)


def test_a_name_that_cannot_be_printed_stays_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"config.json: a\\nb = 1 is not supported"):
        Fields({"a\nb": 1}, "config.json").refuse_unread(lambda name, value: False)


@pytest.mark.parametrize("name", ["LLaMAForCausalLM", "PeftModelForCausalLM", "FSDPLlamaForCausalLM"])
def test_an_unknown_name_of_a_known_type(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers goes by `model_type`; a name with another head is still refused."""
    assert parse_config({**LLAMA, "architectures": [name]}).architecture == "LlamaForCausalLM"
    assert f"architectures '{name}' is read as LlamaForCausalLM, by model_type 'llama'" in caplog.text
    for other in ("LlamaForMultipleChoice", "LlamaForCausalLMEagle3", "LlamaForRewardModel"):
        with pytest.raises(ConfigError, match=f"architectures '{other}' is not supported"):
            parse_config({**LLAMA, "architectures": [other]})


def test_what_gemma_3_and_trainers_say_twice() -> None:
    gemma = {**PUBLISHED["gemma-3-1b"], "bf16": True, "fp16": False}
    kinds = parse_config(gemma).layer_windows
    assert parse_config({**gemma, "_sliding_window_pattern": 6}).layer_windows == kinds


def test_what_tools_name_otherwise_or_leave_behind() -> None:
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    scheme = read_quantization(Fields({"quantization_config": awq}, "config.json"))
    assert isinstance(scheme, AwqScheme)
    assert scheme.group_size == 64
    with pytest.raises(ConfigError, match=r"16 bits all the same, .* '\{\"quantization_config\": null\}'"):
        parse_config({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
