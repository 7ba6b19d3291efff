"""The cpu backend's kernels: numba ``@njit`` functions around a few register tiles written as LLVM IR.

Compiled code is kept in one folder for each content of these sources, version of numba and kind of tile (`target`); see
`numba_kernels.cache`. Threads are our own (`pool`): numba's layers sleep between kernels, or spin without end, or must
not be entered by two Python threads.
"""

from __future__ import annotations

from pathlib import Path

from numba_kernels.cache import folder_for
from numba_kernels.cpu.target import TILES
from numba_kernels.source_digests import sources_digest

CODE_FOLDER = folder_for(f"{sources_digest(*Path(__file__).parent.rglob('*.py'))} {TILES}")
