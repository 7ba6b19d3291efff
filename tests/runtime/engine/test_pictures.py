"""Requests with pictures: the same tokens as the model alone draws, however steps cut them, and nothing shared that
differs.

What the model draws is held against transformers by `tests/models/vision`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from models.configuration.preprocessing import read_patch_rule
from models.picture_decoder import AxesDecoder
from models.registry import load_model
from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest, ImageItem, PoolingRequest
from runtime.engine.picture_queue import EncodingBudget, PictureQueue
from runtime.engine.sampling_params import SamplingParams
from runtime.images.patches import make_patches, normalised
from runtime.images.positions import token_positions
from runtime.llm import LLM
from tests.models.driver import ModelDriver
from tests.models.vision.cases import IMAGE, load_golden, write_model

PROMPT = [3, 17, IMAGE, 5, 81, 44, IMAGE, IMAGE, 9]
"""Three pictures, two of them side by side."""

NUM_NEW = 8

NUM_BEST = 5


@dataclass(eq=False)
class Sampled:
    """Tokens with the best log probabilities of each step, which tell pictures apart where the tokens are the same."""

    token_ids: list[int]
    logprobs: list[list[float]]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Sampled)
        return self.token_ids == other.token_ids and bool(np.allclose(self.logprobs, other.logprobs, rtol=0, atol=1e-4))


def picture(seed: int, height: int = 40, width: int = 56) -> Any:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


PICTURES = [picture(1), picture(2, 16, 24), picture(3, 64, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")


def write_folder(folder: Path, case: str) -> Path:
    write_model(folder, case, load_golden(case).shapes)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    config = {"patch_size": 4, "size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return model_alone(folder)


def read_by(
    model: Any, rule: Any, prompt: Sequence[int], pictures: Sequence[Any]
) -> tuple[list[int], list[tuple[int, int, int]], tuple[EncodedTokens, ...]]:
    """A prompt's tokens with the pictures' own, where these lie, and what the tower makes of them."""
    ids: list[int] = []
    spans, made, left = [], [], list(pictures)
    for token in prompt:
        if token != IMAGE:
            ids.append(token)
            continue
        patches = make_patches(left.pop(0), rule)
        rows, columns = patches.rows // 2, patches.columns // 2
        spans.append((len(ids), rows, columns))
        made.append(model.tower(normalised(patches.pixels, rule), patches.grid))
        ids += [IMAGE] * (rows * columns)
    return ids, spans, tuple(EncodedTokens(span[0], rows) for span, rows in zip(spans, made))


def model_alone(folder: Path) -> Any:
    """Draws greedily with the model alone: the whole prompt at once, then token by token."""
    model: Any = load_model(folder)
    assert isinstance(model, AxesDecoder)
    rule = read_patch_rule(folder, model.patch_rule)

    def sample(prompt: Sequence[int], pictures: Sequence[Any], num_new: int = NUM_NEW) -> Sampled:
        ids, spans, encoded = read_by(model, rule, prompt, pictures)
        positions, offset = token_positions(len(ids), spans)

        def complete(batch: Batch, start: int) -> None:
            if start == 0:
                batch.rope = model.rotations(positions)
                batch.encoded = encoded
                own = np.arange(batch.num_tokens, dtype=np.int32)
            else:
                own = np.array([start + offset], np.int32)
            (batch.positions,) = ops.place([own], model.device)

        driver = ModelDriver(model, complete=complete)
        return continued(driver, ids, num_new)

    return sample


def continued(driver: ModelDriver, ids: list[int], num_new: int) -> Sampled:
    sampled = Sampled([], [])
    fed = ids
    for _ in range(num_new):
        logits = driver.step({0: fed})[0][-1].astype(np.float64)
        fed = [int(logits.argmax())]
        sampled.token_ids += fed
        best = np.sort(logits)[::-1][:NUM_BEST]
        sampled.logprobs.append((best - best[0] - np.log(np.exp(logits - best[0]).sum())).tolist())
    return sampled


@pytest.fixture(scope="module")
def expected(alone: Any) -> Sampled:
    sampled: Sampled = alone(PROMPT, PICTURES)
    assert sampled != alone(PROMPT, [picture(7), *PICTURES[1:]]), "the pictures make no difference"
    return sampled


def greedy(num_new: int = NUM_NEW, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, logprobs=NUM_BEST, **changes)


def opened(folder: Path, **options: Any) -> LLM:
    defaults = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "compile_ahead": False}
    return LLM(folder, skip_tokenizer_init=True, **{**defaults, **options})


def asked(pictures: Sequence[Any], prompt: Sequence[int] = PROMPT, **changes: Any) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt), "images": list(pictures), **changes}


def sampled(llm: LLM, *prompts: Any, params: SamplingParams | None = None) -> list[Sampled]:
    outputs = llm.generate(list(prompts), params or greedy(), use_tqdm=False)
    return [sampled_of(choice) for output in outputs for choice in output.outputs]


def sampled_of(choice: Any) -> Sampled:
    best = [sorted((each.logprob for each in entry.values()), reverse=True) for entry in choice.logprobs]
    return Sampled(choice.token_ids, best)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "overlap": "on"},
        {"max_num_batched_tokens": 16, "speculation": "ngram"},
        {"enable_prefix_caching": False, "decode_graphs": "off"},
    ],
    ids=str,
)
def test_any_schedule_draws_what_the_model_draws(
    folder: Path, alone: Any, expected: Sampled, options: dict[str, Any]
) -> None:
    other = alone([IMAGE, 8, 8], [PICTURES[1]])
    text = alone([5, 6, 7, 8], [])
    with opened(folder, **options) as llm:
        prompts = asked(PICTURES), asked([PICTURES[1]], [IMAGE, 8, 8]), [5, 6, 7, 8], asked(PICTURES)
        assert sampled(llm, *prompts) == [expected, other, text, expected]
        assert sampled(llm, asked(PICTURES), params=greedy(n=2)) == [expected, expected]


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "qwen2_5_vl"])
def test_other_families(tmp_path: Path, case: str) -> None:
    folder = write_folder(tmp_path, case)
    sample = model_alone(folder)
    expected, other = sample(PROMPT, PICTURES), sample([IMAGE, 8, 8], [PICTURES[1]])
    for options in (
        {"max_num_batched_tokens": 7, "overlap": "on"},
        {"max_num_batched_tokens": 16, "num_blocks": 20, "preemption": "recompute", "speculation": "ngram"},
    ):
        with opened(folder, **options) as llm:
            for _ in range(2):  # the second time from cached pages
                prompts = asked(PICTURES), asked([PICTURES[1]], [IMAGE, 8, 8]), asked(PICTURES)
                assert sampled(llm, *prompts) == [expected, other, expected]


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
def test_on_emulated_gpus(folder: Path, expected: Sampled, alone: Any, device: str) -> None:
    with opened(folder, device=device, dtype="float32", max_num_batched_tokens=16) as llm:
        assert sampled(llm, asked(PICTURES), [5, 6, 7, 8]) == [expected, alone([5, 6, 7, 8], [])]


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
def test_exact_schedules_on_emulated_gpus(folder: Path, alone: Any, device: str) -> None:
    """Proposals, prefix hits, preemption and swap beside pictures change no bit."""
    expected: list[list[Sampled]] = []
    for options in (
        {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "speculation": "ngram"},
        {"max_num_batched_tokens": 24, "num_blocks": 18, "preemption": "recompute"},
        {"max_num_batched_tokens": 24, "num_blocks": 18, "preemption": "swap", "swap_space_bytes": 1 << 20},
    ):
        with opened(folder, device=device, dtype="float32", exact=True, **options) as llm:
            for _ in range(2):  # the second time from cached pages
                expected.append(sampled(llm, *[asked(PICTURES)] * 2, [5, 6, 7, 8], params=greedy(24)))
            if "num_blocks" in options:
                assert llm.client.stats().num_preemptions > 0
    assert expected[0][0].token_ids == alone(PROMPT, PICTURES, 24).token_ids
    assert all(each == expected[0] for each in expected)


def test_preempted_sequences_compute_their_pictures_again(folder: Path, alone: Any, expected: Sampled) -> None:
    long = alone(PROMPT, PICTURES, 40)
    with opened(folder, num_blocks=18, max_num_batched_tokens=16, preemption="recompute") as llm:
        assert sampled(llm, *[asked(PICTURES)] * 3, params=greedy(40)) == [long] * 3
        assert llm.client.stats().num_preemptions > 0


@pytest.mark.parametrize("most", [64, 7])
def test_embeddings_read_pictures(folder: Path, most: int) -> None:
    """Those of the model alone, in one pass or in several, beside texts and other requests, and encoded once."""
    with opened(folder, max_num_batched_tokens=most, enable_prefix_caching=False) as llm:
        prompts = [asked(PICTURES), [5, 6, 7, 8], asked([picture(7), *PICTURES[1:]]), asked(PICTURES)]
        expected = hidden_alone(folder, PROMPT, PICTURES)
        for pooling, wanted in (("last", expected[-1]), ("mean", expected.mean(axis=0))):
            found = [
                np.array(each.outputs.embedding)
                for each in llm.embed(prompts, pooling=pooling, normalize=False, use_tqdm=False)
            ]
            assert np.abs(found[0] - wanted).max() < 1e-4 * np.abs(wanted).max()
            assert np.array_equal(found[0], found[3])
            assert not np.allclose(found[0], found[2], rtol=1e-2)
        assert sampled(llm, asked(PICTURES)) == sampled(llm, asked(PICTURES))
        for images, message in (([PICTURES[0]], "images"), ([b"x", *PICTURES[1:]], r"images\[0\]")):
            with pytest.raises(RequestError, match=message):
                llm.embed(asked(images))


def test_pictures_of_an_embedding_that_nobody_wants_are_not_encoded(folder: Path) -> None:
    with opened(folder) as llm:
        _, ids, images, salt, *_ = llm._asked_embedding(asked(PICTURES))
    engine = build_engine(folder, max_num_batched_tokens=64)
    given_up, wanted = (engine.embedder.prepare(PoolingRequest(ids, "last", images, salt)) for _ in range(2))
    given_up.future.cancel()
    for embedding, num_kept in ((given_up, 0), (wanted, 1)):
        engine.embed(embedding)
        while engine.has_work or engine.embedder.has_work:
            engine.step()
            engine.embedder.advance()
        assert engine.pictures is not None
        assert (engine.pictures.num_kept_tokens > 0) == num_kept
    assert np.isfinite(wanted.future.result()).all()
    engine.close()


def hidden_alone(folder: Path, prompt: Sequence[int], pictures: Sequence[Any]) -> Any:
    """What the model alone makes of the prompt's tokens, `[num_tokens, hidden_size]`."""
    model: Any = load_model(folder)
    seen: list[Any] = []
    forward = model.forward
    model.forward = lambda batch, pages: seen.append(forward(batch, pages)) or seen[-1]
    ids, spans, encoded = read_by(model, read_patch_rule(folder, model.patch_rule), prompt, pictures)
    positions, _ = token_positions(len(ids), spans)

    def complete(batch: Batch, start: int) -> None:
        batch.rope = model.rotations(positions)
        batch.encoded = encoded
        (batch.positions,) = ops.place([np.arange(batch.num_tokens, dtype=np.int32)], model.device)

    ModelDriver(model, complete=complete).step({0: ids})
    return seen[0].numpy().astype(np.float64)


