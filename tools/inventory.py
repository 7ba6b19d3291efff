"""Prints the public interface as JSON. To compare two states of the project:

    python -m tools.inventory > before.json
    python -m tools.inventory | diff before.json -

It has flags and defaults of every command, option fields and defaults, public Python names with their parameters,
fields of the API, names of metrics, `XSERV_*` variables, and which model loads in which format on which device.
`--ptx sm_90a` adds a digest of every kernel's PTX, which compiles for half an hour with an empty kernel cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin, is_typeddict

import msgspec
import typer

from models.families import known_architectures
from models.gguf.architectures import ARCHITECTURES
from models.quantized.scheme import _READERS
from models.registry import declare_model
from numba_kernels.cuda.registry import specialisations
from runtime.cli import app
from runtime.device.kernel_cache import KernelCache, is_meant_for
from runtime.engine.messages import EngineStats, RankInfo, RoutingStats
from runtime.engine.process.compile_kernels import Wanted, compile_kernels
from runtime.errors import XservError
from runtime.linear.format import FORMATS, GGML_FORMATS, GROUP_FORMATS, QUANTIZATIONS
from server.app import Application
from server.description.openapi import description

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("runtime", "runtime.facade.xserv", "runtime.llm", "runtime.ops", "server", "tokenizer", "models")
SETTINGS = (
    "runtime.engine.config.EngineConfig", "runtime.engine.config.SchedulingConfig",
    "runtime.linear.options.LoadSettings", "runtime.SamplingParams", "runtime.StructuredOutputsParams",
    "runtime.BeamSearchParams", "server.config.ServerConfig",
)  # fmt: skip
DEVICES = ("cpu", "emulated:sm_80", "emulated:sm_90a")


def commands() -> dict[str, Any]:
    """Each command and, by name, the fields of its options in `-h`, without prose."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        context = typer.Context(command, info_name=path)
        yield path, {" ".join([*each.opts, *each.secondary_opts]): _option(each) for each in command.params}
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            yield from walk(command.get_command(context, name), f"{path} {name}")

    return dict(walk(typer.main.get_command(app), "xserv"))


def _option(parameter: Any) -> dict[str, Any]:
    choices = sorted(map(str, getattr(parameter.type, "choices", ())))
    kind = [parameter.type.name, *choices, *["repeats"] * parameter.multiple]
    return {"default": _plain(parameter.default), "kind": " ".join(kind)}


def settings() -> dict[str, Any]:
    """Each class of options, and its fields' defaults."""
    found: dict[str, Any] = {}
    for path in SETTINGS:
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if is_typeddict(kind):
            found[path] = sorted(kind.__annotations__)
        else:
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
            found[path] = {each.name: _default(each) for each in fields}
    return found


def _default(field: Any) -> Any:
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if field.default_factory not in missing:
        return _plain(field.default_factory())
    return "required" if field.default in missing else _plain(field.default)


