"""Encoders, classifiers and sentence-transformers' layouts against transformers and sentence-transformers
(`tools/references/make_encoder_goldens.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ConfigError, ModelLoadError
from models.registry import load_model
from runtime.backends import cpu
from runtime.device.device import CPU, Device
from runtime.engine.errors import RequestError
from runtime.engine.limits import EngineLimits
from runtime.engine.steps import encoder_passes
from runtime.engine.steps.embedder import Embedding
from runtime.engine.steps.encoder_passes import EncoderPasses
from runtime.engine.steps.pooling_pass import PagedSidePass
from runtime.engine.steps.recorder import open_recorder
from runtime.errors import InvalidArgumentError
from runtime.llm import LLM
from runtime.pooling import POOLINGS
from tests.models.driver import relative_error
from tests.models.encoder_cases import (
    CASES,
    HEADS,
    IDS,
    LAYOUTS,
    LENGTHS,
    OF_TOKENS,
    QUERY,
    SECOND_FROM,
    TEXTS,
    expected,
    long_ids,
    long_rows,
    long_types,
    shapes_of,
    tensors_of,
    write_encoder,
    write_layout,
)
from tests.models.folders import write_safetensors
from tests.models.gguf.encoder_twins import write_logit_score, write_twin

Array = np.ndarray[Any, Any]
Pass = Callable[..., Array]
LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=256, block_size=16, num_blocks=16, max_waiting=4
)
TYPES = (np.arange(len(IDS)) >= SECOND_FROM).astype(np.int32)


def passes_of(model: Any, recorded: EncoderPasses | None = None, limits: EngineLimits = LIMITS) -> Pass:
    def run(ids: list[list[int]], types: list[Array | None] | None = None) -> Array:
        side = PagedSidePass(model, limits, [len(each) for each in ids], lambda: None, passes=recorded)
        rows = [np.array(each, np.int32) for each in ids]
        hidden = side.run(rows, [0] * len(ids), None, types or [None] * len(ids))
        return np.array(hidden.to("cpu").array)

    return run


def made_of(model: Any, hidden: Array) -> Array:
    """Hidden states, or the labels' scores of a model with a classifier, or those of each token."""
    if model.config.labels_tokens:
        return np.array(model.head("token_classify", hidden))
    if not model.config.labels:
        return hidden
    pooling = getattr(model.config, "pooling", "last")
    row = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(axis=0)}[pooling]
    return np.array(model.head("classify", row))


@pytest.mark.parametrize("case", [*CASES, *OF_TOKENS])
def test_transformers_results(tmp_path: Path, case: str) -> None:
    model = load_model(write_encoder(tmp_path, case))
    run = passes_of(model)
    hidden = run([IDS])
    assert relative_error(made_of(model, hidden), expected(case)) <= 1e-5
    if (CASES | OF_TOKENS)[case]["model_type"] == "bert":
        pair = run([IDS], [TYPES])
        assert relative_error(made_of(model, pair), expected(f"{case} pair")) <= 1e-5
    beside = run([IDS[:5], IDS, IDS[:1]], [None, None, None])  # the same bits in any batch
    np.testing.assert_array_equal(beside[5:21], hidden)


@pytest.mark.parametrize("case", ["bert", "modernbert"])
def test_bfloat16(tmp_path: Path, case: str) -> None:
    """Close to float32, where products and attention round to bfloat16; the same bits in any batch."""
    folder = write_encoder(tmp_path, case)
    run = passes_of(load_model(folder, dtype="bfloat16"))
    hidden = run([IDS])
    assert relative_error(hidden, passes_of(load_model(folder))([IDS])) <= 0.02
    np.testing.assert_array_equal(run([IDS[:5], IDS, IDS[:1]])[5:21], hidden)


LONG_LIMITS = EngineLimits(
    max_model_len=512, max_num_seqs=16, max_num_batched_tokens=4096, block_size=16, num_blocks=16, max_waiting=4
)


