"""An NCCL without effects, for the dry driver (`driver.dry_driver`): one rank of any number."""

from __future__ import annotations

from typing import Any

from runtime.emulator.driver.dry_driver import DryDriver

VERSION = 22_700


class DryNccl:
    """Functions as `EmulatedNccl` has them; all succeed."""

    def __init__(self, driver: DryDriver) -> None:
        self._driver = driver

    def words(self, code: int, comm: Any = None) -> str:
        return "nothing fails"

    def _accept(self, *_: Any) -> tuple[int]:
        return (0,)

    def _handle(self, *_: Any) -> tuple[int, int]:
        return 0, 1

    def ncclGetVersion(self) -> tuple[int, int]:
        return 0, VERSION

    def ncclGetUniqueId(self) -> tuple[int, bytes]:
        return 0, bytes(128)

    def ncclCommGetAsyncError(self, comm: int) -> tuple[int, int]:
        return 0, 0

    def ncclMemAlloc(self, size: int) -> tuple[int, int]:
        return 0, int(self._driver.cuMemAlloc(size)[1])

    ncclCommInitRank = ncclCommWindowRegister = _handle
    ncclCommFinalize = ncclCommDestroy = ncclCommAbort = ncclCommWindowDeregister = ncclMemFree = _accept
    ncclAllReduce = ncclAllGather = ncclReduceScatter = ncclBroadcast = ncclSend = ncclRecv = emuEndStep = _accept
    ncclGroupStart = ncclGroupEnd = _accept
