"""vLLM's `--speculative-config`: the same as `--speculation` and `--num-speculative-tokens`, in JSON."""

from __future__ import annotations

import json
import logging
from typing import Any

from runtime.engine.config import DFLASH_PREFIX, DRAFT_PREFIX, EAGLE3_PREFIX
from runtime.engine.errors import RequestError

logger = logging.getLogger("xserv.commands")

_METHODS = {
    "ngram": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "suffix": "suffix", "mtp": "mtp", "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
}  # fmt: skip
_NOT_BUILT = ("eagle", "medusa", "mlp_speculator")
_SAMPLE_METHODS = {"rejection_sample_method": ("standard",), "draft_sample_method": ("greedy", "probabilistic")}
_WITH_FOLDERS = {
    "draft_model": (DRAFT_PREFIX, "a draft model"), "eagle3": (EAGLE3_PREFIX, "an EAGLE-3 drafter"),
    "dflash": (DFLASH_PREFIX, "a DFlash drafter"), "dspark": (DFLASH_PREFIX, "a DSpark drafter"),
}  # fmt: skip
_WITHOUT_EFFECT = {
    "prompt_lookup_max": "the longest agreement is looked for",
    "prompt_lookup_min": "two tokens have to agree",
    "disable_by_batch_size": "how many are tried is chosen from step to step",
    "suffix_decoding_max_tree_depth": "there is no tree",
    "suffix_decoding_max_cached_requests": "a tenant's latest 32,768 tokens are kept",
    "suffix_decoding_max_spec_factor": "how many are tried is chosen from step to step",
    "suffix_decoding_min_token_prob": "how many are tried is chosen from step to step",
}


def options_of(text: str) -> dict[str, Any]:
    """The equivalent engine options. Keys without effect are logged.

    Raises RequestError for another type, an unknown key, and an unsupported method."""
    param = "speculative_config"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--speculative-config is no JSON: {error}", param=param) from None
    if not isinstance(given, dict):
        raise RequestError(f"--speculative-config must be a JSON object, got {text:.80}", param=param)
    method = given.pop("method", None)
    if method is None and "model" in given:
        method = "draft_model" if str(given["model"]) not in _METHODS else given.pop("model")
    if method in _NOT_BUILT:
        raise RequestError(f"--speculative-config: the method {method!r} is not built", param=param)
    if isinstance(method, str) and method in _WITH_FOLDERS:
        prefix, what = _WITH_FOLDERS[method]
        folder = given.pop("model", None)
        if not isinstance(folder, str) or not folder:
            raise RequestError(f"--speculative-config: model must be {what}, got {folder!r:.80}", param=param)
        return _with_most({"speculation": prefix + folder}, given)
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join((*_WITH_FOLDERS, *(name for name in _METHODS if name.isalpha())))
        raise RequestError(f"--speculative-config: method must be one of {known}, got {method!r:.80}", param=param)
    return _with_most({"speculation": _METHODS[method]}, given)


def _acceptance_of(given: dict[str, Any]) -> dict[str, Any]:
    """Checks the keys of draft sampling and acceptance. Sampled drafts are accepted by rejection sampling; for greedy
    drafts both acceptance methods are the same."""
    values = {}
    for name, known in _SAMPLE_METHODS.items():
        values[name] = value = given.pop(name, None)
        if value is not None and value not in known:
            raise RequestError(
                f"--speculative-config: {name} must be one of {', '.join(known)}, got {value!r:.80}",
                param="speculative_config",
            )
    draws, keeps = values["draft_sample_method"], values["rejection_sample_method"]
    if draws == "probabilistic" or (keeps == "standard" and draws is None):
        return {"speculation_acceptance": "rejection"}
    return {}


def _with_most(options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Adds the number of proposals; logs or refuses the rest of ``given``."""
    param = "speculative_config"
    options |= _acceptance_of(given)
    most = given.pop("num_speculative_tokens", None)
    if most is not None:
        if type(most) is not int or most < 1:
            problem = f"num_speculative_tokens must be an integer of at least 1, got {most!r:.80}"
            raise RequestError(f"--speculative-config: {problem}", param=param)
        options["num_speculative_tokens"] = most
    for name in given:
        if name not in _WITHOUT_EFFECT:
            known = ", ".join(("method", "num_speculative_tokens", *_SAMPLE_METHODS, *_WITHOUT_EFFECT))
            raise RequestError(f"--speculative-config: no key {name!r:.80}; there are {known}", param=param)
        logger.warning("--speculative-config: %s has no effect: %s", name, _WITHOUT_EFFECT[name])
    return options
