"""The families of architectures that the engine runs: a file for each, with its relatives.

A file here, or in a folder here, names its `ARCHITECTURES`; nothing else lists them. `docs/examples/family.py` is an
example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from models.base import Architecture
from models.classifier import HEADS, base_of, classifier_of
from models.encoder import BIDIRECTIONAL, bidirectional_of, has_bidirectional


@cache
def known_architectures() -> dict[str, Architecture]:
    """Every architecture of the files here, by its name in `config.json`."""
    return _of_modules(name for name, _ in _files())


def architectures_naming(*words: str) -> dict[str, Architecture]:
    """The architectures of those files that have one of the words, in quotes, and the classifiers of decoders among
    them: a start imports one family, not all."""
    if any(word.startswith(BIDIRECTIONAL) for word in words):
        bases = architectures_naming(*(word.removeprefix(BIDIRECTIONAL) for word in words))
        return {
            f"{BIDIRECTIONAL}{name}": bidirectional_of(base) for name, base in bases.items() if has_bidirectional(base)
        }
    causal = {word: base_of(word) for word in words if word.endswith(HEADS)}
    quoted = [f'"{word}"'.encode(errors="replace") for word in (*words, *causal.values())]
    found = _of_modules(name for name, path in _files() if any(map(path.read_bytes().__contains__, quoted)))
    for word, base in causal.items():
        if word not in found and base in found:
            found[word] = classifier_of(found[base], word)
    return found


@cache
def architecture_named(name: str) -> Architecture:
    """The architecture of this name, which is known."""
    return architectures_naming(name)[name]


def _files() -> Iterator[tuple[str, Path]]:
    """Each module's name in this package, and its file."""
    for folder in map(Path, __path__):
        for path in folder.rglob("*.py"):
            if path.stem != "__init__":
                yield ".".join(path.relative_to(folder).with_suffix("").parts), path


def _of_modules(names: Iterable[str]) -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for name in names:
        for architecture in import_module(f"{__name__}.{name}").ARCHITECTURES:
            assert architecture.name not in found, f"two families name {architecture.name}"
            found[architecture.name] = architecture
    return dict(sorted(found.items()))
