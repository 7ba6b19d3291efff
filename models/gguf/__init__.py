"""GGUF: one file, or its shards, that holds a model's weights, config, tokenizer and chat template.

`formats` knows how numbers lie in blocks, `reader` the file, `tensor_names` and `config` what llama.cpp's converter
makes of a Hugging Face model, and `model_file` puts them together. `tokenizer.gguf` makes the tokenizer.
"""
