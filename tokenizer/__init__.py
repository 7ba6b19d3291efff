"""Text to token ids and back: byte-level BPE, SentencePiece's models, incremental decoding, chat templates.

    from tokenizer import IncrementalDecoder, Tokenizer

    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    decoder = IncrementalDecoder(tokenizer, prompt_ids=ids)
    text = decoder.push([9906]) + decoder.flush()

The package does not depend on models, engines or servers. `regex`, `jinja2` and numba are imported on first use.
"""

from tokenizer.errors import ChatTemplateError, TokenIdError, TokenizerError, TokenizerFileError
from tokenizer.incremental import IncrementalDecoder
from tokenizer.templates.template_forms import ContentForm, TemplateForms
from tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplateError",
    "ContentForm",
    "IncrementalDecoder",
    "TemplateForms",
    "TokenIdError",
    "Tokenizer",
    "TokenizerError",
    "TokenizerFileError",
]
