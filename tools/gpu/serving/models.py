"""Whole models on dummy weights, as in serving: overlapped steps, decode graphs, sampling on the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from runtime.bench.scheduling.engines import local
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.timeline import StepRecord
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.graph_timeline import node_timeline
from tools.gpu.serving.quick_weights import quick_weights

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Models that are looked at closely, as stored in bfloat16."""

IN_SHORT: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 24, "num_experts_per_tok": 4, "num_local_experts": 32,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "12 layers of qwen3-30b-a3b": _QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "qwen3-8b int4": MODELS["qwen3-8b"],
    "qwen3-8b fp8": MODELS["qwen3-8b"],
}  # fmt: skip
"""Others, with those that `STORED` has quantised."""

STORED: dict[str, dict[str, str]] = {
    "gpt-oss-20b": {".experts.": "mxfp4"},
    "qwen3-8b int4": {"_proj.": "int4 g128"},
    "qwen3-8b fp8": {"_proj.": "fp8 blocks"},
}
"""How matrices of models are quantised: a part of their names, and one of `packed_layers.FORMATS`."""

_TINY = {"num_hidden_layers": 1, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
TINY: dict[str, dict[str, Any]] = {
    "qwen3-8b": MODELS["qwen3-8b"] | _TINY | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3-0.6b": MODELS["qwen3-0.6b"] | _TINY | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt-oss-20b": IN_SHORT["gpt-oss-20b"] | _TINY | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5,
    },
    "12 layers of qwen3-30b-a3b": IN_SHORT["12 layers of qwen3-30b-a3b"] | _TINY | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
} | {name: IN_SHORT[name] | _TINY | {"num_attention_heads": 4, "num_key_value_heads": 2} for name in (
    "qwen3-8b int4", "qwen3-8b fp8",
)}  # fmt: skip
"""The same families at sizes that an emulated device can run."""

CONTEXT, OUTPUT = 1024, 64
QUICK_CONTEXT = 256
"""Tokens of each of many sequences, for the models of the quick run."""
PREFILLS = (2048, 8192)
BATCHES = (32, 256)
PROMPT_TOKENS = 32 * CONTEXT
"""Prompt tokens of all sequences of a batch: all decode before the first has ended."""


def config_of(options: Options, name: str) -> dict[str, Any]:
    """A model's config.json."""
    config = (TINY if options.is_quick else MODELS | IN_SHORT)[name]
    return config | {"num_hidden_layers": 2} if options.is_dry and not options.is_quick else config


