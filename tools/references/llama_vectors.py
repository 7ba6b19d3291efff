"""Prints llama.cpp's hidden states, vectors or rank logits of prompts; `make_encoder_gguf.py` runs it.

The request on stdin has a file, prompts of ids and a pooling (0 none, 1 mean, 2 cls, 3 last, 4 rank).
"""

from __future__ import annotations

import json
import sys

import llama_cpp


def main() -> None:
    request = json.load(sys.stdin)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    model = llama_cpp.llama_model_load_from_file(request["path"].encode(), llama_cpp.llama_model_default_params())
    assert model, request["path"]
    options = llama_cpp.llama_context_default_params()
    options.embeddings, options.pooling_type, options.flash_attn_type = True, request["pooling"], 0
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    context = llama_cpp.llama_init_from_model(model, options)
    size = llama_cpp.llama_model_n_cls_out(model) if request["pooling"] == 4 else llama_cpp.llama_model_n_embd(model)
    vectors = []
    for ids in request["prompts"]:
        if memory := llama_cpp.llama_get_memory(context):
            llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
            batch.seq_id[at][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0
        if request["pooling"]:
            vectors.append(llama_cpp.llama_get_embeddings_seq(context, 0)[:size])
        else:
            rows = (llama_cpp.llama_get_embeddings_ith(context, at) for at in range(len(ids)))
            vectors.append([row[:size] for row in rows])
        llama_cpp.llama_batch_free(batch)
    print(json.dumps({"vectors": vectors}))


if __name__ == "__main__":
    main()
