"""The peer of `bench peers`: Hugging Face transformers driven by JSON lines, a script for a Python with torch.

The interpreter has torch, transformers and numpy, and need not have this project's dependencies; the protocol is
`peer_child`'s, the variants of `generate` are the KV caches "dynamic" and "static".

Prompts of one request are equally long, so that the peer needs neither padding nor a mask. The loop is the leanest
around the model's own forward: `logits_to_keep=1`, argmax on the tensor, tokens read back once at the end, no
`generate()` machinery around it.
"""

import time
from typing import Any

import numpy

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Peer:
    """One loaded model and its requests."""

    def __init__(self) -> None:
        self.model: Any = None
        self.torch: Any = None
        self.clock = time.perf_counter

    def load(self, folder: str, threads: int, dtype: str, clock: str) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.clock = torch, CLOCKS[clock]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "variants": ["dynamic", "static"],
        }

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([token_ids]), use_cache=False).logits[0]
        numpy.save(path, logits.float().numpy())
        return {"path": path}

    def generate(self, prompts: list[list[int]], new_tokens: int, variant: str) -> dict[str, Any]:
        """Greedy tokens; `prefill_s` until the first token of every prompt, `decode_s` for the others."""
        import transformers

        torch, model = self.torch, self.model
        start = self.clock()
        with torch.inference_mode():
            if variant == "static":
                length = len(prompts[0]) + new_tokens
                past = transformers.StaticCache(config=model.config, max_cache_len=length)
            else:
                past = transformers.DynamicCache(config=model.config)
            output = model(
                torch.tensor(prompts), past_key_values=past, use_cache=True, logits_to_keep=1
            )  # logits [num_prompts, 1, vocab]
            tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)  # [num_prompts, 1]
            columns = [tokens]
            first = self.clock()
            for _ in range(new_tokens - 1):
                output = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
                columns.append(tokens)
            token_ids = torch.cat(columns, dim=1).tolist()
        end = self.clock()
        return {
            "token_ids": token_ids,
            "prefill_s": first - start,
            "decode_s": end - first,
            "total_s": end - start,
        }


if __name__ == "__main__":
    import peer_child  # type: ignore[import-not-found]  # from this script's folder, the first of the path

    peer_child.answer(Peer())
