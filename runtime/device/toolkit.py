"""Search for the libraries that compile kernels: NVRTC, NVVM with its libdevice, and nvJitLink, all of CUDA 13.

`cuda.pathfinder` looks for them in Python's packages, and below CUDA_PATH or CUDA_HOME. Where neither variable is set
and the packages lack NVVM, CUDA_HOME becomes the toolkit whose nvcc is on the PATH.
"""

from __future__ import annotations

import functools
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.device.errors import CompileError

_LIBRARIES = {"nvrtc": "nvidia-cuda-nvrtc", "nvvm": "nvidia-nvvm", "nvJitLink": "nvidia-nvjitlink"}
"""The libraries to load, and their packages."""
_VARIABLES = ("CUDA_PATH", "CUDA_HOME")


@functools.cache
def require_compiler() -> None:
    """Loads the libraries into this process. Raises CompileError with each missing one and its sources."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    home = toolkit()
    if home is not None and not _has_package("nvidia-nvvm") and not any(os.environ.get(each) for each in _VARIABLES):
        os.environ["CUDA_HOME"] = str(home)
    missing = []
    for library, package in _LIBRARIES.items():
        try:
            load_nvidia_dynamic_lib(library)
        except (DynamicLibNotFoundError, RuntimeError, OSError):  # by its version
            missing.append(f"lib{library} (pip install {package})")
    if missing:
        also = f"the CUDA toolkit {home}" if home is not None else "no CUDA toolkit, since nvcc is not on the PATH"
        raise CompileError(
            f"the kernels' compiler lacks {', '.join(missing)}; searched were Python's packages and {also}. CUDA_HOME "
            "names a toolkit of CUDA 13. A bundle of kernels in the cache (xserv kernels build --bundle, on a machine "
            "that has the compiler) needs none of this"
        )


def toolkit() -> Path | None:
    """The folder of the CUDA toolkit: CUDA_PATH, CUDA_HOME, or nvcc's; None where there is none."""
    for name in _VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    homes = (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda"))  # nvcc may be a script that calls another
    return next((home for home in homes if (home / "nvvm").is_dir()), None)


def toolkit_version() -> str:
    """The toolkit's folder and version, where kernels are compiled by it; "-" where Python's packages do it."""
    home = None if _has_package("nvidia-nvvm") else toolkit()
    if home is None:
        return "-"
    try:
        return f"{home} {(home / 'version.json').read_text(encoding='utf-8')}"
    except OSError:
        return str(home)


def _has_package(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
