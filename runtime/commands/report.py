"""The common flags of benchmarks, and the output of their reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The targets of a report."""

    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object on stdout.")] = False
    output_json: Annotated[Path | None, typer.Option(help="Write the whole report to this file, too.")] = None

    def deliver(self, report: dict[str, Any], text: str) -> None:
        """Print the report as JSON, or `text` for a person; and write it to a file if given."""
        if self.output_json is not None:
            self.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report) if self.as_json else text)


def listing(report: dict[str, Any], lines: dict[str, Any]) -> str:
    """A line for each name and value, and one for the environment."""
    written = [
        f"{name + ':':<40}{value:>14,.3f}" if isinstance(value, float) else f"{name + ':':<40}{value!s:>14}"
        for name, value in lines.items()
    ]
    environment = report["environment"]
    words = [environment[key] for key in ("model", "dtype", "device") if key in environment]
    words.append(f"{environment.get('num_threads', environment['num_cores'])} threads")
    return "\n".join([*written, "  ".join(["", *words])])