def test_pages_are_found_by_the_picture(folder: Path, alone: Any, expected: Sampled) -> None:
    others = [picture(11), *PICTURES[1:]]
    with opened(folder) as llm:
        for pictures, num_cached in ((PICTURES, 0), (PICTURES, None), (others, 2)):
            (output,) = llm.generate([asked(pictures)], greedy(), use_tqdm=False)
            assert sampled_of(output.outputs[0]) == alone(PROMPT, pictures)
            most = len(output.prompt_token_ids) - 1
            assert output.num_cached_tokens == (most if num_cached is None else num_cached)
        (output,) = llm.generate([asked(PICTURES, cache_salt="other")], greedy(), use_tqdm=False)
        assert output.num_cached_tokens == 0
        typed = [IMAGE if token == IMAGE else token for token in output.prompt_token_ids]
        (text,) = llm.generate([typed], greedy(), use_tqdm=False)  # the same ids, but no picture
        assert text.num_cached_tokens == 2
        assert sampled_of(text.outputs[0]) == continued(ModelDriver(load_model(folder)), typed, NUM_NEW)


@pytest.fixture
def engine(folder: Path) -> Iterator[Any]:
    made = build_engine(folder, block_size=8, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=40)
    yield made
    made.close()


def item(seed: int, first: int, side: int = 4) -> ImageItem:
    patches = np.random.RandomState(seed).bytes(side * side * 48)
    return ImageItem(digest=bytes([seed]) * 16, first_token=first, rows=side, columns=side, patches=patches)