def check_lengths(model: Any, case: str, lengths: Sequence[int], *, is_exact: bool) -> None:
    """Texts of these lengths against transformers, alone, and all together: as near, or with the same bits."""
    run = passes_of(model, limits=LONG_LIMITS)
    for suffix in ("", " pair") if CASES[case]["model_type"] == "bert" else ("",):
        types = [long_types(length) if suffix else None for length in lengths]
        alone = [run([long_ids(length)], [each]) for length, each in zip(lengths, types, strict=True)]
        starts = np.cumsum([0, *lengths])
        together = run([long_ids(length) for length in lengths], types)
        for length, start, hidden in zip(lengths, starts, alone, strict=False):
            theirs = expected(f"{case} {length}{suffix}")
            assert relative_error(long_rows(hidden), theirs) <= 1e-5, f"{length}{suffix}"
            beside = together[start : start + length]
            if is_exact:
                np.testing.assert_array_equal(beside, hidden)
            assert relative_error(long_rows(beside), theirs) <= 1e-5, f"{length}{suffix}, in a batch"


@pytest.mark.parametrize("case", CASES)
def test_texts_of_1_to_512_tokens(tmp_path: Path, case: str) -> None:
    check_lengths(load_model(write_encoder(tmp_path, case, is_long=True)), case, LENGTHS, is_exact=True)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not CASES[case]["architectures"][0].startswith(("Llama", "Qwen"))]
)
def test_replays_have_the_bits_of_the_passes_that_they_replace(tmp_path: Path, case: str) -> None:
    model = load_model(write_encoder(tmp_path, case))
    recorded = EncoderPasses(model, LIMITS, open_recorder(CPU))
    run, replay = passes_of(model), passes_of(model, recorded)
    other, second = IDS[::-1], TYPES if CASES[case]["model_type"] == "bert" else None
    for ids, types in (
        ([IDS], [second]), ([other], [None]), ([IDS[:5], other, IDS[:1]], [None, second, None]),
        ([other[:9], IDS[:9], IDS[:4]], [None] * 3), ([IDS] * 4, [None] * 4),
    ):  # fmt: skip
        np.testing.assert_array_equal(replay(ids, types), run(ids, types))
    assert recorded.num_recorded == 3, "texts of as many tokens in all share one"
    with pytest.raises(InvalidArgumentError, match="token"):
        replay([[10**6, *IDS[1:]]])
    np.testing.assert_array_equal(replay([IDS], [second]), run([IDS], [second]))


def test_an_interrupt_between_a_recording_s_arrays_leaves_no_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(write_encoder(tmp_path, "bert"))
    run, replay = passes_of(model), passes_of(model, EncoderPasses(model, LIMITS, open_recorder(CPU)))
    first, second = [IDS[:9], IDS[:2]], [IDS[:2], IDS[:9]]
    np.testing.assert_array_equal(replay(first), run(first))

    def write(target: Array, given: Array) -> None:
        target[...] = given
        if len(given) == len(second) + 1:  # where texts begin
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encoder_passes, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            replay(second)
    np.testing.assert_array_equal(replay(first), run(first))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_recorded_pooling_has_the_bits_of_the_host_s(tmp_path: Path, pooling: str) -> None:
    model = load_model(write_encoder(tmp_path, "bert"))
    recorded, run = EncoderPasses(model, LIMITS, open_recorder(CPU)), passes_of(model)
    for texts in ([IDS], [IDS[:1]], [IDS[:5], IDS, IDS[:1]], [IDS[:9], IDS[::-1], IDS[:7]], [IDS]):
        ids = [np.array(each, np.int32) for each in texts]
        side = PagedSidePass(model, LIMITS, [len(each) for each in ids], lambda: None, passes=recorded)
        found = side.run(ids, [0] * len(ids), None, [None] * len(ids), pooling).array
        for row, each in zip(found, texts, strict=True):
            one = Embedding(np.array(each, np.int32), pooling)
            one.absorb(run([each]), len(each))
            np.testing.assert_array_equal(row, one.pooled)


