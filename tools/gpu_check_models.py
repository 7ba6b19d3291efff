"""End to end on dummy weights: time to the first token, time for each further one, and a batch's throughput."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

_GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "qwen3-0.6b": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2 | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 300},
    "qwen3-0.6b": _QWEN3 | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 300,
    },
    "qwen3-8b": _QWEN3 | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": 300,
    },
}  # fmt: skip
"""The same families at sizes that an emulated device can run."""


def model_figures(name: str, device: str, is_quick: bool) -> dict[str, Any]:
    """The figures of one shape. Raises AssertionError where a repeated run gives other tokens."""
    import numpy as np

    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM

    config = (TINY if is_quick else MODELS)[name]
    prompt_len, output_len, batch, repeats = (6, 3, 2, 1) if is_quick else (128, 64, 32, 5)
    options: dict[str, Any] = {"kv_cache_bytes": 1 << 22} if is_quick else {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        llm = LLM(
            folder, device=device, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
            max_model_len=64 if is_quick else 1024, max_num_seqs=batch, **options,
        )  # fmt: skip
    with llm:
        info = llm.client.info
        figures: dict[str, Any] = {
            "load_s": round(time.perf_counter() - start, 2), "dtype": info.dtype, "weight_bytes": info.weight_bytes,
            "prompt_len": prompt_len, "output_len": output_len, "batch": batch,
        }  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        prompts = np.random.default_rng(0).integers(0, info.vocab_size, (batch, prompt_len)).tolist()

        def run(num_seqs: int) -> tuple[list[Any], float]:
            start = time.perf_counter()
            outputs = llm.generate(prompts[:num_seqs], params, use_tqdm=False)
            return [output.outputs[0] for output in outputs], time.perf_counter() - start

        expected, cold_s = run(1)
        figures["cold_first_request_s"] = round(cold_s, 2)  # kernels are compiled or read from disk
        singles, batches = [], []
        for _ in range(repeats):
            (choice,), _ = run(1)
            if list(choice.token_ids) != list(expected[0].token_ids):
                raise AssertionError(f"{name}: the same greedy request gave other tokens the second time")
            singles.append(choice.times)
        run(batch)
        for _ in range(repeats):
            choices, seconds = run(batch)
            if any(len(choice.token_ids) != output_len for choice in choices):
                raise AssertionError(f"{name}: a request of the batch ended early")
            batches.append(seconds)
    figures["ttft_ms"] = _median_ms([times.first_token_s - times.arrival_s for times in singles])
    figures["tpot_ms"] = _median_ms([(t.last_token_s - t.first_token_s) / (output_len - 1) for t in singles])
    figures["batch_tokens_per_s"] = round(batch * output_len / statistics.median(batches), 1)
    figures["repeats"] = repeats
    return figures


def _median_ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)
