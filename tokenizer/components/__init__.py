"""The steps around the model, as a tokenizer.json lists them: normalizers, pre-tokenizers, decoders, added tokens."""