def test_long_passes_are_not_recorded(tmp_path: Path) -> None:
    recorded = EncoderPasses(load_model(write_encoder(tmp_path, "bert")), LIMITS, open_recorder(CPU))
    assert recorded.takes([64] * 4)
    assert not recorded.takes([64, 64, 64, 65])
    assert not recorded.takes([1] * 5), "more texts than a step has sequences"


def test_pages_that_no_layer_writes_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "bert", {**CASES["bert"], "num_attention_heads": 3})
    model = load_model(write_encoder(tmp_path, "bert"))
    recorded, texts = EncoderPasses(model, LIMITS, open_recorder(CPU)), [IDS, IDS[:5], IDS[::-1]]
    without = passes_of(model)(texts)
    np.testing.assert_array_equal(passes_of(model, recorded)(texts), without)
    assert recorded.pages.num_blocks == 1
    monkeypatch.setattr(cpu, "takes_texts", lambda *_: False)
    assert EncoderPasses(model, LIMITS, open_recorder(CPU)).pages.num_blocks > 1
    assert relative_error(passes_of(model)(texts), without) <= 1e-5


def test_nomic_bert_as_it_is_published(tmp_path: Path) -> None:
    """GPT-2's names in the config, one map for queries, keys and values, and the first release's names of tensors."""
    ours = passes_of(load_model(write_encoder(tmp_path / "new", "nomic_bert")))([IDS])
    tensors = tensors_of(shapes_of()["nomic_bert"])
    older: dict[str, Array] = {}
    for name, array in tensors.items():
        for new, old in (
            ("embeddings.LayerNorm", "emb_ln"), ("layers.", "encoder.layers."), ("self_attn.o_proj", "attn.out_proj"),
            ("up_proj", "fc11"), ("gate_proj", "fc12"), ("mlp.down_proj", "mlp.fc2"),
            ("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2"),
        ):  # fmt: skip
            name = name.replace(new, old)
        if ".self_attn.q_proj" in name:
            parts = [tensors[f"layers.{name.split('.')[2]}.self_attn.{part}_proj.weight"] for part in "qkv"]
            older[name.replace("self_attn.q_proj", "attn.Wqkv")] = np.concatenate(parts)
        elif ".self_attn." not in name:
            older[name] = array
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 300, "n_embd": 48, "n_head": 4,
        "n_inner": 80, "n_layer": 2, "n_positions": 64, "activation_function": "swiglu", "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "layer_norm_epsilon": 1e-12, "prenorm": False, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "type_vocab_size": 2, "max_trained_positions": 64,
    }  # fmt: skip
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", older)
    np.testing.assert_array_equal(passes_of(load_model(folder))([IDS]), ours)


_HEADS_OF_PRETRAINING = {
    "BertForMaskedLM": ("bert", ["cls.predictions.bias", "cls.predictions.transform.dense.weight"]),
    "BertForPreTraining": ("bert", ["bert.pooler.dense.weight", "cls.predictions.bias", "cls.seq_relationship.weight"]),
    "ElectraForMaskedLM": ("electra", ["generator_lm_head.bias", "generator_predictions.dense.weight"]),
    "ElectraForPreTraining": ("electra", ["discriminator_predictions.dense_prediction.weight"]),
}
"""Architectures, and tensors of theirs by transformers 5.24's names."""


@pytest.mark.parametrize("architecture", _HEADS_OF_PRETRAINING)
def test_heads_of_pretraining_are_not_read(tmp_path: Path, architecture: str) -> None:
    case, heads = _HEADS_OF_PRETRAINING[architecture]
    folder = write_encoder(tmp_path, case)
    (folder / "config.json").write_text(json.dumps({**CASES[case], "architectures": [architecture]}))
    tensors = {f"{case}.{name}": array for name, array in tensors_of(shapes_of()[case]).items()}
    write_safetensors(folder / "model.safetensors", tensors | {name: np.ones((3, 3), np.float32) for name in heads})
    assert relative_error(passes_of(load_model(folder))([IDS]), expected(case)) <= 1e-5


