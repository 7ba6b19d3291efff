"""A tokenizer from a GGUF file's metadata, equal to the `tokenizer.json` that the file was made from."""
