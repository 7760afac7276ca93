"""Routed experts in FP8 or integers, kept as they are stored: for GPUs, whose kernels decode them while they multiply."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3tool.catalog import expert_matrix_shapes
from k3tool.checkpoint.header import TensorSpec
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.kernels.moe.scaled import FP8_BLOCK, GROUP_SIZES, ScaledExperts
from k3tool.model.weights import TORCH_DTYPES, Matrix, Weights

# Scheme to the kind of `ScaledExperts`, the part that holds codes, and bits of a code.
SCALED = {
    "fp8-block": ("fp8", "weight", 8),
    "fp8-channel": ("fp8", "weight", 8),
    "int8": ("int8", "weight_packed", 8),
    "int4": ("int4", "weight_packed", 4),
}
_SCALES = ("weight_scale", "weight_scale_inv")


def load_scaled(weights: Weights, config: K3Config, prefix: str, owned: range, scheme: str) -> ScaledExperts | None:
    """Declare the experts `owned` of a layer, stored under `scheme` of `SCALED`, without decoding them.

    None where no kernel takes them so: groups of another size, or scales that differ in kind between experts.
    """
    kind, codes_part, bits = SCALED[scheme]
    shapes = expert_matrix_shapes(config)
    scales = {name: _common_scale(weights, prefix, owned, name, shape) for name, shape in shapes.items()}
    groups = {_group(scheme, shapes[name], found[1].shape) if found else -1 for name, found in scales.items()}
    group = groups.pop()
    if groups or group not in GROUP_SIZES:
        return None
    held: dict[str, Tensor] = {}
    for name, (rows, columns) in shapes.items():
        found = scales[name]
        assert found is not None
        part, spec = found
        scale_shape = (rows, 1) if len(spec.shape) == 1 else spec.shape
        for field, stored, shape, dtype in (
            (f"{name}_codes", codes_part, (rows, columns * bits // 8), torch.uint8),
            (f"{name}_scale", part, scale_shape, TORCH_DTYPES[spec.dtype]),
        ):
            held[field], staging = weights.allocate((len(owned), *shape), dtype)
            for slot, expert in enumerate(owned):
                destination = None if staging is None else staging[slot]
                weights.raw(f"{prefix}.{expert}.{name}.{stored}", destination)
        if kind == "fp8":
            weights.check(_check_codes(held[f"{name}_codes"], prefix, owned, name))
    return ScaledExperts(kind, **held, group_size=group)


def _common_scale(
    weights: Weights, prefix: str, owned: range, name: str, shape: tuple[int, int]
) -> tuple[str, TensorSpec] | None:
    """The part that holds the scales of a matrix and what it is, where all experts agree on that."""
    found: tuple[str, TensorSpec] | None = None
    for expert in owned:
        parts = weights.parts(Matrix(f"{prefix}.{expert}.{name}", shape))
        part = next(part for part in _SCALES if part in parts)
        spec = parts[part].spec
        if found is not None and (part, spec.dtype, spec.shape) != (found[0], found[1].dtype, found[1].shape):
            return None
        found = part, spec
    return found if found is not None and found[1].dtype in ("F32", "BF16") else None


def _group(scheme: str, shape: tuple[int, int], scale_shape: tuple[int, ...]) -> int:
    """Columns that share a scale; 0: a whole row."""
    if scheme == "fp8-block":
        return FP8_BLOCK
    if scheme == "fp8-channel" or scale_shape[1] == 1:
        return 0
    return shape[1] // scale_shape[1]


def _check_codes(codes: Tensor, prefix: str, owned: range, name: str) -> Callable[[], None]:
    """E4M3 bytes 0x7f and 0xff stand for NaN: one of them would spoil every token."""

    def check() -> None:
        for slot, expert in enumerate(owned):
            if bool(((codes[slot] & 0x7F) == 0x7F).any()):
                raise CheckpointCorrupt(
                    f"{prefix}.{expert}.{name}.weight holds a byte that stands for NaN",
                    hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
                )

    return check
