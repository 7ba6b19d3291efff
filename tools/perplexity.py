"""How well a model foretells a text: perplexity over windows, computed through the engine's own prompt_logprobs.

    python -m tools.perplexity FOLDER TEXT                                   # window and half a window of context
    python -m tools.perplexity FOLDER TEXT --quantization int8 --json
    python tools/perplexity.py FOLDER TEXT --transformers                    # by Hugging Face's model, in its Python

The text's ids are cut into windows of ``--window`` tokens, each ``--stride`` tokens after the one before. A window
scores the tokens that the one before it did not hold, and has the rest as their context; the first scores all but its
first token. So every token but the first is scored once, and

    perplexity = exp(- sum of log p(token | what precedes it in its window) / number of scored tokens)

Two runs are of the same windows when ``token_ids_sha256``, ``window`` and ``stride`` agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime import LLM

LONGEST_WINDOW = 1024
"""Without ``--window``, where the model has as many positions."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``start : end`` of a text, of which those from ``first_scored`` on count."""

    start: int
    end: int
    first_scored: int


def windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Windows that score each token but the first once.

    Raises ``ValueError`` for fewer than two tokens, a window of fewer, and a stride outside ``1 … window``: tokens
    between two windows would be scored by none.
    """
    if num_tokens < 2 or window < 2:
        raise ValueError(f"the text has {num_tokens} tokens, the window {window}: both need at least 2")
    if not 1 <= stride <= window - 1:
        raise ValueError(f"stride is {stride}, must be from 1 to {window - 1}, one less than the window")
    found: list[Window] = []
    scored = 1
    for start in range(0, num_tokens, stride):
        end = min(start + window, num_tokens)
        found.append(Window(start, end, scored))
        scored = end
        if end == num_tokens:
            break
    return found


def log_probabilities(llm: LLM, token_ids: Sequence[int], cut: Sequence[Window]) -> Iterator[list[float]]:
    """For each window the log probability of every token that it scores, by the engine, many windows a batch."""
    from runtime import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for first in range(0, len(cut), 512):
        part = cut[first : first + 512]
        outputs = llm.generate([token_ids[each.start : each.end] for each in part], params, use_tqdm=False)
        for each, output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None, output.outputs[0].error
            entries = output.prompt_logprobs[each.first_scored - each.start :]
            ids = token_ids[each.first_scored : each.end]
            yield [entry[token_id].logprob for entry, token_id in zip(entries, ids, strict=True) if entry is not None]


def transformers_log_probabilities(
    folder: Path, token_ids: Sequence[int], cut: Sequence[Window]
) -> Iterator[list[float]]:
    """The same by Hugging Face's model in float32, one window after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        for each in cut:
            ids = torch.tensor([token_ids[each.start : each.end]])
            rows = torch.log_softmax(model(ids).logits[0].double(), -1)
            at = torch.arange(each.first_scored - each.start, each.end - each.start)
            yield rows[at - 1, ids[0, at]].tolist()


def summary(scores: Iterator[list[float]], token_ids: Sequence[int], window: int, stride: int) -> dict[str, Any]:
    """The report of a run. Raises ``ValueError`` unless every token but the first has a finite score."""
    found = [score for of_window in scores for score in of_window]
    if len(found) != len(token_ids) - 1 or not all(math.isfinite(score) for score in found):
        raise ValueError(f"{len(found)} scores, not all finite or not one for each of {len(token_ids) - 1} tokens")
    return {
        "perplexity": math.exp(-math.fsum(found) / len(found)),
        "nats_per_token": -math.fsum(found) / len(found),
        "num_scored_tokens": len(found),
        "window": window,
        "stride": stride,
        "token_ids_sha256": hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest(),
    }


def by_engine(args: argparse.Namespace) -> dict[str, Any]:
    from runtime import LLM
    from runtime.bench.environment import describe_engine

    with LLM(
        args.folder, device=args.device, dtype=args.dtype, quantization=args.quantization, enable_prefix_caching=False
    ) as llm:
        assert llm.tokenizer is not None
        token_ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.max_tokens]
        window = args.window or min(LONGEST_WINDOW, llm.client.info.max_model_len - 1)  # one more token is drawn
        stride = args.stride or max(1, window // 2)
        scores = log_probabilities(llm, token_ids, windows(len(token_ids), window, stride))
        return {**summary(scores, token_ids, window, stride), **describe_engine(llm.client.info)}


def by_transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    token_ids = transformers.AutoTokenizer.from_pretrained(args.folder)(args.text.read_text(encoding="utf-8")).input_ids
    token_ids = token_ids[: args.max_tokens]
    positions = transformers.AutoConfig.from_pretrained(args.folder).max_position_embeddings
    window = args.window or min(LONGEST_WINDOW, positions - 1)
    stride = args.stride or max(1, window // 2)
    scores = transformers_log_probabilities(args.folder, token_ids, windows(len(token_ids), window, stride))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {**summary(scores, token_ids, window, stride), "model": args.folder.name, "dtype": "float32", **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's")
    parser.add_argument("text", type=Path, help="a file in UTF-8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", help="none or int8")
    parser.add_argument("--window", type=int, help="tokens; else 1024, or one less than the model's positions")
    parser.add_argument("--stride", type=int, help="tokens from one window to the next; else half a window")
    parser.add_argument("--max-tokens", type=int, help="leave out the text behind so many")
    parser.add_argument("--transformers", action="store_true", help="by Hugging Face's model in float32 instead")
    parser.add_argument("--json", action="store_true", help="the whole report")
    args = parser.parse_args()
    report = by_transformers(args) if args.transformers else by_engine(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['num_scored_tokens']:,} tokens")


if __name__ == "__main__":
    main()
