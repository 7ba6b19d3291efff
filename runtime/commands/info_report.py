"""The report of `xserv info`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import llvmlite.binding as llvm
import msgspec

from models.checkpoints.model_files import open_model
from models.registry import declare_model
from numba_kernels.cpu.target import IS_AMX_REFUSED, TILES
from runtime.bench.environment import processor_name, usable_cores
from runtime.device.context import DeviceProperties, query_properties
from runtime.device.device import Device
from runtime.device.driver import open_driver
from runtime.engine.config import EngineConfig
from runtime.engine.limits import available_memory_bytes
from runtime.engine.make_engine import describe_engine
from runtime.engine.making.load_settings import load_settings
from runtime.engine.messages import CacheGroupInfo, EngineInfo, PoolInfo
from runtime.errors import DeviceError
from runtime.kv.kinds import FULL, CacheKind, blocks_of_sequence, window_of
from runtime.text.formats import AnswerFormat
from runtime.text.load import load_tokenizer
from tokenizer.errors import TokenizerFileError


def show(settings: dict[str, Any], *, load_format: Any, as_json: bool) -> None:
    """Prints the report on the engine with these options."""
    model = settings.pop("model", None)
    facts = describe_engine(model, config := EngineConfig(**settings))
    declared = declare_model(facts.model_path, load_format=load_format, **load_settings(config))
    report: dict[str, Any] = {
        "devices": devices(facts.device),
        "model": {
            "name": facts.model_name,
            "path": facts.model_path,
            "architecture": facts.architecture,
            "dtype": facts.dtype,
            "quantization": facts.quantization,
            "kv_cache_dtype": facts.kv_cache_dtype,
            "device": facts.device,
            "vocab_size": facts.vocab_size,
            "max_model_len": facts.max_model_len,
            "answers": answers(facts.model_path),
        },
        "rounded_activations": dict(declared.rounded_activations),
        "memory": memory(facts),
        "ranks": [msgspec.structs.asdict(rank) for rank in facts.ranks],
    }
    if load_format != "dummy":
        files = open_model(facts.model_path, config.hf_overrides, config.mmproj)
        report["stored_bytes"] = files.checkpoint().bytes_by_format()
    print(json.dumps(report) if as_json else as_text(report))


def answers(model_path: str) -> str:
    """How the parts of an answer are told apart, and why."""
    try:
        return AnswerFormat.of(load_tokenizer(model_path)).origin
    except TokenizerFileError as error:
        return f"the tokenizer cannot be read: {error}"


def memory(facts: EngineInfo) -> dict[str, Any]:
    """Bytes of weights and KV cache, and of a sequence: by kind of layers, and for ``max_model_len`` tokens in all.
    During prefill, layers with a window also hold a step's tokens; without windows a sequence would take
    ``full_bytes``."""
    size, length, every = facts.block_size, facts.max_model_len, facts.cache_groups
    pools = facts.pools or (PoolInfo(facts.num_blocks, facts.kv_cache_bytes // facts.num_blocks),)

    def blocks_of(group: CacheGroupInfo, kind: CacheKind | None = None, chunk: int = 1) -> int:
        return blocks_of_sequence(
            length, (kind if kind and group.kind.follows_tokens else group.kind,), size, chunk=min(chunk, length)
        )

    def bytes_of(groups: Sequence[CacheGroupInfo], kind: CacheKind | None = None, chunk: int = 1) -> int:
        return sum(pools[group.pool].block_bytes * blocks_of(group, kind, chunk) for group in groups)

    def token_bytes(groups: Sequence[CacheGroupInfo]) -> int:
        return sum(pools[group.pool].block_bytes for group in groups if group.kind.follows_tokens) // size

    groups_of = [[group for group in every if group.pool == pool] for pool in range(len(pools))]
    of_tokens = [sum(group.kind.follows_tokens for group in own) for own in groups_of]
    kinds: list[dict[str, Any]] = []
    for kind in dict.fromkeys(group.kind for group in every):
        groups = [group for group in every if group.kind == kind]
        kinds.append(
            {
                "window": window_of(kind),
                "is_state": not kind.follows_tokens,
                "num_layers": sum(group.num_layers for group in groups),
                "num_padding": sum(group.num_padding for group in groups),
                "num_groups": len(groups),
                "bytes_per_token": token_bytes(groups),
                "bytes_per_sequence": bytes_of(groups),
                "num_sequences": min(
                    pools[pool].num_blocks // sum(blocks_of(group) for group in groups if group.pool == pool)
                    for pool in {group.pool for group in groups}
                ),
            }
        )
    num_layers = sum(kind["num_layers"] for kind in kinds)
    num_places = num_layers + sum(kind["num_padding"] for kind in kinds)
    return {
        "weight_bytes": facts.weight_bytes,
        "mapped_bytes": facts.mapped_bytes,
        "kv_cache_bytes": facts.kv_cache_bytes,
        "kv_bytes_per_token": token_bytes(every),
        "block_size": size,
        "num_blocks": facts.num_blocks,
        "num_tokens": min((pool.num_blocks // own for pool, own in zip(pools, of_tokens) if own), default=0) * size,
        "num_full_length_sequences": min(
            pool.num_blocks // sum(map(blocks_of, own)) for pool, own in zip(pools, groups_of)
        ),
        "cache_groups": kinds,
        "bytes_per_sequence": bytes_of(every),
        "prompt_bytes_per_sequence": bytes_of(every, chunk=facts.max_num_batched_tokens),
        "full_bytes_per_sequence": bytes_of(every, FULL) * num_layers // max(1, num_places),
    }


def devices(chosen: str) -> list[dict[str, Any]]:
    """Every available device, and the unavailable kinds with the reason; `chosen` is the engine's.

    An emulated device has the emulated product's properties, and is shown if chosen.
    """
    refused = " (Linux gives no leave to use AMX)" if IS_AMX_REFUSED else ""
    processor = f"{processor_name()} ({llvm.get_host_cpu_name()})"
    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "is_usable": True,
            "description": f"{processor}, {usable_cores()} cores, tiles {TILES}{refused}",
            "available_bytes": available_memory_bytes(),
        }
    ]
    device = Device.parse(chosen)
    for arch in dict.fromkeys((None, device.arch)):  # the real driver's devices, and a chosen emulated one
        try:
            driver = open_driver(arch)
            indices = range(driver.call("cuDeviceGetCount")) if arch is None else [device.index]
            for index in indices:
                full_name = f"cuda:{index}" if arch is None else device.type
                properties = query_properties(driver, index)
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
    if "stored_bytes" in report:
        lines += ["", "stored tensors"]
        lines += [f"  {name:<16}{size(num_bytes):>12}" for name, num_bytes in report["stored_bytes"].items()]
    if "rounded_activations" in report:
        lines += ["", "activations"]
        lines += [
            f"  {name}: rows of x are rounded to {how}; with --activations float they are not"
            for name, how in report["rounded_activations"].items()
        ] or ["  products take rows of x in floats"]
    sequences = f"{memory['num_full_length_sequences']} sequences of {model['max_model_len']:,} tokens at once"
    lines += [
        "",
        "memory",
        f"  weights         {size(memory['weight_bytes']):>12}",
        *([f"  read by row     {size(memory['mapped_bytes']):>12}   not loaded"] if memory["mapped_bytes"] else []),
        f"  KV cache        {size(memory['kv_cache_bytes']):>12}   {memory['num_blocks']} blocks of "
        f"{memory['block_size']} tokens, {size(memory['kv_bytes_per_token'])} a token",
        f"  together        {size(memory['weight_bytes'] + memory['kv_cache_bytes']):>12}",
        f"  tokens that fit {memory['num_tokens']:>12,}   {sequences}",
    ]
    if any(kind["window"] or kind["is_state"] for kind in memory["cache_groups"]):
        lines += ["", f"a sequence of {model['max_model_len']:,} tokens"]
        for kind in memory["cache_groups"]:
            name = "all tokens" if kind["window"] is None else f"last {kind['window']:,}"
            name = "states" if kind["is_state"] else name
            groups = "1 group" if kind["num_groups"] == 1 else f"{kind['num_groups']} groups"
            padding = f", room for {kind['num_padding']} more" if kind["num_padding"] else ""
            each = f"{size(kind['bytes_per_token'])} a token"
            if kind["is_state"]:
                each = f"whatever the length: {kind['num_sequences']:,} sequences at once"
            lines.append(
                f"  {name:<16}{size(kind['bytes_per_sequence']):>12}   {kind['num_layers']} layers in "
                f"{groups}{padding}, {each}"
            )
        share = memory["bytes_per_sequence"] / memory["full_bytes_per_sequence"]
        lines += [
            f"  together        {size(memory['bytes_per_sequence']):>12}   {share:.1%} of "
            f"{size(memory['full_bytes_per_sequence'])}, which they would take without windows",
            f"  in its prompt   {size(memory['prompt_bytes_per_sequence']):>12}   with the tokens of a step beside the "
            "windows",
        ]
    if report.get("ranks"):
        lines += ["", "ranks"]
        lines += [
            f"  {rank['number']:<5}stage {rank['stage']:<3}"
            f"layers {rank['first_layer']:>3} to {rank['end_layer'] - 1:<4}"
            f"{size(rank['weight_bytes']):>12} weights {size(rank['kv_cache_bytes']):>12} KV cache"
            for rank in report["ranks"]
        ]
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    """Bytes in a readable unit: 512 B, 4.9 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
