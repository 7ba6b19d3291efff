"""Git LFS pointers, which stand in place of large files before `git lfs pull`."""

from __future__ import annotations

_START = b"version https://git-lfs.github.com/spec/"


def pointer_problem(content: bytes) -> str | None:
    """An error message for a file that begins with `content`, if that is a pointer."""
    if not content.startswith(_START):
        return None
    return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file"
