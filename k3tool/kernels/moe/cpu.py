"""Routed experts as compiled CPU code: packed weights are read as they are and widened in registers or cache.

Few tokens: one pass per token over the rows of its K experts, bound by memory or by decoding. Many tokens: they
are grouped by expert and go through the tiled product.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import pool, product, tape, target
from k3tool.kernels.cpu.formats import Format, Fp4, Plain
from k3tool.kernels.cpu.product import BLOCK_ROWS, DEPTH
from k3tool.kernels.cpu.rows import Job
from k3tool.kernels.cpu.scaled import Scaled
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.moe import emit
from k3tool.kernels.moe.activation import CAPS, caps_of, gated_activation
from k3tool.kernels.moe.experts import DenseExperts, Experts, PackedExperts, check_ids
from k3tool.kernels.moe.scaled import ScaledExperts
from k3tool.kernels.mxfp4 import reference as fp4

__all__ = ["experts_forward", "gated_activation"]

ITEM_TOKENS = 64  # tokens of one expert that pass together: their panel should stay in the second-level cache
GROUPED_FROM = 4  # mean tokens per visited expert from which grouping pays
HIDDEN_BYTES = 64 << 20  # hidden units kept at a time

_PLAIN = {torch.bfloat16: ("bfloat16", 2), torch.float16: ("float16", 2), torch.float32: ("float32", 4)}


class _Compiled:
    """Compiled functions for one storage format and their working memory."""

    def __init__(self, format_: Format) -> None:
        machine = target.host()
        self.format, self.tile = format_, product.tiling(machine)
        module = ir.Module(name=f"k3tool.moe.{format_.name}")
        block_product = product.emit_block_product(module, format_, self.tile, product.emit_micros(module, self.tile))
        for one_token in (emit.emit_order, emit.emit_gate_up, emit.emit_down):
            one_token(module, format_, self.tile)
        for many_tokens in (emit.emit_expand, emit.emit_contract):
            many_tokens(module, format_, self.tile, block_product)
        library = target.Library(module, machine)
        self.order, self.gate_up, self.down, self.expand, self.contract = (
            Job(library, name, emit.CALL) for name in ("order", "gate_up", "down", "expand", "contract")
        )
        self.scratch = Scratch()


@dataclass(frozen=True)
class _Call:
    """The arguments that all jobs of one call share; `run` adds those of a job."""

    compiled: _Compiled
    shared: dict[str, int]

    def run(self, job: Job, chunks: int, **own: int) -> None:
        values = {**self.shared, **own}
        job.run(chunks, *(values.get(field, 0) for field in emit.CALL))


@cache
def _compiled(format_name: str | tuple[str, int, str]) -> _Compiled:
    machine = target.host()
    if isinstance(format_name, tuple):
        return _Compiled(Scaled(*format_name, machine))
    if format_name.startswith("fp4_"):
        return _Compiled(Fp4(int(format_name[4:]), machine))
    return _Compiled(Plain(*_PLAIN[getattr(torch, format_name)], machine.float_lanes))


@dataclass(frozen=True)
class _Layer:
    """The fixed arguments of one layer, with the small tensors that they point to."""

    compiled: _Compiled
    arguments: ctypes.Array[ctypes.c_int64]
    owned: tuple[Tensor, ...]


_LAYERS: WeakKeyDictionary[Experts, _Layer] = WeakKeyDictionary()


def _layer(experts: Experts) -> _Layer:
    layer = _LAYERS.get(experts)
    if layer is None:
        with tape.aside():
            layer = _LAYERS[experts] = _prepare(experts)
    return layer


def _prepare(experts: Experts) -> _Layer:
    ones = torch.ones(experts.num_experts)
    name: str | tuple[str, int, str]
    if isinstance(experts, DenseExperts):
        name, table = str(experts.w1.dtype).removeprefix("torch."), ones
        matrices = [(getattr(experts, w), ones, ones) for w in ("w1", "w3", "w2")]
    elif isinstance(experts, ScaledExperts):
        name, table = (experts.kind, experts.group_size, str(experts.w1_scale.dtype).removeprefix("torch.")), ones
        matrices = [(getattr(experts, f"{w}_codes"), getattr(experts, f"{w}_scale"), ones) for w in ("w1", "w3", "w2")]
    else:
        assert isinstance(experts, PackedExperts)
        codes = torch.arange(256, dtype=torch.uint8).view(experts.w1_scale.dtype)
        name, table = f"fp4_{experts.group_size}", fp4.scale_values(codes)
        matrices = [_packed_matrix(experts, w, ones) for w in ("w1", "w3", "w2")]
    owned = (ones, table, *(factor for _, _, factor in matrices))
    addresses = [tensor.data_ptr() for matrix in matrices for tensor in matrix]
    numbers = (*addresses, table.data_ptr(), experts.hidden_size, experts.intermediate_size)
    return _Layer(_compiled(name), (ctypes.c_int64 * len(emit.LAYER))(*numbers), owned)


def _packed_matrix(experts: PackedExperts, name: str, ones: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    divisor = getattr(experts, f"{name}_global")
    factor = ones if divisor is None else (1 / divisor).contiguous()
    return getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale"), factor


def experts_forward(
    x: Tensor, experts: Experts, ids: Tensor, weights: Tensor, activation: str, beta: float, linear_beta: float
) -> Tensor:
    """x [T, D], ids [T, K], weights [T, K] -> [T, D] float32. See the public twin."""
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=torch.float32)
    if tape.current() is None:
        check_ids(ids, experts.num_experts)
    layer = _layer(experts)
    shared = {
        "layer": ctypes.addressof(layer.arguments),
        "num_experts": experts.num_experts,
        "round": x.dtype == torch.bfloat16,
        "silu": activation == "silu",
        **dict(zip(CAPS, caps_of(beta, linear_beta), strict=True)),
    }
    run = _grouped if _has_crowds(ids, experts.num_experts) else _token_by_token
    x = x if x.stride(1) == 1 else x.contiguous()
    with layer.compiled.scratch.lock:
        return run(_Call(layer.compiled, shared), experts, x, ids.contiguous(), weights.contiguous())


def _has_crowds(ids: Tensor, num_experts: int) -> bool:
    """Do visited experts meet enough tokens each for grouping to pay?"""
    if ids.shape[0] < GROUPED_FROM:
        return False
    return ids.numel() >= GROUPED_FROM * num_experts or ids.numel() >= GROUPED_FROM * ids.unique().numel()


def _token_by_token(call: _Call, experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    compiled, workers, count = call.compiled, pool.shared(), ids.shape[1]
    out = torch.empty(x.shape, dtype=torch.float32)
    depth, inner = (product.padded(n, compiled.format) for n in (experts.hidden_size, experts.intermediate_size))
    slots = compiled.scratch.address("slots", 12 * count)
    own = {
        "count": count,
        "experts": slots,
        "weights": slots + 8 * count,
        "scratch": compiled.scratch.address("row", 4 * depth * workers.threads),
        "scratch_bytes": 4 * depth,
        "hidden": compiled.scratch.address("hidden", 4 * inner * count),
    }
    parts = 1 if workers.threads == 1 else 4 * workers.threads
    units = count * inner // compiled.format.block
    for token in range(x.shape[0]):
        own |= {"x": x[token].data_ptr(), "out": out[token].data_ptr()}
        given = {"ids": ids[token].data_ptr(), "given": weights[token].data_ptr()}
        call.run(compiled.order, 1, **own, **given)
        call.run(compiled.gate_up, min(2 * parts, units), **own)
        call.run(compiled.down, min(parts, experts.hidden_size), **own)
    return out


def _grouped(call: _Call, experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    compiled, workers = call.compiled, pool.shared()
    out = torch.zeros(x.shape, dtype=torch.float32)
    sorted_ids, order = ids.flatten().sort(stable=True)
    tokens = order // ids.shape[1]
    sorted_weights = weights.flatten()[order]
    tile = compiled.tile.tokens
    depth, inner = (product.padded(n, compiled.format) for n in (experts.hidden_size, experts.intermediate_size))
    panel_bytes = 4 * depth * -(-ITEM_TOKENS // tile) * tile
    c_bytes = 4 * BLOCK_ROWS * -(-ITEM_TOKENS // tile) * tile
    scratch_bytes = panel_bytes + 4 * BLOCK_ROWS * DEPTH + 2 * c_bytes
    own = {
        "x": x.data_ptr(),
        "x_stride": x.stride(0),
        "out": out.data_ptr(),
        "tokens": tokens.data_ptr(),
        "weights": sorted_weights.data_ptr(),
        "scratch": compiled.scratch.address("scratch", scratch_bytes * workers.threads),
        "scratch_bytes": scratch_bytes,
        "panel_bytes": panel_bytes,
        "c_bytes": c_bytes,
    }
    for items, hidden_bytes in _waves(sorted_ids, tile, inner):
        hidden = compiled.scratch.address("hidden", hidden_bytes)
        numbers = [number for *item, offset in items for number in (*item, hidden + offset)]
        item_block = (ctypes.c_int64 * len(numbers))(*numbers)
        splits = max(1, min(4 * workers.threads // len(items), experts.intermediate_size // BLOCK_ROWS))
        own |= {"items": ctypes.addressof(item_block), "count": len(items), "splits": splits}
        block = product.balanced_rows(experts.intermediate_size, splits)
        call.run(compiled.expand, len(items) * splits, **own, block_rows=block)
        block = product.balanced_rows(experts.hidden_size, workers.threads)
        call.run(compiled.contract, -(-experts.hidden_size // block), **own, block_rows=block)
    return out


def _waves(sorted_ids: Tensor, tile: int, inner: int) -> list[tuple[list[tuple[int, int, int, int]], int]]:
    """Runs of equal expert ids as items (expert, start, count, byte offset of hidden units), in groups that fit."""
    found, counts = sorted_ids.unique_consecutive(return_counts=True)
    waves: list[tuple[list[tuple[int, int, int, int]], int]] = []
    items: list[tuple[int, int, int, int]] = []
    start = offset = 0
    for expert, total in zip(found.tolist(), counts.tolist(), strict=True):
        for first in range(0, total, ITEM_TOKENS):
            count = min(ITEM_TOKENS, total - first)
            size = 4 * inner * -(-count // tile) * tile
            if items and offset + size > HIDDEN_BYTES:
                waves.append((items, offset))
                items, offset = [], 0
            items.append((expert, start + first, count, offset))
            offset += size
        start += total
    return [*waves, (items, offset)]
