"""The peer of `bench peers`: Hugging Face transformers driven by JSON lines, a script for a Python with torch.

The interpreter has torch, transformers and numpy, and need not have this project's dependencies; the protocol is
`peer_child`'s, the variants of `generate` are the KV caches "dynamic" and "static".

Prompts of one request are equally long, so that the peer needs neither padding nor a mask. The loop is the leanest
around the model's own forward: `logits_to_keep=1`, argmax on the tensor, tokens read back once at the end, no
`generate()` machinery around it.

Texts to embed are sorted by length and padded in batches, as sentence-transformers does; the variant is the size of a
batch. Equally long ones need no mask.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
BATCH_SIZES = ("32", "64", "8", "1")


class Peer:
    """One loaded model and its requests."""

    def __init__(self) -> None:
        self.model: Any = None
        self.torch: Any = None
        self.clock = time.perf_counter
        self.versions: dict[str, str] = {}

    def load(
        self, folder: str, threads: int, dtype: str, clock: str, task: str = "generate", adapters: Sequence[str] = ()
    ) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.clock = torch, CLOCKS[clock]
        kind = transformers.AutoModel if task == "embed" else transformers.AutoModelForCausalLM
        options = {"add_pooling_layer": False} if task == "embed" else {}
        self.model = kind.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True, **options
        ).eval()
        for number, name in enumerate(adapters):  # of the type that their files have
            given: dict[str, Any] = {"adapter_name": str(number), "autocast_adapter_dtype": False}
            if number:
                self.model.load_adapter(name, **given)
            else:
                import peft

                self.model = peft.PeftModel.from_pretrained(self.model, name, **given).eval()
                self.versions = {"peft": peft.__version__}
        return {
            **self.versions,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "variants": BATCH_SIZES if task == "embed" else ["dynamic", "static"],
        }

    def _adapted(self, adapters: Sequence[int | None]) -> tuple[Any, dict[str, Any]]:
        """A context in which the rows of a batch have these adapters, and what `forward` is given for it."""
        if not self.versions:
            return contextlib.nullcontext(), {}
        different = set(adapters)
        if different <= {None}:
            return self.model.disable_adapter(), {}
        if len(different) > 1:
            return contextlib.nullcontext(), {"adapter_names": [str(each) for each in adapters]}
        self.model.set_adapter(str(adapters[0]))
        return contextlib.nullcontext(), {}

    def logits(self, token_ids: list[int], path: str, adapter: int | None = None) -> dict[str, Any]:
        context, _ = self._adapted([adapter])
        with context, self.torch.inference_mode():
            logits = self.model(self.torch.tensor([token_ids]), use_cache=False).logits[0]
        numpy.save(path, logits.float().numpy())
        return {"path": path}

    def generate(
        self, prompts: list[list[int]], new_tokens: int, variant: str, adapters: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Greedy tokens; `prefill_s` until the first token of every prompt, `decode_s` for the others."""
        import transformers

        torch, model = self.torch, self.model
        context, given = self._adapted(adapters)
        start = self.clock()
        with context, torch.inference_mode():
            if variant == "static":
                length = len(prompts[0]) + new_tokens
                past = transformers.StaticCache(config=model.config, max_cache_len=length)
            else:
                past = transformers.DynamicCache(config=model.config)
            last = torch.tensor([-1])  # a copy of the rows: a bfloat16 product of a slice of them takes a minute
            output = model(
                torch.tensor(prompts), past_key_values=past, use_cache=True, logits_to_keep=last, **given
            )  # logits [num_prompts, 1, vocab]
            tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)  # [num_prompts, 1]
            columns = [tokens]
            first = self.clock()
            for _ in range(new_tokens - 1):
                output = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1, **given)
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

    def embed(self, prompts: list[list[int]], pooling: str, variant: str, path: str) -> dict[str, Any]:
        """Vectors by "cls" or "mean" pooling."""
        torch, size = self.torch, int(variant)
        start, used = self.clock(), time.process_time()
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        vectors: list[Any] = [None] * len(prompts)
        with torch.inference_mode():
            for first in range(0, len(order), size):
                chosen = order[first : first + size]
                lengths = torch.tensor([len(prompts[index]) for index in chosen])
                longest = int(lengths.max())
                rows = [prompts[index] + [0] * (longest - len(prompts[index])) for index in chosen]
                ids, mask = torch.tensor(rows), None
                positions = torch.arange(longest).expand(len(chosen), -1)
                seen = positions < lengths[:, None]
                if not bool(seen.all()):
                    mask = seen.long()
                offset = self.model.embeddings.padding_idx + 1 if self.model.config.model_type != "bert" else 0
                hidden = self.model(ids, attention_mask=mask, position_ids=positions + offset).last_hidden_state.float()
                if pooling == "cls":
                    pooled = hidden[:, 0]
                else:
                    pooled = (hidden * seen[:, :, None]).sum(1) / lengths[:, None]
                for index, row in zip(chosen, torch.nn.functional.normalize(pooled).numpy()):
                    vectors[index] = row
        wall_s, used_s = self.clock() - start, time.process_time() - used
        numpy.save(path, numpy.stack(vectors))
        return {"path": path, "wall_s": wall_s, "used_s": used_s}


if __name__ == "__main__":
    import peer_child  # type: ignore[import-not-found]  # from this script's folder, the first of the path

    peer_child.answer(Peer())
