"""The ids of texts that are embedded, classified or ranked."""

from __future__ import annotations

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import check_truncation
from runtime.pooling import PoolingInfo
from tokenizer import Tokenizer


def prompted(text: str, pooling: PoolingInfo, prompt_name: str | None = None) -> str:
    """The text after the model's prompt of that name, or after its default one. Raises ``RequestError``."""
    name = pooling.default_prompt if prompt_name is None else prompt_name
    if not name:
        return text
    if name not in pooling.prompts:
        known = ", ".join(map(repr, pooling.prompts)) or "none"
        raise RequestError(f"the model has no prompt {name!r:.80}; it has {known}", param="prompt_name")
    return pooling.prompts[name] + text


def num_unpooled(tokenizer: Tokenizer, pooling: PoolingInfo, prompt_name: str | None = None) -> int:
    """The first tokens of a text after the model's prompt of that name that are not pooled: the prompt's, with the
    special ones before it, unless the model pools them."""
    name = pooling.default_prompt if prompt_name is None else prompt_name
    if pooling.pools_prompt or not pooling.prompts.get(name):
        return 0
    ids = tokenizer.encode(pooling.prompts[name])
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


def check_cut(token_ids: list[int], truncate_prompt_tokens: int | None) -> None:
    """Raises ``RequestError`` if a text that was cut to so many tokens still has more: the special ones around it, and
    what a template writes around a pair, are never cut. Also if the number is no count."""
    check_truncation(truncate_prompt_tokens)
    if truncate_prompt_tokens is not None and 0 < truncate_prompt_tokens < len(token_ids):
        raise RequestError(
            f"truncate_prompt_tokens is {truncate_prompt_tokens}, and {len(token_ids)} tokens cannot be cut: send at"
            f" least {len(token_ids)}",
            param="truncate_prompt_tokens",
        )


def pair_of(
    tokenizer: Tokenizer, pooling: PoolingInfo, query: str, document: str, most: int | None = None
) -> tuple[list[int], int | None]:  # fmt: skip
    """The ids of a query and a document, as the model was trained to rank them, and the first of the document's type,
    or None. With ``most`` the longer of both is cut at its end, or, in a template, the document."""
    if pooling.pair_chat is not None:
        return _chat_of_pair(tokenizer, pooling, query, document, most), None
    if not pooling.pair_template:
        return tokenizer.encode_pair(query, document, most)
    before, pair, after = pooling.pair_template
    head, between = pair.split("{query}")
    pair = head + query + between.replace("{document}", document)
    start, inner, end = (tokenizer.encode(part, add_special_tokens=False) for part in (before, pair, after))
    room = None if most is None else max(0, most - len(start) - len(end))
    return start + inner[:room] + end, None


def _chat_of_pair(
    tokenizer: Tokenizer, pooling: PoolingInfo, query: str, document: str, most: int | None
) -> list[int]:  # fmt: skip
    """The chat template's prompt of a pair, after the default prompt as a system message."""
    system = [{"role": "system", "content": prompted("", pooling)}] if pooling.default_prompt else []

    def rendered(text: str) -> list[int]:
        messages = [*system, {"role": "query", "content": query}, {"role": "document", "content": text}]
        ids: list[int] = tokenizer.apply_chat_template(messages, **(pooling.pair_chat or {}))
        return ids

    ids = rendered(document)
    if most is not None and len(ids) > most:
        own = tokenizer.encode(document, add_special_tokens=False)
        for kept in range(len(own) - len(ids) + most, -1, -1):  # a cut may join other tokens
            ids = rendered(tokenizer.decode(own[:kept]))
            if len(ids) <= most:
                break
    return ids