def test_gemma_3_sees_both_ways_only_if_its_config_says_so(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "embedding_gemma")
    assert load_model(folder).config.architecture == "Gemma3TextModel"
    config = {**CASES["embedding_gemma"], "use_bidirectional_attention": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).config.architecture == "Gemma3ForCausalLM"


@pytest.mark.emulator
def test_mpnet_is_refused_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="MPNet runs on the cpu alone: emulated:sm_80 has no attention with"):
        load_model(write_encoder(tmp_path, "mpnet"), device=Device.parse("emulated:sm_80"))


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("mpnet")])
def test_on_an_emulated_gpu(tmp_path: Path, case: str, arch: str) -> None:
    model = load_model(write_encoder(tmp_path, case), device=Device.parse(f"emulated:{arch}"))
    run = passes_of(model)
    assert relative_error(made_of(model, run([IDS])), expected(case)) <= 1e-5
    if CASES[case]["model_type"] == "bert":
        assert relative_error(made_of(model, run([IDS[:3], IDS], [None, TYPES])[3:]), expected(f"{case} pair")) <= 1e-5


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("mpnet")])
def test_long_texts_on_an_emulated_gpu(tmp_path: Path, case: str) -> None:
    device = Device.parse("emulated:sm_90a")
    check_lengths(
        load_model(write_encoder(tmp_path, case, is_long=True), device=device), case, (1, 65, 129, 512), is_exact=False
    )


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def build(folder: Path, **options: Any) -> LLM:
        made.append(LLM(folder, use_tqdm_on_load=False, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_sentence_transformers(tmp_path: Path, opened: Callable[..., LLM], name: str) -> None:
    llm = opened(write_layout(tmp_path, name))
    for prompt_name, suffix in ((None, ""), ("document", " document")):
        found = llm.embed(TEXTS, prompt_name=prompt_name, use_tqdm=False)
        theirs = expected(f"layout {name}{suffix}")
        assert relative_error(np.array([each.outputs.embedding for each in found]), theirs) <= 1e-5
        alone = llm.embed(TEXTS[2], prompt_name=prompt_name, use_tqdm=False)[0]
        assert alone.outputs.embedding == found[2].outputs.embedding
    cut = llm.embed(TEXTS[0], dimensions=7, use_tqdm=False)[0].outputs.embedding
    first = np.array(llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding[:7])
    np.testing.assert_allclose(cut, first / np.linalg.norm(first), rtol=1e-5)
    assert llm.client.info.max_model_len == 40
    with pytest.raises(RequestError, match="no prompt 'title'; it has 'query', 'document'"):
        llm.embed("a", prompt_name="title", use_tqdm=False)
    with pytest.raises(RequestError, match="dimensions must be an integer from 1 to"):
        llm.embed("a", dimensions=1000, use_tqdm=False)


@pytest.mark.parametrize("case", ["bert_pairs", "xlm_roberta_pairs"])
def test_scores_of_pairs(tmp_path: Path, opened: Callable[..., LLM], case: str) -> None:
    llm = opened(write_encoder(tmp_path, case))
    found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert relative_error(np.array(found), expected(f"scores {case}")) <= 1e-5
    (alone,) = llm.score(QUERY, TEXTS[1], use_tqdm=False)
    assert alone.outputs.score == found[1]
    raw = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_activation=False, use_tqdm=False)]
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(raw))), found, rtol=1e-5)
    with pytest.raises(RequestError, match="data_1 must have one text, or as many as data_2: they have 2 and 3"):
        llm.score(["a", "b"], ["c"] * 3)
    with pytest.raises(RequestError, match="generates no text: ask for embeddings or scores"):
        llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize(
    ("said", "suffix"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, " without types"),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, " without types"),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, ""),
    ],
)
def test_types_of_pairs_are_those_of_the_tokenizer(
    tmp_path: Path, opened: Callable[..., LLM], said: dict[str, Any], suffix: str
) -> None:
    folder = write_encoder(tmp_path, "bert_pairs")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    found = [each.outputs.score for each in opened(folder).score(QUERY, TEXTS, use_tqdm=False)]
    assert relative_error(np.array(found), expected(f"scores bert_pairs{suffix}")) <= 1e-5


