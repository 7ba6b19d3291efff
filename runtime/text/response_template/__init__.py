"""`response_template` of tokenizer_config.json: a model's own declaration of the fields of its answers."""
