"""The tokenizer of a model folder, or None where the folder has none: such a model serves token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer's files."""
    has_pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    return has_pair or (folder / "tokenizer.json").is_file()


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Raises ``TokenizerFileError`` when there is a tokenizer and it cannot be read."""
    folder = Path(folder)
    if not has_tokenizer(folder):
        return None
    from tokenizer import Tokenizer

    return Tokenizer.from_pretrained(folder)