def quick_weights_of(name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which models load with quick weights, quantised by `STORED` for this name."""
    return quick_weights(STORED.get(name, {}))


class Model:
    """An engine that is made on first use, in a thread of its own."""

    def __init__(self, options: Options, name: str, *, max_num_seqs: int) -> None:
        self.options = options
        self.name = name
        self._max_num_seqs = max_num_seqs
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0

    @functools.cached_property
    def engine(self) -> Engine:
        (Path(self._folder.name) / "config.json").write_text(
            json.dumps(config_of(self.options, self.name)), encoding="utf-8"
        )
        sizes: dict[str, Any] = {"kv_cache_bytes": 1 << 22} if self.options.is_quick else {}
        if self.options.is_dry and not self.options.is_quick:
            sizes = {"kv_cache_bytes": 48 << 30}
        with quick_weights_of(self.name):
            return build_engine(
                self._folder.name, device=self.options.device, dtype="bfloat16", load_format="dummy", seed=0,
                max_model_len=64 if self.options.is_quick else max(PREFILLS) + OUTPUT,
                max_num_seqs=self._max_num_seqs, enable_prefix_caching=False, **sizes,
            )  # fmt: skip

    @functools.cached_property
    def client(self) -> EngineClient:
        return ThreadEngineClient(self.engine)

    def run(
        self, prompts: Sequence[Sequence[int]], output_len: int, predictions: Sequence[Sequence[int]] | None = None
    ) -> tuple[list[list[int]], list[StepRecord]]:
        """Greedy answers, and their steps; `predictions` are proposed while answers follow them. Raises AssertionError
        if a request fails."""
        client, before = self.client, self._last_step()
        outputs: SimpleQueue[EngineOutput] = SimpleQueue()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        answers: dict[str, list[int]] = {}
        for prompt, predicted in zip(prompts, predictions or [[]] * len(prompts), strict=True):
            self._count += 1
            request = EngineRequest(
                request_id=str(self._count), prompt_token_ids=list(prompt), params=params, prediction=list(predicted)
            )
            answers[request.request_id] = []
            client.submit(request, outputs.put)
        open_requests = set(answers)
        while open_requests:
            output = outputs.get(timeout=600)
            answers[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                open_requests.discard(output.request_id)
                if output.finish_reason != "length":
                    raise AssertionError(f"a request ended by {output.finish_reason}: {output.error}")
        steps = [step for step in list(self.engine.timeline) if step.number > before]
        return list(answers.values()), steps

    def _last_step(self) -> int:
        timeline = self.engine.timeline
        return timeline[-1].number if timeline else -1

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Seeded prompts of equal length."""
        vocabulary = self.engine.info.vocab_size
        found: list[list[int]] = np.random.default_rng(0).integers(0, vocabulary, (count, length)).tolist()
        return found

    def close(self) -> None:
        """Ends the engine, if it was made."""
        if "client" in self.__dict__:
            self.client.close()
        self._folder.cleanup()


def _sizes(options: Options) -> tuple[int, int]:
    """Tokens of a prompt and of an answer."""
    return (6, 4) if options.is_quick else (CONTEXT, OUTPUT)


def batch_1(options: Options, name: str) -> Iterator[Case]:
    """Loading, one sequence, and the profile of one of its steps."""
    model = Model(options, name, max_num_seqs=2 if options.is_quick else 8)
    yield Case("load", lambda: _load(model))
    yield Case("batch 1", lambda: decode(model, 1))
    yield Case("timeline of a step", lambda: _timeline(model))
    model.close()


def batches(options: Options, name: str) -> Iterator[Case]:
    """Many sequences, and long prompts."""
    counts = (2,) if options.is_quick else BATCHES
    model = Model(options, name, max_num_seqs=max(counts))
    for count in counts:
        shorter = None if options.is_quick else min(CONTEXT, PROMPT_TOKENS // count)
        yield Case(f"batch {count}", functools.partial(decode, model, count, prompt_len=shorter))
    yield Case("timeline of a step", lambda: _timeline(model, counts[0]))
    for length in (20,) if options.is_quick else PREFILLS:
        yield Case(f"prefill {length}", functools.partial(_prefill, model, length))
    yield Case("timeline of a prompt", lambda: _timeline_of_a_prompt(model))
    model.close()


def verification(options: Options, name: str) -> Iterator[Case]:
    """Steps that verify a request's prediction, compared with steps of one token."""
    model = Model(options, name, max_num_seqs=2)
    yield Case("tokens of a step", lambda: _verification(model))
    yield Case("timeline of a step that tries", lambda: _timeline_of_tries(model))
    model.close()


def _verification(model: Model) -> Result:
    """Steps by their number of tokens, once recorded; and the equal part of the answer, which depends on bfloat16's
    rounding. Raises AssertionError if none verifies several."""
    prompt_len, output_len = (6, 24) if model.options.is_quick else (CONTEXT, OUTPUT)
    prompts = model.prompts(1, prompt_len)
    plain, _ = model.run(prompts, output_len)
    assert model.engine.speculator is not None
    model.engine.speculator.tries_all()
    found: dict[int, list[StepRecord]] = {}
    same = []
    for number in range(4):
        for predicted in (None, plain):
            answers, steps = model.run(prompts, output_len, predicted)
            same.append(_num_same(answers[0], plain[0]))
            for step in steps[1:] if number else []:
                found.setdefault(sum(chunk.num_tokens for chunk in step.chunks), []).append(step)
    several = [count for count in found if count > 1]
    if not several:
        raise AssertionError(f"no step tried a proposal: steps had {sorted(found)} tokens")
    steps_by_count: dict[str, Any] = {
        str(count): {
            "steps": len(steps), "step_ms": quartiles_ms([step.end_s - step.start_s for step in steps]),
            "host_ms": quartiles_ms([step.host_s for step in steps]),
            "run_ms": quartiles_ms([step.run_s for step in steps]),
        }
        for count, steps in sorted(found.items())
    }  # fmt: skip
    one, most = (steps_by_count[str(count)]["step_ms"][1] for count in (1, max(several)))
    return {
        "by_tokens": steps_by_count, "most_to_one": round(most / one, 3) if one else None, "same_at_the_start": same,
        "replayed": model.engine.stats().num_forward_steps,
    }  # fmt: skip


def _timeline_of_tries(model: Model) -> Result:
    """The timeline of steps that repeat an earlier answer of such steps, so that nearly all verify as many tokens. Call
    it after `_verification`, which records them."""
    prompt_len, output_len = (6, 24) if model.options.is_quick else (CONTEXT, OUTPUT)
    prompts = model.prompts(1, prompt_len)
    predicted, _ = model.run(prompts, output_len)
    for _ in range(3):
        predicted, _ = model.run(prompts, output_len, predicted)
    kept: list[StepRecord] = []

    def run() -> None:
        kept.extend(model.run(prompts, output_len, predicted)[1])

    found = node_timeline(model.options, f"{model.name}-tries", run, _graphs(model))
    counts = [sum(chunk.num_tokens for chunk in step.chunks) for step in kept[1:]]
    starts_ms = [round(1e3 * (after.start_s - before.start_s), 3) for before, after in itertools.pairwise(kept[1:])]
    return found | {"tokens_of_steps": counts, "from_start_to_start_ms": starts_ms}


def in_short(options: Options, name: str) -> Iterator[Case]:
    """Loading, one sequence, several, a prompt, and a step's profile, for the further models."""
    count = 2 if options.is_quick else 32
    model = Model(options, name, max_num_seqs=count)
    yield Case("load", lambda: _load(model))
    yield Case("batch 1", lambda: decode(model, 1))
    yield Case(f"batch {count}", lambda: decode(model, count, prompt_len=6 if options.is_quick else QUICK_CONTEXT))
    length = 20 if options.is_quick else PREFILLS[0]
    yield Case(f"prefill {length}", lambda: _prefill(model, length))
    yield Case("timeline of a prompt", lambda: _timeline_of_a_prompt(model))
    yield Case("timeline of a step", lambda: _timeline(model))
    model.close()


def _load(model: Model) -> Result:
    start = time.perf_counter()
    info = model.engine.info
    loaded_s = time.perf_counter() - start
    model.run(model.prompts(1, 4), 1)
    return {
        "load_s": round(loaded_s, 2), "first_request_s": round(time.perf_counter() - start - loaded_s, 2),
        "weight_bytes": info.weight_bytes, "dtype": info.dtype, "num_blocks": info.num_blocks,
        "num_layers": config_of(model.options, model.name)["num_hidden_layers"],
    }  # fmt: skip


def decode(model: Model, count: int, *, prompt_len: int | None = None) -> Result:
    """Steps that decode all sequences, after a run that records their graphs. Raises AssertionError if a single request
    gets other tokens the second time."""
    usual, output_len = _sizes(model.options)
    prompt_len = prompt_len or usual
    prompts = model.prompts(count, prompt_len)
    expected, _ = model.run(prompts, output_len)
    answers, steps = model.run(prompts, output_len)
    different = sum(one != other for one, other in zip(answers, expected))
    if different and count == 1:  # several may share other steps, and then have other bits
        raise AssertionError("a greedy request got other tokens the second time")
    decodes = [step for step in steps if all(chunk.kind == "decode" for chunk in step.chunks)]
    full = [step for step in decodes if len(step.chunks) == count]
    if not full:
        raise AssertionError(f"no step decoded all {count} sequences: {[len(step.chunks) for step in steps][:50]}")
    tpot = quartiles_ms([step.end_s - step.start_s for step in full])
    return {
        "batch": count, "prompt_len": prompt_len, "output_len": output_len, "steps": len(full), "tpot_ms": tpot,
        "other_tokens_the_second_time": different,
        "host_ms": quartiles_ms([step.host_s for step in full]),
        "tokens_per_s": round(1e3 * count / tpot[1], 1) if tpot[1] else None,
        "prefill_ms": round(1e3 * sum(step.end_s - step.start_s for step in steps if step not in decodes), 2),
        "graph_nodes": sorted(graph.num_nodes for graph in _graphs(model)),
    }  # fmt: skip


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))


