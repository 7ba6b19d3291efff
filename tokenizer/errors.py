"""The errors that this package raises, and the one of a file that is a Git LFS pointer.

TokenizerError(ValueError)
├── TokenizerFileError      a file of the model folder cannot be read, or asks for what is not implemented
├── TokenIdError            an id that no vocabulary can hold (negative, too large, not an integer)
└── ChatTemplateError       a chat template is missing, does not compile, or refuses the conversation
"""

from __future__ import annotations


class TokenizerError(ValueError):
    """The base of this package's errors."""


class TokenizerFileError(TokenizerError):
    """A tokenizer file is malformed or asks for something that is not implemented.

    `file` is the file's name, `field` the path of the offending field in it ("model.unk_token"), `problem`
    what is wrong with the value.
    """

    def __init__(self, file: str, field: str, problem: str) -> None:
        self.file = file
        self.field = field
        self.problem = problem
        where = f"{file}: {field}: " if field else f"{file}: "
        super().__init__(where + problem)


class TokenIdError(TokenizerError):
    """A token id that no vocabulary can hold: negative, 2**32 or more, or not an integer."""


class ChatTemplateError(TokenizerError):
    """A chat template is missing, does not compile, fails while rendering, or refuses the conversation."""


_LFS_START = b"version https://git-lfs.github.com/spec/"  # in place of large files before `git lfs pull`


def pointer_problem(content: bytes) -> str | None:
    """An error message for a file that begins with `content`, if that is a pointer."""
    if not content.startswith(_LFS_START):
        return None
    return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file"
