"""The routed experts of one layer, stacked: FP4 stays packed, plain matrices stay plain, anything else is decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.catalog import EXPERT_MATRICES, expert_matrix_shapes
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.kernels.moe import DenseExperts, Experts, PackedExperts
from k3tool.model.weights import PLAIN_SCHEMES, Matrix, Weights

# Scheme to the parts that hold codes, scales and, with NVFP4, the scale of the whole matrix.
_PACKED = {
    "mxfp4": ("weight_packed", "weight_scale", None),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


def load_experts(weights: Weights, config: K3Config, prefix: str) -> Experts:
    """Declare the experts `{prefix}.E.w1|w2|w3` of one layer.

    Raises CheckpointCorrupt where the experts of a layer are not all stored in one scheme.
    """
    shapes = expert_matrix_shapes(config)
    schemes = {
        name: [weights.scheme(Matrix(f"{prefix}.{e}.{name}", shapes[name])) for e in range(config.num_experts)]
        for name in EXPERT_MATRICES
    }
    first = schemes["w1"][0]
    for name, found in schemes.items():
        for expert, scheme in enumerate(found):
            if scheme != first:
                raise CheckpointCorrupt(
                    f"{prefix}.{expert}.{name} is stored as {scheme}, {prefix}.0.w1 as {first}",
                    hint="all experts of a layer must be stored in one scheme",
                )
    if first in _PACKED:
        return _packed(weights, config, prefix, first)
    dtype = PLAIN_SCHEMES.get(first, torch.bfloat16)
    return DenseExperts(
        *(_dense(weights, config, f"{prefix}.{{}}.{n}", shapes[n], first, dtype) for n in ("w1", "w3", "w2"))
    )


def _packed(weights: Weights, config: K3Config, prefix: str, scheme: str) -> PackedExperts:
    codes, scales, overall = _PACKED[scheme]
    group = 32 if scheme == "mxfp4" else 16
    scale_dtype = torch.uint8 if scheme == "mxfp4" else torch.float8_e4m3fn
    held: dict[str, Tensor] = {}
    for name, (rows, columns) in expert_matrix_shapes(config).items():
        modules = [f"{prefix}.{expert}.{name}" for expert in range(config.num_experts)]
        held[f"{name}_packed"] = _stacked(weights, modules, codes, (rows, columns // 2), torch.uint8)
        scale = _stacked(weights, modules, scales, (rows, columns // group), scale_dtype)
        held[f"{name}_scale"] = scale
        if scheme == "mxfp4":
            weights.check(lambda scale=scale, name=name: check_scales(scale, f"{prefix}.*.{name}"))
        if overall is not None:
            factor = _stacked(weights, modules, overall, (), torch.float32)
            held[f"{name}_global"] = factor
            if overall == "weight_scale_2":  # a multiplier, where the packed experts hold divisors
                weights.check(factor.reciprocal_)
    return PackedExperts(**held, group_size=group)


def _stacked(weights: Weights, modules: list[str], part: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[E, *shape]: the same part of every expert, each read straight into its place."""
    result, staging = weights.allocate((len(modules), *shape), dtype)
    for expert, module in enumerate(modules):
        weights.raw(f"{module}.{part}", None if staging is None else staging[expert])
    return result


def _dense(
    weights: Weights, config: K3Config, pattern: str, shape: tuple[int, int], scheme: str, dtype: torch.dtype
) -> Tensor:
    """[E, out, in] of plain matrices, or of matrices decoded to bfloat16."""
    result, staging = weights.allocate((config.num_experts, *shape), dtype)
    for expert in range(config.num_experts):
        module = pattern.format(expert)
        destination = None if staging is None else staging[expert]
        if scheme in PLAIN_SCHEMES:
            weights.raw(f"{module}.weight", destination)
        else:
            weights.dequantized(Matrix(module, shape), scheme, destination)
    return result


def check_scales(scales: Tensor, modules: str) -> None:
    """E8M0 byte 255 stands for NaN: one of them would spoil every token. Raises CheckpointCorrupt naming the expert."""
    if int(scales.max()) == 255:
        expert = int(scales.flatten(1).amax(1).argmax())
        raise CheckpointCorrupt(
            f"{modules.replace('*', str(expert))}.weight_scale holds byte 255, which stands for NaN",
            hint="check the file: k3tool verify --depth bytes",
        )