def _prefill(model: Model, length: int) -> Result:
    """A single prompt: the time of its steps."""
    prompts = model.prompts(1, length)
    model.run(prompts, 1)
    values = []
    for _ in range(1 if model.options.is_quick else 5):
        _, steps = model.run(prompts, 1)
        values.append(sum(step.end_s - step.start_s for step in steps))
    return {"prompt_len": length, "steps": len(steps), "prefill_ms": quartiles_ms(values)}


def _graphs(model: Model) -> list[Any]:
    """The recorded decode graphs."""
    graphs = local(model.engine).graphs
    return [] if graphs is None else graphs.recorded()


def _timeline(model: Model, count: int = 1) -> Result:
    prompt_len, output_len = _sizes(model.options)
    prompts = model.prompts(count, prompt_len)
    model.run(prompts, output_len)
    name = model.name if count == 1 else f"{model.name}-{count}"
    return node_timeline(model.options, name, lambda: model.run(prompts, output_len), _graphs(model))


def _timeline_of_a_prompt(model: Model) -> Result:
    """The kernels of a prompt's pass, which is replayed from its second use on."""
    prompts = model.prompts(1, 20 if model.options.is_quick else PREFILLS[0])
    for _ in range(3):
        model.run(prompts, 1)

    def run() -> None:
        for _ in range(1 if model.options.is_quick else 5):
            model.run(prompts, 1)

    return node_timeline(model.options, f"{model.name}-prompt", run, _graphs(model))


def quartiles_ms(seconds: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile."""
    found = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return [round(1e3 * value, 4) for value in found]
