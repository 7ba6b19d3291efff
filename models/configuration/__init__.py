"""A model's `config.json` and the files beside it, read strictly."""
