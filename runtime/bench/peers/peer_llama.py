"""A peer of `bench peers`: llama.cpp driven by JSON lines, a script for a Python with llama-cpp-python, gguf and numpy.

The interpreter need not have this project's dependencies; the protocol is `peer_child`'s. `load` opens the given GGUF
file, or writes one beside a folder's safetensors, from the same weights; a `variant` is "flash" or "plain" (flash
attention or not) and the tokens of one graph (`n_ubatch`), such as "flash-512".

Batches use the low-level API like llama.cpp's own batched benchmark: every sequence has its own part of the cache,
logits are requested only for sampled tokens, and numpy's argmax is used, which is faster than a greedy sampler. The
cache holds float16, llama.cpp's default. Contexts are made, and a prompt's batch is filled, before the clock starts.

Texts to embed are decoded as many at a time as fit a graph, in their order; a variant's number is its tokens, or those
of the longest text.
"""

import ctypes
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
VARIANTS = ("flash-512", "plain-512", "flash-128", "plain-128")
EMBED_VARIANTS = ("flash-512", "plain-512", "flash-128")
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
GPT2_FIELDS = {
    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner", "head_count": "n_head", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
QWEN3_FIELDS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads", "key_length": "head_dim", "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps", "rope_freq_base": "rope_theta",
}  # fmt: skip
BERT_FIELDS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads", "layer_norm_eps": "layer_norm_eps",
    "token_type_count": "type_vocab_size",
}  # fmt: skip
"""gguf's writer's methods, and the fields of config.json that they take."""


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


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """The folder's model as GGUF, its matrices as `dtype`; vectors and positions stay float32. It has no tokenizer: ids
    go in, ids come out."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = {"xlm-roberta": "bert"}.get(config["model_type"], config["model_type"])
    names = {"gpt2": GPT2_FIELDS, "qwen3": QWEN3_FIELDS, "bert": BERT_FIELDS}.get(kind)
    if names is None:
        raise ValueError(f"model_type {kind!r} is none of gpt2, qwen3, bert and xlm-roberta")
    writer = gguf.GGUFWriter(path, kind)
    fields = {**config, "n_inner": 4 * config.get("n_embd", 0)}
    first_position = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    if kind == "bert":
        writer.add_causal_attention(False)
        fields["max_position_embeddings"] -= first_position
    for name, field in names.items():
        getattr(writer, f"add_{name}")(fields[field])
    layers = fields[names["block_count"]]
    tensor_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    matrix_type = gguf.GGMLQuantizationType[GGUF_TYPES[dtype]]
    for name, values in stored_tensors(folder / "model.safetensors"):
        if ".c_" in name and values.ndim == 2:
            values = values.T  # GPT-2 stores its maps as [in, out]
        if name.endswith("position_embeddings.weight"):
            values = values[first_position:]
        theirs = tensor_names.get_name(
            name.removeprefix("bert.").removeprefix("roberta."), try_suffixes=(".weight", ".bias")
        )
        assert theirs is not None, name
        data = np.ascontiguousarray(values, np.float32)
        if values.ndim == 2 and not theirs.startswith(("position_embd", "token_types")):
            writer.add_tensor(theirs, gguf.quants.quantize(data, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter_gguf(folder: Path, path: Path, num_layers: int) -> None:
    """PEFT's adapter of a Qwen3 as GGUF, float32, as llama.cpp's own converter writes it."""
    import gguf

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, values in stored_tensors(folder / "adapter_model.safetensors"):
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert theirs is not None, name
        writer.add_tensor(f"{theirs}.{side.lower()}", np.ascontiguousarray(values, np.float32))
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


def _groups(adapters: Sequence[int | None]) -> dict[int | None, list[int]]:
    """The numbers of the sequences of each adapter."""
    found: dict[int | None, list[int]] = {}
    for number, adapter in enumerate(adapters):
        found.setdefault(adapter, []).append(number)
    return found


class Peer:
    """One loaded model and its requests."""

    def __init__(self) -> None:
        self.api: Any = None
        self.model: Any = None
        self.contexts: list[Any] = []
        self.context_key: tuple[Any, ...] | None = None
        self.threads = 0
        self.vocab_size = 0
        self.clock = time.perf_counter
        self.size = 0
        self.adapters: list[Any] = []

    def load(
        self, folder: str, threads: int, dtype: str, clock: str, task: str = "generate", adapters: Sequence[str] = ()
    ) -> dict[str, Any]:
        import llama_cpp

        self.api, self.threads = llama_cpp, threads
        self.clock = CLOCKS[clock]
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
        self.size = llama_cpp.llama_model_n_embd(self.model)
        for name in adapters:
            file = Path(name) / "adapter.gguf"
            write_adapter_gguf(Path(name), file, llama_cpp.llama_model_n_layer(self.model))
            self.adapters.append(llama_cpp.llama_adapter_lora_init(self.model, str(file).encode()))
            if not self.adapters[-1]:
                raise RuntimeError(f"llama.cpp does not load {name}")
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "threads": threads,
            "num_parameters": llama_cpp.llama_model_n_params(self.model),
            "variants": EMBED_VARIANTS if task == "embed" else VARIANTS,
        }

    def _open(
        self, num_sequences: int, length: int, variant: str, batch_tokens: int, embeds: bool = False, count: int = 1
    ) -> list[Any]:
        """`count` contexts with empty caches, each for so many sequences of `length` tokens, or contexts that embed."""
        api = self.api
        key = (num_sequences, length, variant, batch_tokens, embeds, count)
        if key != self.context_key:
            for context in self.contexts:
                api.llama_free(context)
            attention, ubatch = variant.split("-")
            params = api.llama_context_default_params()
            params.n_ctx = num_sequences * 256 * math.ceil(length / 256)
            params.n_seq_max = num_sequences
            params.n_batch = max(batch_tokens, int(ubatch))
            params.n_ubatch = int(ubatch)
            params.n_threads = params.n_threads_batch = self.threads
            if embeds:  # texts are whole in a graph
                params.embeddings, params.pooling_type = True, 0  # every token's
                params.n_ubatch = params.n_batch = max(params.n_ubatch, length)
            if hasattr(params, "n_outputs_max_per_seq"):
                params.n_outputs_max = params.n_outputs_max_per_seq = params.n_batch
            is_flash = attention == "flash"
            if hasattr(params, "flash_attn_type"):
                params.flash_attn_type = int(is_flash)  # of -1 (auto), 0 and 1
            else:
                params.flash_attn = is_flash
            self.contexts, self.context_key = [api.llama_init_from_model(self.model, params) for _ in range(count)], key
            if not all(self.contexts):
                raise RuntimeError(f"llama.cpp makes no context for {key}")
        if not embeds:
            for context in self.contexts:
                api.llama_memory_clear(api.llama_get_memory(context), True)
        return self.contexts

    def _adapt(self, context: Any, adapter: int | None) -> None:
        """All sequences of the context take the adapter; it has no others."""
        given = [] if adapter is None else [self.adapters[adapter]]
        array, scales = (self.api.llama_adapter_lora_p_ctypes * 1)(*given), (ctypes.c_float * 1)(1.0)
        if self.api.llama_set_adapters_lora(context, array, len(given), scales) != 0:
            raise RuntimeError("llama.cpp does not take the adapter")

    def _decode(self, context: Any, batch: Batch, num_outputs: int) -> Any:
        """Logits `[num_outputs, vocab]`, valid until the next call."""
        status = self.api.llama_decode(context, batch.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        pointer = ctypes.cast(self.api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (num_outputs, self.vocab_size))

    def logits(self, token_ids: list[int], path: str, adapter: int | None = None) -> dict[str, Any]:
        count = len(token_ids)
        [context] = self._open(1, count, VARIANTS[0], count)
        if self.adapters:
            self._adapt(context, adapter)
        batch = Batch(self.api, [0] * count, [True] * count)
        batch.token[:], batch.position[:] = token_ids, range(count)
        np.save(path, self._decode(context, batch, count))
        batch.free()
        return {"path": path}

    def generate(
        self, prompts: list[list[int]], new_tokens: int, variant: str, adapters: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Greedy tokens; `prefill_s` until the first token of every prompt, `decode_s` for the others.

        The sequences of each adapter have a context of their own, since one has the same for all.
        """
        length, groups = len(prompts[0]), _groups(adapters or [None] * len(prompts))
        most = max(map(len, groups.values()))
        contexts = self._open(most, length + new_tokens, variant, most * length, count=len(groups))
        firsts, batches = [], []
        for context, (adapter, members) in zip(contexts, groups.items()):
            if self.adapters:
                self._adapt(context, adapter)
            count = len(members)
            sequences = [sequence for sequence in range(count) for _ in range(length)]
            first = Batch(self.api, sequences, [place == length - 1 for _ in members for place in range(length)])
            first.token[:] = np.asarray([prompts[each] for each in members]).reshape(-1)
            first.position[:] = np.tile(np.arange(length), count)
            firsts.append(first)
            batches.append(Batch(self.api, list(range(count)), [True] * count))
        tokens = np.empty((len(prompts), new_tokens), np.int64)
        places = list(groups.values())
        start = self.clock()
        for context, batch, members in zip(contexts, firsts, places):
            tokens[members, 0] = self._decode(context, batch, len(members)).argmax(axis=1)
        begin = self.clock()
        for step in range(1, new_tokens):
            for context, batch, members in zip(contexts, batches, places):
                batch.token[:], batch.position[:] = tokens[members, step - 1], length + step - 1
                tokens[members, step] = self._decode(context, batch, len(members)).argmax(axis=1)
        end = self.clock()
        for batch in (*firsts, *batches):
            batch.free()
        return {
            "token_ids": tokens.tolist(),
            "prefill_s": begin - start,
            "decode_s": end - begin,
            "total_s": end - start,
        }

    def embed(self, prompts: list[list[int]], pooling: str, variant: str, path: str) -> dict[str, Any]:
        """Vectors by "cls" or "mean" pooling."""
        lengths = [len(prompt) for prompt in prompts]
        most = max(int(variant.split("-")[1]), *lengths)
        parts: list[list[int]] = [[]]
        for index, length in enumerate(lengths):
            if parts[-1] and sum(lengths[each] for each in parts[-1]) + length > most:
                parts.append([])
            parts[-1].append(index)
        [context] = self._open(max(map(len, parts)), max(lengths), variant, most, embeds=True)
        batches = []
        for part in parts:
            sequences = [place for place, index in enumerate(part) for _ in range(lengths[index])]
            batch = Batch(self.api, sequences, [True] * len(sequences))
            batch.token[:] = np.concatenate([prompts[index] for index in part])
            batch.position[:] = np.concatenate([np.arange(lengths[index]) for index in part])
            batches.append(batch)
        vectors = np.empty((len(prompts), self.size), np.float32)
        start, used = self.clock(), time.process_time()
        for part, batch in zip(parts, batches):
            status = self.api.llama_encode(context, batch.batch)
            if status != 0:
                raise RuntimeError(f"llama_encode returned {status}")
            pointer = ctypes.cast(self.api.llama_get_embeddings(context), ctypes.POINTER(ctypes.c_float))
            rows, first = np.ctypeslib.as_array(pointer, (batch.batch.n_tokens, self.size)), 0
            for index in part:
                end = first + lengths[index]
                row = rows[first] if pooling == "cls" else rows[first:end].mean(axis=0)
                vectors[index] = row / np.linalg.norm(row)
                first = end
        wall_s, used_s = self.clock() - start, time.process_time() - used
        for batch in batches:
            batch.free()
        np.save(path, vectors)
        return {"path": path, "wall_s": wall_s, "used_s": used_s}


if __name__ == "__main__":
    import peer_child  # type: ignore[import-not-found]  # from this script's folder, the first of the path

    peer_child.answer(Peer())
