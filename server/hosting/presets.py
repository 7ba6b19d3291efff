"""llama-server's presets of models, an INI file, as tables of `server.hosting.settings`.

A section is a model, `[*]` has what all of them share; keys are llama-server's options, long or short, or its variables
of the environment. Options about memory and threads have no effect and are logged; others without an option here are
refused by name.
"""

from __future__ import annotations

import configparser
import logging
from typing import Any

from server.config import ServerConfigError

logger = logging.getLogger("xserv.server")

_KEYS = {
    "model": ("m", "LLAMA_ARG_MODEL"),
    "hf-repo": ("hf", "hfr", "LLAMA_ARG_HF_REPO"),
    "ctx-size": ("c", "LLAMA_ARG_CTX_SIZE"),
    "parallel": ("np", "LLAMA_ARG_N_PARALLEL"),
    "alias": ("a", "LLAMA_ARG_ALIAS"),
    "mmproj": ("mm", "LLAMA_ARG_MMPROJ"),
    "chat-template-file": ("LLAMA_ARG_CHAT_TEMPLATE_FILE",),
    "seed": ("s", "LLAMA_ARG_SEED"),
    "load-on-startup": (),
}
_WITHOUT_EFFECT = frozenset(
    (
        "version", "n-gpu-layers", "gpu-layers", "ngl", "LLAMA_ARG_N_GPU_LAYERS", "threads", "t", "LLAMA_ARG_THREADS",
        "batch-size", "b", "LLAMA_ARG_BATCH", "ubatch-size", "ub", "LLAMA_ARG_UBATCH", "flash-attn", "fa",
        "LLAMA_ARG_FLASH_ATTN", "jinja", "LLAMA_ARG_JINJA", "mmap", "no-mmap", "mlock", "cache-ram",
        "LLAMA_ARG_CACHE_RAM", "stop-timeout", "dedup-cache-models", "host", "port", "api-key",
    )
)  # fmt: skip
_NAMES = {short: name for name, others in _KEYS.items() for short in (name, *others)}
_SHARED = "*"


class _Presets(configparser.ConfigParser):
    """Keys stay as they are: names of variables are in capitals."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def tables_of_presets(text: str) -> dict[str, dict[str, Any]]:
    """The table of each model. Raises `ServerConfigError` and `ValueError`."""
    parser = _Presets(
        strict=False, interpolation=None, delimiters=("=",), default_section="", comment_prefixes=(";", "#"),
        empty_lines_in_values=False,
    )  # fmt: skip
    try:
        parser.read_string(f"[{_SHARED}]\n{text}")  # keys before the first section are shared, too
    except configparser.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    shared = _named(parser[_SHARED].items(), _SHARED)
    ignored = {key for section in parser.sections() for key in parser[section] if key in _WITHOUT_EFFECT}
    if ignored - {"version"}:
        logger.warning("keys of presets without effect: %s", ", ".join(sorted(ignored - {"version"})))
    names = [name for name in parser.sections() if name != _SHARED]
    return {name: _table(name, shared | _named(parser[name].items(), name)) for name in names}


def _named(items: Any, section: str) -> dict[str, str]:
    """The keys of a section that have an effect, by their long names."""
    found = {}
    for key, value in items:
        if key in _WITHOUT_EFFECT:
            continue
        if key not in _NAMES:
            known = ", ".join(_KEYS)
            raise ServerConfigError(f"the preset [{section}]: there is no option for {key!r:.80}; there are {known}")
        found[_NAMES[key]] = value
    return found


def _table(name: str, values: dict[str, str]) -> dict[str, Any]:
    table: dict[str, Any] = {"model": values.get("model") or values.get("hf-repo") or name}
    if "alias" in values:
        table["aliases"] = [each.strip() for each in values["alias"].split(",") if each.strip()]
    for key, own, least in (("ctx-size", "max-model-len", 1), ("parallel", "max-num-seqs", 1), ("seed", "seed", 0)):
        if key in values and (number := _integer(name, key, values[key])) >= least:  # below, the default is meant
            table[own] = number
    if "mmproj" in values:
        table["mmproj"] = values["mmproj"]
    if "chat-template-file" in values:
        table["chat-template"] = values["chat-template-file"]
    is_loaded = _flag(name, "load-on-startup", values.get("load-on-startup", "false"))  # llama-server's default
    table["load"] = "start" if is_loaded else "demand"
    return table


def _integer(name: str, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ServerConfigError(f"the preset [{name}]: {key} must be an integer, got {value!r:.80}") from None


def _flag(name: str, key: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0", "on", "off", "enabled", "disabled"):
        raise ServerConfigError(f"the preset [{name}]: {key} must be true or false, got {value!r:.80}")
    return value.lower() in ("true", "1", "on", "enabled")
