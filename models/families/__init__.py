"""The families of architectures that the engine runs: a file for each, with its relatives.

A file of this folder names its `ARCHITECTURES`; nothing else lists them. `docs/examples/family.py` is an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from models.base import Architecture
from models.classifier import CLASSIFYING, base_of, classifier_of
from models.encoder import BIDIRECTIONAL, bidirectional_of


@cache
def known_architectures() -> dict[str, Architecture]:
    """Every architecture of the files here, by its name in `config.json`."""
    return _of_modules(module.name for module in iter_modules(__path__))


def architectures_naming(*words: str) -> dict[str, Architecture]:
    """The architectures of those files that have one of the words, in quotes, and the classifiers of decoders among
    them: a start imports one family, not all."""
    if any(word.startswith(BIDIRECTIONAL) for word in words):
        bases = architectures_naming(*(word.removeprefix(BIDIRECTIONAL) for word in words))
        return {f"{BIDIRECTIONAL}{name}": bidirectional_of(base) for name, base in bases.items()}
    causal = {word: base_of(word) for word in words if word.endswith(CLASSIFYING)}
    quoted = [f'"{word}"'.encode(errors="replace") for word in (*words, *causal.values())]
    found = _of_modules(name for name, source in _sources() if any(word in source for word in quoted))
    for word, base in causal.items():
        if word not in found and base in found:
            found[word] = classifier_of(found[base], word)
    return found


@cache
def architecture_named(name: str) -> Architecture:
    """The architecture of this name, which is known."""
    return architectures_naming(name)[name]


def _sources() -> Iterator[tuple[str, bytes]]:
    """Each module's name and source."""
    for folder in __path__:
        for path in Path(folder).glob("*.py"):
            if path.stem != "__init__":
                yield path.stem, path.read_bytes()


def _of_modules(names: Iterable[str]) -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for name in names:
        for architecture in import_module(f"{__name__}.{name}").ARCHITECTURES:
            assert architecture.name not in found, f"two families name {architecture.name}"
            found[architecture.name] = architecture
    return dict(sorted(found.items()))
