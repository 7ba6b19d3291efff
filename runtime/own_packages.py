"""Which folder Python takes for each of the project's packages, whose names (`models`, `server`) others use, too.

`hidden_package` finds one that another folder of the same name hides, `prefer_own` makes Python take ours all the same.
Run as a script, `own_packages.py MODULE ARGUMENTS…` is `python -m MODULE ARGUMENTS…` with our packages. It imports
nothing of ours, so that it works where all of them are hidden.
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
    """Finds the project's packages where they are, and nothing else."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """`ROOT`'s package of this name; None for any other module."""
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in PACKAGES else None


def prefer_own() -> None:
    """Python takes our packages from now on, wherever others of their names lie. A program may do this, a library may
    not: its users' own modules would be gone."""
    if OwnFinder not in sys.meta_path:
        sys.meta_path.insert(0, OwnFinder)


def hidden_package() -> str | None:
    """What to say where one of our packages is hidden, or None."""
    for name in PACKAGES:
        folder = _folder(name)
        if folder is not None and folder != ROOT / name:
            return (
                f"{folder} hides xserv's own package {name!r}: rename it, start from another folder, or use the "
                "command xserv, which is not disturbed by it"
            )
    return None


def exit_if_hidden() -> None:
    """For `python -m`: ends the process with one line on stderr where one of our packages is hidden."""
    problem = hidden_package()
    if problem is not None:
        print(f"xserv: error: {problem}", file=sys.stderr)
        sys.exit(2)


def python_module(name: str) -> tuple[str, str]:
    """What Python is given to run a module of ours in another process, with our packages."""
    return str(Path(__file__).resolve()), name


def _folder(name: str) -> Path | None:
    """Where Python finds this package, or has found it."""
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
