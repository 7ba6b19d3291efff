"""Resolves the project's packages, whose names (`models`, `server`) other projects use, too.

`hidden_package` finds one that is hidden by another folder of the same name, `prefer_own` makes Python import ours. Run
as a script, `own_packages.py MODULE ARGUMENTS…` is `python -m MODULE ARGUMENTS…` with our packages. It imports none of
them, so that it works if all are hidden.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("runtime", "models", "server", "tokenizer", "numba_kernels")


class OwnFinder:
    """Finds the project's packages in their folders, and nothing else."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """`ROOT`'s package of this name; None for any other module."""
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in PACKAGES else None


def prefer_own() -> None:
    """Make Python import our packages from now on, whatever else has their names. For programs, not for libraries,
    which would hide their users' own modules."""
    if OwnFinder not in sys.meta_path:
        sys.meta_path.insert(0, OwnFinder)


def hidden_package() -> str | None:
    """An error message if one of our packages is hidden, or None."""
    for name in PACKAGES:
        folder = _folder(name)
        if folder is not None and folder != ROOT / name:
            return (
                f"{folder} hides xserv's own package {name!r}: rename it, start from another folder, or use the "
                "command xserv, which is not disturbed by it"
            )
    return None


def exit_if_hidden() -> None:
    """For `python -m`: ends the process with one line on stderr if one of our packages is hidden."""
    problem = hidden_package()
    if problem is not None:
        print(f"xserv: error: {problem}", file=sys.stderr)
        sys.exit(2)


def python_module(name: str) -> tuple[str, str]:
    """The arguments for Python to run a module of ours in another process, with our packages."""
    return str(Path(__file__).resolve()), name


def _folder(name: str) -> Path | None:
    """The folder from which Python imports, or has imported, this package."""
    module = sys.modules.get(name)
    try:
        spec = importlib.util.find_spec(name) if module is None else module.__spec__
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    place = places[0] if places else spec.origin
    return None if place is None else Path(place).resolve()


if __name__ == "__main__":
    prefer_own()
    sys.path.append(str(ROOT))  # in a checkout, for modules of `tests`
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
