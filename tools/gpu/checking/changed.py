"""The cases of gpu_check whose kernels have changed since an earlier bundle. Needs only Python.

`tools/gpu_bundle.py` notes in its folder which kernels each case launches, `CASES`: {section: {case: [kernel]}}. A
kernel is the same if the earlier bundle has its image, byte for byte. Grids and other numbers of launches are not
compared.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from tools.gpu.checking.unpack import KERNELS

CASES = "cases.json"


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Cases and sections that need not run again.

    Attributes:
        cases: by section, the cases that launch kernels, none of which has changed.
        sections: those all of whose cases are among them.
    """

    cases: dict[str, list[str]] = field(default_factory=dict)
    sections: frozenset[str] = frozenset()


def unchanged_since(earlier: Path, bundle: Path) -> Unchanged:
    """Compares two folders of `tools/gpu_bundle.py`; `earlier` may be a file of kernels.

    Raises ValueError if one of them has no kernels, or the new one does not say what cases launch.
    """
    if not (bundle / CASES).is_file():
        raise ValueError(f"{bundle} has no {CASES}: make it anew by tools/gpu_bundle.py")
    launched: dict[str, dict[str, list[str]]] = json.loads((bundle / CASES).read_text(encoding="utf-8"))
    before, now = _images(earlier), _images(bundle)
    same = {name for name, images in now.items() if images <= before.get(name, set())}
    cases = {
        section: [case for case, kernels in found.items() if kernels and same.issuperset(kernels)]
        for section, found in launched.items()
    }
    whole = frozenset(section for section, found in launched.items() if found and len(cases[section]) == len(found))
    return Unchanged(cases, whole)


def _images(place: Path) -> dict[str, set[tuple[str, str]]]:
    """(architecture, SHA-256) of the images of each kernel of a bundle, by its name."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in [place] if place.is_file() else sorted(place.glob(KERNELS)):
        try:
            with zipfile.ZipFile(path) as file:
                kernels = json.loads(file.read("manifest.json"))["kernels"]
            for each in kernels:
                found.setdefault(each["name"], set()).add((each["arch"], each["sha256"]))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ValueError(f"{path} is no bundle of kernels: {error}") from error
    if not found:
        raise ValueError(f"{place} has no kernels, must be a folder of tools/gpu_bundle.py or its {KERNELS}")
    return found
