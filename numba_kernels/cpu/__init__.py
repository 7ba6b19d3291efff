"""The cpu backend's kernels: numba ``@njit`` functions around a few register tiles written as LLVM IR.

Importing this package settles, before any kernel is decorated, where numba keeps compiled code:
``<XDG_CACHE_HOME or ~/.cache>/xserv/numba/<digest>``, one folder for each content of these sources, version of numba
and kind of tile (`target`), because numba's own cache does not notice a change in a callee's file. Threads are our own
(`pool`): numba's layers sleep between kernels, or spin without end, or must not be entered by two Python threads.
"""

from __future__ import annotations

from pathlib import Path

import numba

from numba_kernels.cache import folder_for, sources_digest
from numba_kernels.cpu.target import TILES

numba.config.CACHE_DIR = str(folder_for(f"{sources_digest(*Path(__file__).parent.glob('*.py'))} {TILES}"))
