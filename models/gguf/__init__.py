"""GGUF: one file, or its shards, that holds a model's weights, config, tokenizer and chat template.

`formats` describes the block formats, `reader` reads the file, `architectures` and `config` undo llama.cpp's conversion
of a Hugging Face model, and `model_file` combines them. `tokenizer.gguf` makes the tokenizer.
"""
