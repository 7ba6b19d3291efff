"""The GPU's clocks and power while a case runs, by nvidia-smi, which samples twice a second. Needs only Python."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any

FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


@contextlib.contextmanager
def clocks(device: str) -> Iterator[dict[str, Any]]:
    """Fills the dict at the end of the block: {"samples": n, "sm_mhz": [least, median, most], ...}, or {"missing":
    why}. `device`: "cuda:N"."""
    found: dict[str, Any] = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        found["missing"] = "nvidia-smi is not there"
        return
    command = [program, f"--id={device.partition(':')[2] or 0}", f"--query-gpu={','.join(FIELDS.values())}"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        sampling = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits", "--loop-ms=500"], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield found
        finally:
            sampling.terminate()
            sampling.wait()
        found.update(_summary(output))


def _summary(output: IO[str]) -> dict[str, Any]:
    output.seek(0)
    lines = output.read().splitlines()
    samples = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line may be cut, and a field may be "[N/A]"
            samples.append([float(value) for value in line.split(",")])
    samples = [sample for sample in samples if len(sample) == len(FIELDS)]
    if not samples:
        return {"missing": f"nvidia-smi said {lines[:1]}"}
    columns = zip(FIELDS, zip(*samples, strict=True), strict=True)
    return {
        "samples": len(samples), **{name: [min(each), statistics.median(each), max(each)] for name, each in columns}
    }  # fmt: skip
