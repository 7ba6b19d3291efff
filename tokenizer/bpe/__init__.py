"""Byte pair encoding: the model of a tokenizer.json, its merge table, and the compiled loops."""
