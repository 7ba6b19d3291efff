"""The perplexity of Hugging Face's model over a text, for comparison with `xserv perplexity`: the same windows, in
float32, in a Python that has torch and transformers.

    python tools/perplexity.py FOLDER TEXT --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.bench.perplexity import Window, summary, window_and_stride, windows


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


def by_transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    token_ids = transformers.AutoTokenizer.from_pretrained(args.folder)(args.text.read_text(encoding="utf-8")).input_ids
    token_ids = token_ids[: args.max_tokens]
    positions = transformers.AutoConfig.from_pretrained(args.folder).max_position_embeddings
    window, stride = window_and_stride(args.window, args.stride, positions - 1)
    scores = transformers_log_probabilities(args.folder, token_ids, windows(len(token_ids), window, stride))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {**summary(scores, token_ids, window, stride), "model": args.folder.name, "dtype": "float32", **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's")
    parser.add_argument("text", type=Path, help="a file in UTF-8")
    parser.add_argument("--window", type=int, help="tokens; else 1024, or one less than the model's positions")
    parser.add_argument("--stride", type=int, help="tokens from one window to the next; else half a window")
    parser.add_argument("--max-tokens", type=int, help="leave out the text behind so many")
    parser.add_argument("--json", action="store_true", help="the whole report")
    args = parser.parse_args()
    report = by_transformers(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['num_scored_tokens']:,} tokens")


if __name__ == "__main__":
    main()
