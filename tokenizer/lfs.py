"""Git LFS: what a clone holds in place of a large file before `git lfs pull`."""

from __future__ import annotations

_START = b"version https://git-lfs.github.com/spec/"


def pointer_problem(content: bytes) -> str | None:
    """What to say of a file that begins with `content`, if it is a pointer and not the file itself."""
    if not content.startswith(_START):
        return None
    return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file"
