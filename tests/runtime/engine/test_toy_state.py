"""The recipe of docs/adding.md for a model with a state, on a toy: whatever becomes of its requests, they get the bits
of lone runs, and prefixes are found."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import models.families
from models.families import known_architectures
from models.registry import load_model
from runtime.commands.info_report import as_text, memory
from runtime.dtype import float32
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import loaded_model
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.inputs import Shape
from runtime.errors import InvalidArgumentError
from runtime.kv.kinds import FULL, State
from runtime.llm.llm import LLM
from runtime.text.turns import turn_start_id
from tests.models.driver import logits_of
from tests.models.folders import write_tiny_qwen3
from tests.runtime.engine.test_window_groups import answers, build, make_requests
from tests.runtime.text.tokenizers import byte_level_content, special, with_special, write
from tools.comparing.compare_speculation import compare

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "architectures": ["ToyStateForCausalLM"], "model_type": "toy_state", "hidden_size": 64, "intermediate_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 97,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


@contextmanager
def known_family(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family in a folder beside this file is one of the known ones."""
    own = str(Path(__file__).with_name(name))
    monkeypatch.setattr(models.families, "__path__", [*models.families.__path__, own])
    known_architectures.cache_clear()
    yield
    known_architectures.cache_clear()


@pytest.fixture(params=[False, True], ids=["states and attention", "states"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The model, whose family is beside this file."""
    with known_family("toy_state", monkeypatch):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"only_states": request.param}))
        yield tmp_path


def test_no_schedule_changes_a_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, in chunks of odd lengths, overlapped, preempted, with states found on the device and the host."""
    requests = make_requests(24)
    expected: Any = None
    for settings in (
        {"num_blocks": 400, "enable_prefix_caching": False, "max_num_seqs": 1},
        {"num_blocks": 600, "decode_graphs": "off"},
        {"num_blocks": 600, "overlap": "on", "max_num_batched_tokens": 13},
        {"few": True, "overlap": "on", "preemption": "swap", "swap_space_bytes": 1 << 22},
        {"few": True, "overlap": "off", "preemption": "recompute"},
    ):
        is_near_full = settings.pop("few", False)
        if is_near_full:  # a pool that has states enough for eight sequences, and pages of tokens for two
            monkeypatch.setattr(State, "most_pages", lambda *_: 8)
            settings["num_blocks"] = 56
        engine = build(folder, **settings)
        expected = expected or answers(engine, requests)
        assert answers(engine, requests) == expected, settings
        engine.check_invariants()
        stats, has_pages = engine.stats(), FULL in engine.limits.cache_kinds
        assert (stats.prefix_cache_hits > 0) == settings.get("enable_prefix_caching", True)
        if "swap_space_bytes" in settings and has_pages:
            assert min(stats.num_swaps, stats.swapped_in_blocks) > 0
        elif is_near_full and has_pages:
            assert stats.num_preemptions > stats.num_swaps == 0
        engine.close()


def test_a_prompt_in_chunks_has_the_logits_of_one_in_one_piece(folder: Path) -> None:
    model, ids = load_model(folder, device="cpu", load_format="dummy"), range(1, 60)
    assert (logits_of(model, ids, [16, 1, 25, 17]) == logits_of(model, ids)).all()


def test_info_tells_states_from_pages_of_tokens(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        info = build(folder, num_blocks=100).info
    report = memory(info)
    states = [group for group in report["cache_groups"] if group["is_state"]]
    assert State() in [group.kind for group in info.cache_groups]
    assert [group["bytes_per_token"] for group in states] == [0]
    heads, width = CONFIG["num_attention_heads"], CONFIG["head_dim"]
    numbers = 1 + 2 * (heads * width + 2 * 8) + heads * 8 * width  # a length, two tokens' inputs, and the state
    assert states[0]["bytes_per_sequence"] == 2 * states[0]["num_layers"] * 4 * numbers
    (pool,) = {group.pool for group in info.cache_groups if group.kind == State()}
    num_groups = sum(group.kind == State() for group in info.cache_groups)
    num_sequences = info.pools[pool].num_blocks // (2 * num_groups)
    assert states[0]["num_sequences"] == num_sequences
    said, _, later = caplog.text.partition(f"the recurrent states of {num_sequences} sequences fit")
    assert later
    assert "allocating" not in said  # before the model is loaded
    text = as_text({"devices": [], "model": {"max_model_len": 160}, "memory": report})
    assert re.search(rf"  states .* layers in .*, whatever the length: {num_sequences:,} sequences at once\n", text)


def test_a_recording_has_both_entries_of_a_state(folder: Path) -> None:
    """Also where all tokens of its sequences fit one page."""
    limits = build(folder, num_blocks=100).limits
    shape = Shape(1, 1, 1, 1, limits.block_size, None)
    sizes = {name: size for name, _, size in shape.arrays(len(limits.cache_kinds), limits)}
    assert sizes["block_tables"] == (len(limits.cache_kinds), 1, 2)


def test_states_have_room_for_draft_tokens_if_a_proposer_is_named(folder: Path) -> None:
    """Without one, requests' own predictions are not tried."""
    engines = [build(folder, num_blocks=100, speculation=name) for name in ("auto", "ngram", f"draft:{folder}")]
    assert [engine.speculator is None for engine in engines] == [True, False, False]
    assert [engine.limits.pending_tokens for engine in engines] == [0, 7, 7]
    plain, *others = (engine.limits.block_bytes[engine.limits.cache_pools[-1]] for engine in engines)
    num_layers = engines[0].info.cache_groups[-1].num_layers
    heads, width = CONFIG["num_attention_heads"], CONFIG["head_dim"]
    assert others == [plain + 7 * num_layers * 4 * (heads * width + 2 * 8 + heads)] * 2  # inputs and dt of each
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("num_requests", [40, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_no_draft_token_changes_a_bit(folder: Path, num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of look-ups, guesses, predictions and the model as its own draft model, in rounds that preempt, swap and find
    prefixes."""
    settings: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": 96, "speculation": "ngram"}
    model = loaded_model(folder, EngineConfig(**settings))
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)  # more states than pages of tokens
    found = compare(model, folder, num_requests, 5, takes_turns=True, round_size=8, **settings)
    assert found.differences == []
    assert found.num_preemptions > 0 or State() in model.kv_cache_spec(8).group_kinds[:1]
    assert {name for name, (tried, kept) in found.tried.items() if 0 < kept <= tried} == {
        "ngram", "suffix", "guesses", "predictions", "draft"
    }  # fmt: skip


def test_states_of_bfloat16_take_half_the_memory_and_give_the_bits_of_lone_runs(folder: Path) -> None:
    half = build(folder, num_blocks=600, state_dtype="bfloat16", max_num_batched_tokens=13)
    alone = build(folder, num_blocks=400, state_dtype="bfloat16", max_num_seqs=1, enable_prefix_caching=False)
    requests = make_requests(6)
    assert answers(half, requests) == answers(alone, requests)
    forms = [
        load_model(folder, load_format="dummy", state_dtype=each).kv_cache_spec(16).of_layer(0).form
        for each in ("float32", "bfloat16")
    ]
    whole, less = (sum(plane.size_bytes for plane in form.planes(16, float32, is_cpu=True)) for form in forms)
    assert whole - less == 2 * CONFIG["num_attention_heads"] * 8 * CONFIG["head_dim"]


def test_a_type_of_states_without_states_is_refused(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=259, eos_token_id=1, max_position_embeddings=256)
    model = load_model(tmp_path, load_format="dummy", state_dtype="bfloat16")
    with pytest.raises(InvalidArgumentError, match="state_dtype is bfloat16, but no layer"):
        model.kv_cache_spec(16)


def test_few_files_know_of_states() -> None:
    """A family with a state is one file, as here; the engine's part is small."""
    words = re.compile(r"follows_tokens|state_ends|turn_states|let_states_go")
    files = [path for path in ROOT.joinpath("runtime").rglob("*.py") if words.search(path.read_text(encoding="utf-8"))]
    assert 1 + len(files) <= 15, files


def test_an_edited_last_message_finds_the_state_before_it(folder: Path) -> None:
    """States are kept where a turn begins, in the middle of pages too. The answers are those without a cache."""
    content = byte_level_content()
    special_id = content["added_tokens"][0]["id"] + 1
    content["added_tokens"].append(special(special_id, "<|im_start|>"))
    write(folder, content)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": special_id + 1}))
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "block_size": 16, "num_blocks": 200}
    first = [
        {"role": "system", "content": "You are brief in all that you say."},
        {"role": "user", "content": "How far is the moon, on most days of the year?"},
    ]
    second = [*first, {"role": "assistant", "content": "Far."}, {"role": "user", "content": "And how far is the sun?"}]
    edited = [*second[:-1], {"role": "user", "content": "What else is far, and what is near?"}]
    params = SamplingParams(max_tokens=4, logprobs=1, temperature=0.0)
    with LLM(folder, **settings) as llm, LLM(folder, enable_prefix_caching=False, **settings) as alone:
        found = [llm.chat(messages, params)[0] for messages in (first, second, edited)]
        for each, messages in zip(found, (first, second, edited), strict=True):
            assert each.outputs[0].logprobs == alone.chat(messages, params)[0].outputs[0].logprobs
        starts = [place for place, each in enumerate(found[2].prompt_token_ids) if each == special_id]
        assert len(starts) == 5
        assert all(place % 16 for place in starts[1:])
        assert [each.num_cached_tokens for each in found] == [0, starts[2], starts[3]]


@pytest.mark.parametrize(
    ("opening", "ending", "is_found"),
    [("<|im_start|>", "<|im_start|>", True), ("<|im_start|>", "Answer: ", True), ("Said: ", "Answer: ", False)],
)
def test_the_token_that_opens_turns_is_special(opening: str, ending: str, is_found: bool) -> None:
    """Also that of a template which a request brings."""
    tokenizer = with_special("<|im_start|>")
    template = (
        f"{{% for m in messages %}}{opening}{{{{ m.role }}}}\n{{{{ m.content }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ending}{{% endif %}}"
    )
    expected = tokenizer.token_to_id("<|im_start|>") if is_found else None
    assert turn_start_id(tokenizer, template) == expected
    tokenizer.chat_templates["default"] = template
    assert turn_start_id(tokenizer) == expected
