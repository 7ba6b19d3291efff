"""Adapters that change what pictures become: each request's pictures are encoded with its own adapter, and embeddings
are shared by adapters with one tower alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from models.checkpoints.safetensors_file import SafetensorsFile
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.llm import LLM
from runtime.llm.prompts import LoRARequest
from tests.models.folders import write_safetensors
from tests.models.vision.adapter_cases import ADAPTER, write_adapter
from tests.runtime.engine.test_pictures import PICTURES, PROMPT, write_folder

Answer = list[tuple[int, float]]
KINDS = {"tower": (0.3, "visual"), "other": (0.2, "visual"), "text": (0.3, "language_model"), "all": (0.3, "")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapted")
    (made / "model").mkdir()
    write_folder(made / "model", "qwen3_vl")
    for name, (factor, part) in KINDS.items():
        write_adapter(made / name, "qwen3_vl", factor=factor, part=part)
    return made


def opened(root: Path, **settings: Any) -> LLM:
    given: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "dtype": "float32"}
    given |= {"block_size": 8, "num_blocks": 80, "max_num_seqs": 4, "max_model_len": 96, "compile_ahead": False}
    return LLM(root / "model", skip_tokenizer_init=True, **{**given, **settings})


def requests_of(root: Path, names: list[str | None]) -> list[LoRARequest | None]:
    numbers = {name: number for number, name in enumerate(KINDS, 1)}
    return [None if name is None else LoRARequest(name, numbers[name], str(root / name)) for name in names]


def answers(llm: LLM, root: Path, names: list[str | None], num_new: int = 6) -> list[Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": PROMPT, "images": PICTURES}] * len(names)
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=requests_of(root, names))
    found = []
    for output in outputs:
        choice = output.outputs[0]
        assert choice.finish_reason == "length", choice.error
        assert choice.logprobs is not None
        found.append([(token, each[token].logprob) for each, token in zip(choice.logprobs, choice.token_ids)])
    return found


@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 7}, {"overlap": "on", "max_loras": 1},
    {"num_blocks": 14, "preemption": "recompute", "max_num_batched_tokens": 16},
    pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_each_request_sees_its_pictures_with_its_adapter(root: Path, settings: dict[str, Any]) -> None:
    names = ["tower", None, "all", "text", "other", None, "tower", "all"]
    with opened(root, **settings) as llm:
        mixed = answers(llm, root, names)
        again = answers(llm, root, names[::-1])[::-1]
    ranks = {"tensor_parallel_size": settings.get("tensor_parallel_size", 1)}
    with opened(root, enable_prefix_caching=False, decode_graphs="off", **ranks) as llm:
        alone = {name: answers(llm, root, [name])[0] for name in (None, *KINDS)}
    assert len({str(answer) for answer in alone.values()}) == 5
    assert mixed == again == [alone[name] for name in names]


def test_a_tower_is_adapted_as_merged_weights_are(root: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", "qwen3_vl")
    file = SafetensorsFile(tmp_path / "model" / "model.safetensors")
    tensors = {name: file.array(name).copy() for name in file.tensors}
    pairs = SafetensorsFile(root / "tower" / "adapter_model.safetensors")
    for name in [name for name in pairs.tensors if name.endswith("lora_A.weight")]:
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        up = pairs.array(name.replace("lora_A", "lora_B"))
        tensors[weight] += np.float32(ADAPTER["lora_alpha"] / ADAPTER["r"]) * (up @ pairs.array(name))
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
    with opened(tmp_path, enable_lora=False) as llm:
        expected = answers(llm, tmp_path, [None])[0]
    with opened(root) as llm:
        found = answers(llm, root, ["tower"])[0]
    assert [token for token, _ in found] == [token for token, _ in expected]
    np.testing.assert_allclose([each for _, each in found], [each for _, each in expected], rtol=0, atol=1e-4)


def test_embeddings_are_shared_by_requests_with_one_tower(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    begin = LocalExecutor.start_encoding

    def counted(self: Any, slot: int, patches: Any, grid: Any, adapter: int = -1) -> None:
        started.append(adapter)
        begin(self, slot, patches, grid, adapter)

    monkeypatch.setattr(LocalExecutor, "start_encoding", counted)
    with opened(root) as llm:
        for name, more in ((None, 3), ("text", 0), ("tower", 3), ("all", 3), ("tower", 0), (None, 0)):
            before = len(started)
            answers(llm, root, [name], 2)
            assert len(started) - before == more, name
    assert {-1} < set(started)
