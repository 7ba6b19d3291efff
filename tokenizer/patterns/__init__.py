"""The patterns of a tokenizer.json: translated for the `regex` module, and as automata over bytes."""
