"""`xserv info`: devices, the model, and where the memory goes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.commands.options import EngineOptions

if TYPE_CHECKING:
    from runtime.device.properties import DeviceProperties


def info(
    engine: EngineOptions,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the devices, the model, and the memory table: weights, KV blocks, how many tokens fit.

    The model is loaded with the given flags, so the numbers are those that `serve` would have.
    """
    from runtime.llm import LLM

    with LLM(**engine.arguments()) as llm:
        facts = llm.client.info
    report: dict[str, Any] = {
        "devices": devices(facts.device),
        "model": {
            "name": facts.model_name,
            "path": facts.model_path,
            "architecture": facts.architecture,
            "dtype": facts.dtype,
            "quantization": facts.quantization,
            "device": facts.device,
            "vocab_size": facts.vocab_size,
            "max_model_len": facts.max_model_len,
        },
        "memory": {
            "weight_bytes": facts.weight_bytes,
            "kv_cache_bytes": facts.kv_cache_bytes,
            "kv_bytes_per_token": facts.kv_cache_bytes // (facts.num_blocks * facts.block_size),
            "block_size": facts.block_size,
            "num_blocks": facts.num_blocks,
            "num_tokens": facts.num_blocks * facts.block_size,
            "num_full_length_sequences": facts.num_blocks // -(-facts.max_model_len // facts.block_size),
        },
    }
    print(json.dumps(report) if as_json else as_text(report))


def devices(chosen: str) -> list[dict[str, Any]]:
    """Every device that there is, and the kinds that there are not with the reason; `chosen` is the engine's.

    Of an emulated device the properties are those of the product that it stands for, and shown where it is chosen.
    """
    from runtime.bench.environment import processor_name, usable_cores
    from runtime.device.device import Device
    from runtime.device.driver import open_driver
    from runtime.device.properties import query
    from runtime.engine.config import available_memory_bytes
    from runtime.errors import DeviceError

    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "is_usable": True,
            "description": f"{processor_name()}, {usable_cores()} cores",
            "available_bytes": available_memory_bytes(),
        }
    ]
    device = Device.parse(chosen)
    for arch in dict.fromkeys((None, device.arch)):  # the real driver's devices; the emulated one that is chosen
        try:
            driver = open_driver(arch)
            indices = range(driver.call("cuDeviceGetCount")) if arch is None else [device.index]
            for index in indices:
                full_name = f"cuda:{index}" if arch is None else device.type
                properties = query(driver, index)
                entry = {"device": full_name, "is_usable": True, "description": _described(properties)}
                found.append({**entry, "properties": asdict(properties)})
        except DeviceError as error:
            name = "cuda:0" if arch is None else device.type
            found.append({"device": name, "is_usable": False, "description": str(error)})
    return found


def _described(properties: DeviceProperties) -> str:
    """A GPU in one line."""
    major, minor = properties.capability
    parts = [
        properties.name,
        size(properties.total_memory_bytes),
        f"compute capability {major}.{minor}",
        f"{properties.num_sms} SMs at {properties.clock_khz / 1000:,.0f} MHz",
        f"{size(properties.shared_bytes_per_sm)} shared memory each",
        f"{size(properties.l2_bytes)} L2",
        f"memory at {properties.memory_clock_khz / 1000:,.0f} MHz, {properties.memory_bus_bits} bits",
    ]
    return ", ".join(parts)


def as_text(report: dict[str, Any]) -> str:
    """The report as aligned lines."""
    model, memory = report["model"], report["memory"]
    lines = ["devices"]
    for device in report["devices"]:
        free = f", {size(device['available_bytes'])} free" if "available_bytes" in device else ""
        mark = "" if device["is_usable"] else "not usable: "
        lines.append(f"  {device['device']:<18}{mark}{device['description']}{free}")
    lines += ["", "model"]
    lines += [f"  {name:<16}{value}" for name, value in model.items()]
    lines += [
        "",
        "memory",
        f"  weights         {size(memory['weight_bytes']):>12}",
        f"  KV cache        {size(memory['kv_cache_bytes']):>12}   {memory['num_blocks']} blocks of "
        f"{memory['block_size']} tokens, {size(memory['kv_bytes_per_token'])} a token",
        f"  together        {size(memory['weight_bytes'] + memory['kv_cache_bytes']):>12}",
        f"  tokens that fit {memory['num_tokens']:>12,}   {memory['num_full_length_sequences']} sequences of "
        f"{model['max_model_len']:,} tokens at once",
    ]
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    """Bytes in the unit that leaves a readable number: 512 B, 4.9 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