def names() -> dict[str, dict[str, str]]:
    """Each public name, and its parameters; of a class those of its public methods."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(importlib.import_module("runtime") if "facade" in room else module, name)
            own = found[f"{room}.{name}"] = {"": _parameters(value)}
            if inspect.isclass(value):
                public = (each for each in dir(value) if not each.startswith("_") and not hasattr(Exception, each))
                own |= {each: _parameters(inspect.getattr_static(value, each)) for each in public}
    return found


def _parameters(value: Any) -> str:
    value = getattr(value, "__func__", value)  # of a class method
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # not a function, or an exception's class
        return type(value).__name__
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return re.sub(r" at 0x\w+", "", str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)))


def openapi() -> dict[str, Any]:
    """A digest of /openapi.json, its routes, and the fields of each of its schemas."""
    of_texts, of_both = (description(("model",), 1000, reads_images=reads_images) for reads_images in (False, True))
    of_texts["info"]["version"] = of_both["info"]["version"] = ""
    schemas = of_both["components"]["schemas"]
    return {
        "digests": [_digest(json.dumps(each, sort_keys=True)) for each in (of_texts, of_both)],
        "routes": sorted(f"{method} {path}" for path, item in of_both["paths"].items() for method in item),
        "schemas": {name: sorted(schema.get("properties", ())) for name, schema in schemas.items()},
    }


def metrics() -> dict[str, list[str]]:
    """Names of all metrics, those of speculation, ranks and routing included, and their labels."""
    given: dict[str, Any] = {
        each.name: (0,) if get_origin(each.type) is tuple else 0 for each in msgspec.structs.fields(EngineStats)
    }
    stats = SimpleNamespace(**given | {"iteration_token_counts": ()})
    info = SimpleNamespace(
        ranks=(RankInfo(0, 0, 0, 1, 0, 0),), block_size=1, num_blocks=1, dtype="", max_model_len=1,
        transfer_addresses=("",),
    )  # fmt: skip
    routing = RoutingStats(policy="", num_requests=[0], num_found_tokens=0, num_moved=0, num_digests=0, num_untaken=0)
    client: Any = SimpleNamespace(info=info, stats=lambda: stats, routing=routing)
    client.engines = (client,)
    application = Application(["model"], log_writer=SimpleNamespace(num_lost=0))  # type: ignore[arg-type]
    application.http_metrics.finish("/", "GET", 200, 0.0)
    application.state.metrics.attach(client)
    return {
        f"{family.type} {family.name}": sorted({label for sample in family.samples for label in sample.labels})
        for family in application.state.metrics.registry.collect() if family.name.startswith(("vllm:", "xserv:"))
    }  # fmt: skip


def variables() -> list[str]:
    """The environment variables in the sources."""
    rooms = ("runtime", "server", "models", "tokenizer", "numba_kernels")
    texts = (path.read_text("utf-8") for room in rooms for path in (ROOT / room).rglob("*.py"))
    return sorted({name for text in texts for name in re.findall(r"XSERV_[A-Z_]+", text)})


def loadable() -> dict[str, Any]:
    """Families and formats by name; and of the goldens' configs, by quantization while loading and device, the bytes
    that a model of random weights would have, or the refusal."""

    def declared(folder: Path, device: str, quantization: str) -> int | str:
        try:
            return declare_model(folder, load_format="dummy", device=device, quantization=quantization).weight_bytes
        except XservError as error:
            return str(error)

    folders = sorted(path.parent for path in (ROOT / "tests" / "models").rglob("goldens/*/config.json"))
    folders += [ROOT / "models" / name for name in ("demo", "demo_hybrid", "demo_moe", "demo_vision")]
    return {
        "architectures": sorted(known_architectures()), "gguf": sorted(ARCHITECTURES), "schemes": sorted(_READERS),
        "formats": {name: each.has_gpu_kernels for name, each in (FORMATS | GGML_FORMATS | GROUP_FORMATS).items()},
        "declared": {
            f"{folder.relative_to(ROOT)} {quantization} {device}": declared(folder, device, quantization)
            for folder in folders for quantization in QUANTIZATIONS for device in DEVICES
        },
    }  # fmt: skip


def kernels(arch: str) -> dict[str, str]:
    """A digest of each kernel's PTX."""
    compile_kernels(Wanted(arch=arch, is_ptx=True), lambda *_: None)
    get, meant = KernelCache().get, (each for each in specialisations() if is_meant_for(each, arch))
    return {each.name: _digest(str(get(each, arch, is_ptx=True).image)) for each in meant}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else re.sub(r" at 0x\w+", "", repr(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints as JSON all that users and their programs can name.")
    parser.add_argument("--ptx", metavar="ARCH", help="Also digests of all kernels' PTX for this architecture.")
    arch = parser.parse_args().ptx
    parts = (commands, settings, names, openapi, metrics, variables, loadable)
    found: dict[str, Any] = {part.__name__: part() for part in parts} | ({"ptx": kernels(arch)} if arch else {})
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