def request(name: str, *items: ImageItem, ids: Sequence[int] | None = None, **changes: Any) -> EngineRequest:
    ids = ids or [1, *[IMAGE] * sum(each.rows * each.columns // 4 for each in items), 2]
    return EngineRequest(request_id=name, prompt_token_ids=list(ids), params=greedy(2), images=items, **changes)


def run(engine: Any) -> list[Any]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
    return outputs


def test_pictures_are_kept_within_a_bound_and_encoded_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    begin = engine.executor.start_encoding

    def counted(slot: int, *rest: Any) -> None:
        started.append(slot)
        begin(slot, *rest)

    monkeypatch.setattr(engine.executor, "start_encoding", counted)
    support = msgspec.structs.replace(engine.info.images, max_tokens=8)  # two pictures of 4 tokens
    engine.pictures = engine.steps.pictures = PictureQueue(engine.executor, support, EncodingBudget(40))
    engine.opened.on_request_end = [engine.pictures.release]
    for name, seeds in (("a", (1,)), ("b", (1, 2)), ("c", (3, 4)), ("d", (3,)), ("e", (1,))):
        engine.add(request(name, *(item(seed, 1 + 4 * place) for place, seed in enumerate(seeds))))
    ended = [output.request_id for output in run(engine) if output.finish_reason == "length"]
    assert sorted(ended) == ["a", "b", "c", "d", "e"]
    assert len(started) == 5  # 1, 2, then 3 and 4 in their place, then 1 again
    assert engine.pictures.num_kept_tokens <= 8
    engine.add(request("f", item(1, 1), cache_salt="another"))
    run(engine)
    assert len(started) == 6


def test_a_picture_is_encoded_between_steps_of_others(engine: Any) -> None:
    engine.add(EngineRequest(request_id="text", prompt_token_ids=[4, 5], params=greedy(12)))
    engine.step()
    engine.pictures.budget = EncodingBudget(96)
    engine.add(request("picture", item(5, 1, 8)))  # 64 patches, each two times in 3 layers, and before and behind
    kinds = []
    while engine.has_work:
        kinds += [output.request_id for output in engine.step() if output.new_token_ids]
    num_rows = 64 * (1 + 2 * 3 + 3)  # two mergers of layers, and the last
    assert num_rows / 128 - 1 <= kinds.index("picture") <= -(-num_rows // 96)
    assert kinds.count("text") == 11


def test_cancelled_while_it_waits(engine: Any) -> None:
    engine.add(request("gone", item(6, 1, 8)))
    engine.step()
    (output,) = engine.cancel("gone")
    assert output.finish_reason == "abort"
    assert not engine.has_work
    engine.add(request("again", item(6, 1, 8)))
    assert [output.finish_reason for output in run(engine)][-1] == "length"


def test_a_failing_tower_ends_its_request_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("tower")

    engine.add(EngineRequest(request_id="text", prompt_token_ids=[4, 5], params=greedy(3)))
    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "start_encoding", fail)
        engine.add(request("bad", item(7, 1)))
        outputs = run(engine)
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {"text": "length", "bad": "error"}
    assert engine.pictures.num_kept_tokens == 0
    engine.add(request("good", item(7, 1)))
    assert [output.finish_reason for output in run(engine)][-1] == "length"


def changed(item: ImageItem, **changes: Any) -> ImageItem:
    return msgspec.structs.replace(item, **changes)


@pytest.mark.parametrize(
    ("items", "ids", "message"),
    [
        ([changed(item(1, 1), rows=3)], [1, 90, 90, 90, 90], "3 x 4 patches are no multiples of 2"),
        ([changed(item(1, 1), patches=b"abc")], [1, 90, 90, 90, 90], "patches have 3 bytes, must have 768"),
        ([changed(item(1, 1), digest=b"abc")], [1, 90, 90, 90, 90], "digest has 3 bytes"),
        ([item(1, 1)], [1, 90, 90, 90, 5], "the 4 tokens from 1 on must be 90; got 5 at 4"),
        ([item(1, 2)], [1, 90, 90, 90, 90], "its 4 tokens from 2 on are not within .*, which is from 0 to 5"),
        ([item(1, 0), item(2, 3)], [90] * 8, "its 4 tokens from 3 on are not within .*, which is from 4 to 8"),
    ],
)
def test_bad_pictures_are_refused(engine: Any, items: list[ImageItem], ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add(request("bad", *items, ids=ids))


def test_pictures_cross_the_socket() -> None:
    sent = request("over", item(1, 1), item(2, 5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest) == sent


def test_what_a_prompt_has_not(folder: Path) -> None:
    with opened(folder) as llm:
        for prompt, message in (
            (asked(PICTURES[:1]), "3 image tokens .* 1 images"),
            (asked([b"no picture"], [IMAGE]), r"images\[0\]: the image cannot be read"),
        ):
            with pytest.raises(RequestError, match=message):
                sampled(llm, prompt)
