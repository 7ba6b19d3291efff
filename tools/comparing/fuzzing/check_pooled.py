"""The checks of `fuzz_models.py` on a model that generates nothing: its hidden states or scores, alone and in batches.

Passes over the model alone get tokens' types, too; an engine over the same folder pools and classifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.base import Model
from models.registry import load_model
from runtime import LLM
from runtime.device.device import Device
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.pooling_pass import PagedSidePass
from runtime.linear.options import LoadSettings
from runtime.pooling import activated
from tools.comparing.fuzzing.draw import Fields
from tools.comparing.fuzzing.errors import Array, relative_error

BITS = "the bits of prompt {} differ {}"


def pooled_failures(
    case: Fields, run: Fields, folder: Path, arrays: dict[str, Array], tolerance: float, worst: Callable[[float], None]
) -> Iterator[str]:
    """The problems of one run of a case; `worst` gets each relative error."""
    prompts, types = case["prompts"], case["types"]
    has_same_bits = run["device"] == "cpu" or run["exact"]
    settings: LoadSettings = {"device": Device.parse(run["device"]), "exact": run["exact"]}
    model = load_model(folder, max_model_len=case["max_model_len"], **settings)
    if case["family"] == "qwen3_reranker":
        model.score_token_ids = tuple(case["score_tokens"])
    alone = [_hidden(model, run, [prompt], [given])[0] for prompt, given in zip(prompts, types, strict=True)]
    for order in (range(len(prompts)), range(len(prompts) - 1, -1, -1)):
        together = _hidden(model, run, [prompts[at] for at in order], [types[at] for at in order])
        for at, rows in zip(order, together, strict=True):
            if has_same_bits and not np.array_equal(rows, alone[at]):
                yield BITS.format(at, "in a batch")
            elif not relative_error(rows, alone[at]) <= tolerance:
                yield f"hidden states of prompt {at} differ in a batch by {relative_error(rows, alone[at]):.2e}"
    theirs = [arrays[f"output_{at}"] for at in range(len(prompts))]
    for at, rows in enumerate(alone):
        ours, other = _result(model, rows), theirs[at]
        if model.score_token_ids:
            other = np.array([other[model.score_token_ids[1]] - other[model.score_token_ids[0]]])
            # A difference of two logits: errors are relative to the largest of all.
            error = float(np.abs(ours - other).max() / np.abs(theirs[at]).max()) if np.isfinite(ours).all() else np.inf
        else:
            error = relative_error(ours, other)
            if model.classifier is not None:  # sums of terms around one, which may be near zero
                error *= min(1.0, float(np.abs(other).max()))
        worst(error)
        if not error <= tolerance:
            length = len(prompts[at])
            yield f"the result of prompt {at} ({length} tokens) differs by {error:.2e}, more than {tolerance:.1e}"
    yield from _engine_failures(case, run, folder, alone, model, tolerance, has_same_bits=has_same_bits)


def _hidden(model: Model, run: Fields, ids: list[list[int]], types: list[list[int] | None]) -> list[Array]:
    lengths = [len(each) for each in ids]
    size = run["block_size"]
    limits = EngineLimits(
        max_model_len=max(lengths), max_num_seqs=len(ids), max_num_batched_tokens=sum(lengths), block_size=size,
        num_blocks=sum(-(-length // size) for length in lengths), max_waiting=1,
        longrope_threshold=model.longrope_threshold, exact=run["exact"],
    )  # fmt: skip
    side = PagedSidePass(model, limits, lengths, lambda: None)
    given = [None if each is None else np.array(each, np.int32) for each in types]
    rows = side.run([np.array(each, np.int32) for each in ids], [0] * len(ids), None, given).to("cpu").array
    return [np.array(part, np.float32) for part in np.split(rows, np.cumsum(lengths)[:-1])]


def _pooled(rows: Array, pooling: str) -> Array:
    count = np.arange(1, len(rows) + 1)[:, None]
    wide = rows.astype(np.float64)
    made: dict[str, Callable[[], Any]] = {
        "cls": lambda: wide[0], "last": lambda: wide[-1], "mean": lambda: wide.mean(axis=0),
        "max": lambda: wide.max(axis=0), "weighted_mean": lambda: (wide * count).sum(axis=0) / count.sum(),
        "mean_sqrt_len": lambda: wide.sum(axis=0) / len(rows) ** 0.5,
    }  # fmt: skip
    return np.asarray(made[pooling](), np.float32)


def _result(model: Model, rows: Array) -> Array:
    """The rows, or the labels' scores of a model with a head."""
    if model.classifier is None and not model.score_token_ids:
        return rows
    if model.config.labels_tokens:
        return np.array(model.head("token_classify", rows))
    return np.array(model.head("classify", _pooled(rows, getattr(model.config, "pooling", "last"))))


def _engine_failures(
    case: Fields, run: Fields, folder: Path, alone: list[Array], model: Model, tolerance: float, *, has_same_bits: bool
) -> Iterator[str]:
    """An engine's vectors or scores of the prompts without types, compared with the passes'."""
    places = [at for at, given in enumerate(case["types"]) if given is None]
    prompts: Any = [{"prompt_token_ids": case["prompts"][at]} for at in places]
    with LLM(folder, skip_tokenizer_init=True, compile_ahead=False, max_model_len=case["max_model_len"], **run) as llm:
        if model.config.labels_tokens:
            of_tokens: list[Any] = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
            activation = llm.client.info.pooling.activation
            scores = [activated(_result(model, alone[at]), activation) for at in places]
            ways = [("labels of tokens", [each.outputs.data for each in of_tokens], scores)]
        elif model.classifier is not None:
            found = [each.outputs.probs for each in llm.classify(prompts, use_activation=False, use_tqdm=False)]
            ways = [("labels", found, [_result(model, alone[at]) for at in places])]
        else:
            ways = []
            for way in case["poolings"]:
                embedded = llm.embed(prompts, pooling=way, normalize=False, use_tqdm=False)
                expected = [_pooled(alone[at], way) for at in places]
                ways.append((way, [each.outputs.embedding for each in embedded], expected))
    for way, ours, theirs in ways:
        for at, mine, other in zip(places, ours, theirs, strict=True):
            error = relative_error(np.array(mine), other)
            if not error <= (1e-6 if has_same_bits else tolerance):
                yield f"the engine's {way} of prompt {at} differs by {error:.2e}"
