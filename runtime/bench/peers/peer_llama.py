"""A peer of `bench peers`: llama.cpp driven by JSON lines, a script for a Python with llama-cpp-python, gguf and numpy.

The interpreter need not have this project's dependencies; the protocol is `peer_child`'s. `load` opens the given GGUF
file, or writes one beside a folder's safetensors, from the same weights; a `variant` is "flash" or "plain" (flash
attention or not) and the tokens of one graph (`n_ubatch`), such as "flash-512".

Batches use the low-level API like llama.cpp's own batched benchmark: every sequence has its own part of the cache,
logits are requested only for sampled tokens, and numpy's argmax is used, which is faster than a greedy sampler. The
cache holds float16, llama.cpp's default. Contexts are made, and a prompt's batch is filled, before the clock starts.
"""

import ctypes
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS = ("flash-512", "plain-512", "flash-128", "plain-128")
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}

GPT2_NAMES = {
    "ln_1.weight": "attn_norm.weight",
    "ln_1.bias": "attn_norm.bias",
    "attn.c_attn.weight": "attn_qkv.weight",
    "attn.c_attn.bias": "attn_qkv.bias",
    "attn.c_proj.weight": "attn_output.weight",
    "attn.c_proj.bias": "attn_output.bias",
    "ln_2.weight": "ffn_norm.weight",
    "ln_2.bias": "ffn_norm.bias",
    "mlp.c_fc.weight": "ffn_up.weight",
    "mlp.c_fc.bias": "ffn_up.bias",
    "mlp.c_proj.weight": "ffn_down.weight",
    "mlp.c_proj.bias": "ffn_down.bias",
}
QWEN3_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
OTHER_NAMES = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def stored_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Name and values (float32) of each tensor of a safetensors file of float32 or bfloat16."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[start + begin : start + end]
        if entry["dtype"] == "BF16":
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = data.view(np.float32)
        else:
            raise ValueError(f"{name} is {entry['dtype']}, not F32 or BF16")
        yield name, values.reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of Hugging Face's GPT-2 or Qwen3."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    for prefix, names in (("transformer.h.", GPT2_NAMES), ("model.layers.", QWEN3_NAMES)):
        if name.startswith(prefix):
            layer, _, rest = name.removeprefix(prefix).partition(".")
            return f"blk.{layer}.{names[rest]}"
    raise ValueError(f"no name in GGUF for {name}")


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """The folder's model as GGUF, its matrices as `dtype`; vectors and positions stay float32. It has no tokenizer: ids
    go in, ids come out."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    if kind == "gpt2":
        hidden = config["n_embd"]
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(4 * hidden)
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    elif kind == "qwen3":
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
    else:
        raise ValueError(f"model_type {kind!r} is neither gpt2 nor qwen3")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    matrix_type = gguf.GGMLQuantizationType[GGUF_TYPES[dtype]]
    for name, values in stored_tensors(folder / "model.safetensors"):
        if ".c_" in name and values.ndim == 2:
            values = values.T  # GPT-2 stores its maps as [in, out]
        if values.ndim == 2 and name != "transformer.wpe.weight":
            data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), matrix_type)
            writer.add_tensor(gguf_name(name), data, raw_dtype=matrix_type)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Batch:
    """A `llama_batch` of `num_tokens`; `token` and `position` are arrays over its fields."""

    def __init__(self, api: Any, sequences: list[int], wants_logits: list[bool]) -> None:
        self._api = api
        count = len(sequences)
        self.batch = api.llama_batch_init(count, 0, 1)
        self.batch.n_tokens = count
        self.token = np.ctypeslib.as_array(self.batch.token, (count,))
        self.position = np.ctypeslib.as_array(self.batch.pos, (count,))
        for index, (sequence, wants) in enumerate(zip(sequences, wants_logits)):
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = sequence
            self.batch.logits[index] = wants

    def free(self) -> None:
        self._api.llama_batch_free(self.batch)


class Peer:
    """One loaded model and its requests."""

    def __init__(self) -> None:
        self.api: Any = None
        self.model: Any = None
        self.context: Any = None
        self.context_key: tuple[Any, ...] | None = None
        self.threads = 0
        self.vocab_size = 0

    def load(self, folder: str, threads: int, dtype: str) -> dict[str, Any]:
        import llama_cpp

        self.api, self.threads = llama_cpp, threads
        path = Path(folder)
        if path.is_dir():
            path = path / f"model-{dtype}.gguf"
            write_gguf(Path(folder), path, dtype)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "threads": threads,
            "num_parameters": llama_cpp.llama_model_n_params(self.model),
            "variants": VARIANTS,
        }

    def _open(self, num_sequences: int, length: int, variant: str, batch_tokens: int) -> Any:
        """A context with an empty cache for so many sequences of `length` tokens."""
        api = self.api
        key = (num_sequences, length, variant, batch_tokens)
        if key != self.context_key:
            if self.context:
                api.llama_free(self.context)
            attention, ubatch = variant.split("-")
            params = api.llama_context_default_params()
            params.n_ctx = num_sequences * 256 * math.ceil(length / 256)
            params.n_seq_max = num_sequences
            params.n_batch = max(batch_tokens, int(ubatch))
            params.n_ubatch = int(ubatch)
            params.n_threads = params.n_threads_batch = self.threads
            if hasattr(params, "n_outputs_max_per_seq"):
                params.n_outputs_max = params.n_outputs_max_per_seq = params.n_batch
            is_flash = attention == "flash"
            if hasattr(params, "flash_attn_type"):
                params.flash_attn_type = int(is_flash)  # of -1 (auto), 0 and 1
            else:
                params.flash_attn = is_flash
            self.context, self.context_key = api.llama_init_from_model(self.model, params), key
            if not self.context:
                raise RuntimeError(f"llama.cpp makes no context for {key}")
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        return self.context

    def _decode(self, context: Any, batch: Batch, num_outputs: int) -> Any:
        """Logits `[num_outputs, vocab]`, valid until the next call."""
        status = self.api.llama_decode(context, batch.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        pointer = ctypes.cast(self.api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (num_outputs, self.vocab_size))

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        count = len(token_ids)
        context = self._open(1, count, VARIANTS[0], count)
        batch = Batch(self.api, [0] * count, [True] * count)
        batch.token[:], batch.position[:] = token_ids, range(count)
        np.save(path, self._decode(context, batch, count))
        batch.free()
        return {"path": path}

    def generate(self, prompts: list[list[int]], new_tokens: int, variant: str) -> dict[str, Any]:
        """Greedy tokens; `prefill_s` until the first token of every prompt, `decode_s` for the others."""
        count, length = len(prompts), len(prompts[0])
        context = self._open(count, length + new_tokens, variant, count * length)
        sequences = [sequence for sequence in range(count) for _ in range(length)]
        first_batch = Batch(self.api, sequences, [place == length - 1 for _ in prompts for place in range(length)])
        first_batch.token[:] = np.asarray(prompts).reshape(-1)
        first_batch.position[:] = np.tile(np.arange(length), count)
        batch = Batch(self.api, list(range(count)), [True] * count)
        start = time.perf_counter()
        columns = [self._decode(context, first_batch, count).argmax(axis=1)]  # [num_prompts]
        first = time.perf_counter()
        for step in range(new_tokens - 1):
            batch.token[:], batch.position[:] = columns[-1], length + step
            columns.append(self._decode(context, batch, count).argmax(axis=1))
        end = time.perf_counter()
        first_batch.free()
        batch.free()
        return {
            "token_ids": np.stack(columns, axis=1).tolist(),
            "prefill_s": first - start,
            "decode_s": end - first,
            "total_s": end - start,
        }


if __name__ == "__main__":
    import peer_child  # type: ignore[import-not-found]  # from this script's folder, the first of the path

    peer_child.answer(Peer())
