"""A tokenizer out of a GGUF file's metadata: the same as the `tokenizer.json` that the file was made from."""