def test_scores_of_a_generator_whose_chat_template_knows_a_pair(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    llm = opened(write_logit_score(tmp_path / "model"))
    found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert relative_error(np.array(found), expected("scores logit_score")) <= 1e-5
    whole, cut = (
        llm.score(QUERY, "the fox " * 50, truncate_prompt_tokens=most, use_tqdm=False)[0].prompt_token_ids
        for most in (None, 90)
    )
    assert len(cut) <= 90 < len(whole)
    assert cut[-9:] == whole[-9:]  # the template's end stays


def test_a_generator_ranks_by_two_tokens_if_its_config_names_them(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    """Qwen3-Reranker is found by its name; another folder says `classifier_from_token`."""
    named = opened(write_twin(tmp_path / "Qwen3-Reranker-0.6B", "qwen3_reranker"))
    folder = write_twin(tmp_path / "other", "qwen3_reranker")
    with pytest.raises(RequestError, match="Qwen3ForCausalLM cannot rank: it has no classifier"):
        opened(folder).score(QUERY, TEXTS)
    for more in ({}, {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}):
        told = opened(folder, hf_overrides={"classifier_from_token": ["no", "yes"], **more})
        ours, theirs = (llm.score(QUERY, TEXTS, use_tqdm=False) for llm in (told, named))
        assert [each.outputs.score for each in ours] == [each.outputs.score for each in theirs]
    reversed_ = opened(folder, hf_overrides={"classifier_from_token": ["yes", "no"]})
    (score,) = reversed_.score(QUERY, TEXTS[0], use_tqdm=False)
    assert score.outputs.score == pytest.approx(1 - theirs[0].outputs.score, rel=1e-5)
    with pytest.raises(ConfigError, match="classifier_from_token: 'nothere' is 4 tokens, must be one"):
        opened(folder, hf_overrides={"classifier_from_token": ["no", "nothere"]})


def test_labels(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    llm = opened(write_encoder(tmp_path, "roberta_labels"))
    assert llm.client.info.pooling.labels == ("label 0", "label 1", "label 2")
    raw = llm.classify({"prompt_token_ids": IDS}, use_activation=False, use_tqdm=False)[0].outputs
    assert relative_error(np.array(raw.probs), expected("roberta_labels")) <= 1e-5
    assert raw.num_classes == 3
    probs = llm.encode({"prompt_token_ids": IDS}, pooling_task="classify", use_tqdm=False)[0].outputs.data
    theirs = np.exp(expected("roberta_labels"))
    np.testing.assert_allclose(probs, theirs / theirs.sum(), rtol=1e-4)
    with pytest.raises(
        RequestError, match=r"cannot rank: its classifier has 3 labels, .*cross-encoders .* and Qwen3-Reranker$"
    ):
        llm.score("a", "b")


def test_labels_of_tokens(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    prompt = {"prompt_token_ids": IDS}
    for name, case in (("encoder", "bert_tokens"), ("decoder", "llama_tokens")):
        llm, theirs = opened(write_encoder(tmp_path / name, case)), np.exp(expected(case))
        (found,) = llm.encode(prompt, pooling_task="token_classify", use_tqdm=False)
        np.testing.assert_allclose(found.outputs.data, theirs / theirs.sum(axis=1, keepdims=True), rtol=1e-4)
        (rows,) = llm.encode(prompt, pooling_task="token_embed", use_tqdm=False)
        np.testing.assert_allclose(np.linalg.norm(rows.outputs.data, axis=1), np.ones(len(IDS)), rtol=1e-5)
        (last,) = llm.embed(prompt, pooling="last", use_tqdm=False)
        np.testing.assert_allclose(rows.outputs.data[-1], last.outputs.embedding, rtol=1e-5)
        with pytest.raises(RequestError, match=r"labels tokens \(task token_classify\), not texts"):
            llm.classify(prompt, use_tqdm=False)
    long = {"prompt_token_ids": IDS * 3}  # in several passes
    whole, cut = (opened(tmp_path / "decoder", **more) for more in ({}, {"max_num_batched_tokens": 16}))
    ours, other = (llm.encode(long, pooling_task="token_classify", use_tqdm=False)[0].outputs for llm in (cut, whole))
    np.testing.assert_array_equal(ours.data, other.data)


def test_spans_of_answers(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    """A pair of texts has the types that its model was trained with."""
    llm = opened(write_encoder(tmp_path, "bert_spans"))
    assert llm.client.info.pooling.token_labels == ("start", "end")
    pairs = [{"prompt": QUERY, "text_pair": text} for text in TEXTS[:2]]
    for number, each in enumerate(llm.encode(pairs, pooling_task="token_classify", use_tqdm=False)):
        assert relative_error(np.array(each.outputs.data), expected(f"spans {number}")) <= 1e-5
    with pytest.raises(RequestError, match="needs two texts"):
        llm.encode({"prompt_token_ids": IDS, "text_pair": "x"}, pooling_task="token_classify", use_tqdm=False)
    with pytest.raises(RequestError, match="pooling_task must be one of embed, classify, token_embed, token_classify"):
        llm.encode("x", pooling_task="score", use_tqdm=False)


def test_a_classifier_of_texts_has_no_labels_of_tokens(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    llm = opened(write_encoder(tmp_path / "encoder", "roberta_labels"))
    with pytest.raises(RequestError, match="its classifier labels texts, not tokens"):
        llm.encode({"prompt_token_ids": IDS}, pooling_task="token_classify", use_tqdm=False)
    decoder = opened(write_encoder(tmp_path / "decoder", "llama_labels"))  # but a decoder's reads any token
    (found,) = decoder.encode({"prompt_token_ids": IDS}, pooling_task="token_classify", use_tqdm=False)
    last = np.exp(expected("llama_labels"))
    np.testing.assert_allclose(found.outputs.data[-1], last / last.sum(), rtol=1e-4)


def test_a_model_without_a_head_neither_classifies_nor_generates(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    llm = opened(write_encoder(tmp_path, "modernbert"))
    with pytest.raises(RequestError, match="has no head for it: it has no classifier"):
        llm.classify("a", use_tqdm=False)
    with pytest.raises(RequestError, match="ModernBertModel generates no text: ask for embeddings"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(RequestError, match="maximum context length is 64 tokens"):
        llm.embed("x " * 100, use_tqdm=False)
    whole = llm.embed("x " * 100, truncate_prompt_tokens=-1, use_tqdm=False)[0]
    assert len(whole.prompt_token_ids) == 64
    assert whole.prompt_token_ids[-1] == 3  # [SEP] stays


@pytest.mark.parametrize("case", ["bert", "bert_pairs"])
def test_two_ranks(tmp_path: Path, opened: Callable[..., LLM], case: str) -> None:
    folder = write_encoder(tmp_path, case)
    whole, split = (opened(folder, tensor_parallel_size=count) for count in (1, 2))
    if case == "bert":
        ours, theirs = ([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)] for llm in (split, whole))
    else:
        ours, theirs = (
            [[each.outputs.score] for each in llm.score(QUERY, TEXTS, use_tqdm=False)] for llm in (split, whole)
        )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [*HEADS, "bert_tokens", "llama_tokens", "gpt2_tokens"])
def test_tensors_of_a_head_are_needed(tmp_path: Path, case: str) -> None:
    folder = write_encoder(tmp_path, case)
    config = {**(CASES | OF_TOKENS)[case], "id2label": {str(number): str(number) for number in range(5)}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"(classifier|score).*\[5, "):
        load_model(folder)


SPOILT: dict[str, tuple[str, Any, str]] = {
    "module": ("modules.json", [{"path": "", "type": "sentence_transformers.models.LSTM"}], "the module LSTM is not"),
    "code": ("modules.json", [{"path": "", "type": "my.own.Module"}], "is not a module of sentence_transformers"),
    "deeper": ("modules.json", [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}],
               "path = '0_Transformer' must be \"\": move that folder's files up"),
    "tokens": ("4_Normalize/config.json", {"module_input_name": "token_embeddings"}, "must be 'sentence_embedding'"),
    "path": ("modules.json", [{"path": "../x", "type": "sentence_transformers.models.Pooling"}], "leads out of the"),
    "modes": ("1_Pooling/config.json", {"pooling_mode": ["cls", "sum"]}, "pooling_mode = 'cls, sum' must be some of"),
    "twice": ("1_Pooling/config.json", {"pooling_mode": ["cls", "cls"]}, "'cls, cls' must be some of .*, each once"),
    "residual": ("2_Dense/config.json",
                 {"in_features": 48, "out_features": 96, "bias": False, "use_residual": True,
                  "activation_function": "torch.nn.modules.linear.Identity"}, r"residual\.weight \[96, 48\]"),
    "prompt": ("1_Pooling/config.json", {"pooling_mode": "cls", "include_prompt": 0}, "include_prompt = 0 must be"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "'x' is not among prompts"),
    "length": ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length = -1 must be"),
    "options": ("sentence_bert_config.json", {"processing_kwargs": ["x"]}, "processing_kwargs and its chat_template"),
    "activation": ("2_Dense/config.json", {"activation_function": "os.system"}, "activation_function = 'os.system'"),
    "shape": ("2_Dense/config.json",
              {"in_features": 48, "out_features": 95, "bias": False,
               "activation_function": "torch.nn.modules.linear.Identity"},
              r"linear\.weight \[95, 48\]"),
    "json": ("modules.json", None, "cannot be read as JSON"),
    "list": ("config_sentence_transformers.json", [1], "transformers.json: must be a JSON object, not .1"),
    "text": ("sentence_bert_config.json", "x", "sentence_bert_config.json: must be a JSON object, not 'x'"),
    "number": ("4_Normalize/config.json", 7, "4_Normalize/config.json: must be a JSON object, not 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_layout_is_refused_by_name(tmp_path: Path, opened: Callable[..., LLM], name: str) -> None:
    folder, (file, content, message) = write_layout(tmp_path, "dense"), SPOILT[name]
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("{" if content is None else json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"speculation": "ngram"}, "speculation"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"engine_roles": "auto", "data_parallel_size": 2}, "engine_roles"),
    ],
)
def test_options_that_an_encoder_cannot_keep(
    tmp_path: Path, opened: Callable[..., LLM], options: dict[str, Any], param: str
) -> None:
    with pytest.raises((RequestError, InvalidArgumentError)) as raised:
        opened(write_encoder(tmp_path, "bert"), **options)
    assert raised.value.param == param
    assert "enable_prefix_caching" not in str(raised.value), "which is not what is wrong"


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({}, "sigmoid"),
    ],
)
def test_activations_of_scores(
    tmp_path: Path, opened: Callable[..., LLM], given: dict[str, Any], activation: str
) -> None:
    folder = write_encoder(tmp_path, "bert_pairs")
    (folder / "config.json").write_text(json.dumps({**CASES["bert_pairs"], **given}))
    assert opened(folder).client.info.pooling.activation == activation
