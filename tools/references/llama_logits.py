"""Prints llama.cpp's logits of a prompt; `make_hybrid_gguf.py` runs it.

The request on stdin has a file and ids, perhaps an adapter's file. The cache holds float32, and graphs are computed
without flash attention.
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    request = json.load(sys.stdin)
    ids = request["ids"]
    quiet = llama_cpp.llama_log_callback(lambda *_: None)  # held: C calls it
    llama_cpp.llama_log_set(quiet, None)
    model = llama_cpp.llama_model_load_from_file(request["path"].encode(), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp does not load {request['path']}"
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads = 256, 256, 256, 1
    options.type_k = options.type_v = options.flash_attn_type = 0  # float32; never
    if hasattr(options, "n_outputs_max_per_seq"):
        options.n_outputs_max = options.n_outputs_max_per_seq = 256
    context = llama_cpp.llama_init_from_model(model, options)
    assert context, f"llama.cpp makes no context for {request['path']}"
    if "adapter" in request:
        adapter = llama_cpp.llama_adapter_lora_init(model, request["adapter"].encode())
        assert adapter, f"llama.cpp does not load {request['adapter']}"
        given, scale = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
        assert llama_cpp.llama_set_adapters_lora(context, given, 1, scale) == 0
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
        batch.seq_id[at][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    pointer = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    print(json.dumps(np.ctypeslib.as_array(pointer, (len(ids), size)).tolist()))


if __name__ == "__main__":
    main()
