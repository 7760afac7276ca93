"""NF4 and FP4 as bitsandbytes serializes them (`Linear4bit`), byte for byte, without importing it.

`weight` U8 [n / 2, 1], two codes per byte over the flattened matrix, the first in the *high* nibble; `weight.absmax`
F32 (one per 64 values), or U8 with `weight.nested_absmax` and `weight.nested_quant_map` when the statistics are
quantized again; `weight.quant_map` F32 [16]; `weight.quant_state.bitsandbytes__nf4` U8: UTF-8 JSON.
The code tables and the rounding rule are those of bitsandbytes 0.50 (`functional.get_4bit_type`, `backends/default`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.checkpoint.outside import parse_object
from k3tool.formats.base import Match, ceil_div, corrupt, require
from k3tool.formats.codes import to_f32

BLOCK = 64
MAX_BLOCK = 1 << 16
STATE_PREFIX = "weight.quant_state.bitsandbytes__"
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
TABLES = {"nf4": NF4, "fp4": FP4}
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    states = [part for part in parts if part.startswith(STATE_PREFIX)]
    if not states:
        missing = f"{STATE_PREFIX}nf4 or fp4"
        return Match("nf4", "weight.absmax", missing=missing) if "weight.absmax" in parts else None
    kind = states[0][len(STATE_PREFIX) :]
    if len(states) != 1 or kind not in TABLES:
        return Match("nf4", problem=f"one quant_state of nf4 or fp4 is expected, found {', '.join(sorted(states))}")
    missing = require(parts, "weight", "weight.absmax", "weight.quant_map")
    if not missing and parts["weight.absmax"].dtype == "U8":
        missing = require(parts, "weight.nested_absmax", "weight.nested_quant_map")
    return Match(kind, states[0], missing=missing)


def logical_shape(parts: Mapping[str, Any], **_: Any) -> None:
    return None


def shape_problem(shape: tuple[int, ...], **_: Any) -> str:
    size = int(np.prod(shape))
    return f"{size} values are not whole blocks of {BLOCK}" if size % BLOCK else ""


def read_state(data: NDArray[np.uint8]) -> dict[str, Any]:
    """The parsed quant_state: shape, blocksize, and where they are there nested_blocksize and nested_offset are what
    their names say. Raises CheckpointCorrupt."""
    state = parse_object(bytes(data), where="quant_state", fail=corrupt)
    state.integers("shape")
    state.integer("blocksize", low=1, high=MAX_BLOCK)
    nested = {
        "nested_blocksize": state.integer("nested_blocksize", 256, low=1, high=MAX_BLOCK),
        "nested_offset": state.number("nested_offset", 0.0),
    }
    return {**state.values, **nested}


def write_state(kind: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.uint8]:
    """The quant_state as bitsandbytes packs it: keys in its order, JSON with its separators."""
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": _DTYPE_NAMES[dtype], "shape": list(shape)}
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def stored_tensors(
    shape: tuple[int, ...], *, group_size: int | None, dtype: str, kind: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    size = int(np.prod(shape))
    return {
        "weight": ("U8", (size // 2, 1)),
        "weight.absmax": ("F32", (ceil_div(size, BLOCK),)),
        "weight.quant_map": ("F32", (16,)),
        f"{STATE_PREFIX}{kind}": ("U8", (len(write_state(kind, shape, dtype)),)),
    }


def block_maxima(stored_parts: Mapping[str, NDArray], state: Mapping[str, Any]) -> NDArray[np.float32]:
    """Block maxima as float32, decoded where they are quantized themselves (`nested_quant_map`, blocks of 256)."""
    stored = stored_parts["weight.absmax"]
    if stored.dtype != np.uint8:
        return to_f32(stored)
    block = int(state["nested_blocksize"])
    maxima, table = stored_parts.get("weight.nested_absmax"), stored_parts.get("weight.nested_quant_map")
    if maxima is None or table is None or table.shape != (256,) or maxima.size != ceil_div(stored.size, block):
        raise corrupt("weight.nested_absmax and weight.nested_quant_map do not belong to weight.absmax")
    scale = to_f32(maxima).repeat(block)[: stored.size]
    return table[stored] * scale + np.float32(state["nested_offset"])


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...], *, kind: str) -> NDArray[np.float32]:
    key = f"{STATE_PREFIX}{kind}"
    if key not in parts:
        raise corrupt(f"{key} is missing")
    state = read_state(parts[key])
    size = int(np.prod(shape))
    packed = parts["weight"].reshape(-1).view(np.uint8)
    if tuple(state["shape"]) != shape or packed.size != ceil_div(size, 2):
        raise corrupt(f"quant_state says {state['shape']} in {packed.size} bytes, expected {list(shape)}")
    block = int(state["blocksize"])
    scale = block_maxima(parts, state)
    if scale.size != ceil_div(size, block):
        raise corrupt(f"weight.absmax holds {scale.size} blocks, {list(shape)} has {ceil_div(size, block)}")
    table = np.array(parts["weight.quant_map"], np.float32)
    if table.shape != (16,):
        raise corrupt(f"weight.quant_map has {list(table.shape)} values, expected 16")
    if kind == "fp4":
        table[8] = -table[0]  # the stored map says +0, the decoders of bitsandbytes apply the sign bit
    pairs = np.stack([table[np.arange(256) >> 4], table[np.arange(256) & 15]], axis=1)
    values = pairs[packed].reshape(-1)[:size]
    values *= scale.repeat(block)[:size]
    return values.reshape(shape)


def bounds(kind: str) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Midpoints of the sorted code table and the code of each interval; a tie goes to the lower value."""
    table = TABLES[kind]
    order = np.argsort(table, kind="stable")
    return (table[order[:-1]] + table[order[1:]]) / np.float32(2), order.astype(np.uint8)


def parts(
    kind: str, packed: NDArray[np.uint8], absmax: NDArray[np.float32], shape: tuple[int, ...], dtype: str
) -> dict[str, NDArray]:
    """What is stored beside the packed codes [n / 2, 1], in the order of writing."""
    return {
        "weight": packed,
        "weight.absmax": absmax,
        "weight.quant_map": TABLES[kind].copy(),
        f"{STATE_PREFIX}{kind}": write_state(kind, shape, dtype),
    }


def quantize(values: NDArray[np.float32], *, dtype: str, kind: str, **_: Any) -> dict[str, NDArray]:
    """The rule of bitsandbytes: x * (1 / absmax), clamped to [-1, 1], nearest code; codes and absmax in float32."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1)
    scaled = np.clip(blocks * (np.float32(1) / np.maximum(scale, np.float32(1e-38)))[:, None], -1, 1)
    middles, order = bounds(kind)
    codes = order[np.searchsorted(middles, scaled.reshape(-1), side="left")]
    return parts(kind, ((codes[0::2] << np.uint8(4)) | codes[1::2]).reshape(-1, 1), scale, values.shape, dtype)
