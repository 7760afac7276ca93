"""The routed experts of one layer, stacked: FP4 stays packed, plain matrices stay plain.

Anything else is decoded to bfloat16 on a CPU and kept as it is stored on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k3tool.catalog import EXPERT_MATRICES, expert_matrix_shapes
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.kernels.moe import DenseExperts, Experts, PackedExperts
from k3tool.model.scaled_experts import SCALED, load_scaled
from k3tool.model.weights import PLAIN_SCHEMES, Matrix, Weights

# Scheme to the parts that hold codes, scales and, with NVFP4, the scale of the whole matrix.
PACKED = {
    "mxfp4": ("weight_packed", "weight_scale", None),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


class Field(NamedTuple):
    """One field of the stacked experts: which part of which matrix of an expert it holds, [*shape] each.

    part: None where the matrix is decoded on reading.
    """

    name: str
    matrix: str
    part: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_experts(weights: Weights, config: K3Config, prefix: str, owned: range) -> Experts:
    """Declare the experts `{prefix}.E.w1|w2|w3` of one layer, E in `owned`.

    Raises CheckpointCorrupt where the experts of a layer are not all stored in one scheme.
    """
    scheme = expert_storage(weights, config, prefix, owned)
    if scheme in SCALED and keeps_stored(weights.device):
        scaled = load_scaled(weights, config, prefix, owned, scheme)
        if scaled is not None:
            return scaled
    held: dict[str, Tensor] = {}
    for field in fields(config, scheme):
        stacked, staging = weights.allocate((len(owned), *field.shape), field.dtype)
        held[field.name] = stacked
        for slot, expert in enumerate(owned):
            destination = None if staging is None else staging[slot]
            if field.part is None:
                shape = expert_matrix_shapes(config)[field.matrix]
                weights.dequantized(Matrix(f"{prefix}.{expert}.{field.matrix}", shape), scheme, destination)
            else:
                weights.raw(f"{prefix}.{expert}.{field.matrix}.{field.part}", destination)
    weights.check(lambda: settle(held, scheme, [f"{prefix}.{expert}" for expert in owned]))
    return assemble(held, scheme)


def keeps_stored(device: torch.device) -> bool:
    """Whether kernels of a device multiply FP8 and integers as they are stored."""
    return device.type == "cuda"


def expert_storage(weights: Weights, config: K3Config, prefix: str, owned: range) -> str:
    """The scheme that the experts `owned` of a layer share. Raises CheckpointCorrupt naming two that differ."""
    shapes = expert_matrix_shapes(config)
    schemes = {
        name: [weights.scheme(Matrix(f"{prefix}.{expert}.{name}", shapes[name])) for expert in owned]
        for name in EXPERT_MATRICES
    }
    first = schemes["w1"][0]
    for name, found in schemes.items():
        for expert, scheme in zip(owned, found, strict=True):
            if scheme != first:
                raise CheckpointCorrupt(
                    f"{prefix}.{expert}.{name} is stored as {scheme}, {prefix}.{owned[0]}.w1 as {first}",
                    hint="all experts of a layer must be stored in one scheme",
                )
    return first


def fields(config: K3Config, scheme: str) -> list[Field]:
    """What `assemble` needs of experts stored under `scheme`."""
    found: list[Field] = []
    for matrix, (rows, columns) in expert_matrix_shapes(config).items():
        if scheme not in PACKED:
            plain = scheme in PLAIN_SCHEMES
            dtype = PLAIN_SCHEMES.get(scheme, torch.bfloat16)
            found.append(Field(matrix, matrix, "weight" if plain else None, (rows, columns), dtype))
            continue
        codes, scales, overall = PACKED[scheme]
        group, scale_dtype = (32, torch.uint8) if scheme == "mxfp4" else (16, torch.float8_e4m3fn)
        found.append(Field(f"{matrix}_packed", matrix, codes, (rows, columns // 2), torch.uint8))
        found.append(Field(f"{matrix}_scale", matrix, scales, (rows, columns // group), scale_dtype))
        if overall is not None:
            found.append(Field(f"{matrix}_global", matrix, overall, (), torch.float32))
    return found


def assemble(held: dict[str, Tensor], scheme: str) -> Experts:
    """Stacked tensors by field name as experts of one layer."""
    if scheme not in PACKED:
        return DenseExperts(**held)
    return PackedExperts(**held, group_size=32 if scheme == "mxfp4" else 16)


def settle(held: dict[str, Tensor], scheme: str, modules: Sequence[str]) -> None:
    """What must happen to stacked tensors once they are read, in place. `modules` names the experts in them.

    Raises CheckpointCorrupt for a scale that stands for NaN.
    """
    for name, tensor in held.items():
        if scheme == "mxfp4" and name.endswith("_scale"):
            check_scales(tensor, [f"{module}.{name.removesuffix('_scale')}" for module in modules])
        elif scheme == "nvfp4-modelopt" and name.endswith("_global"):
            tensor.reciprocal_()  # a multiplier, where the packed experts hold divisors


def check_scales(scales: Tensor, modules: Sequence[str]) -> None:
    """E8M0 byte 255 stands for NaN: one of them would spoil every token. Raises CheckpointCorrupt naming the expert."""
    if int(scales.max()) == 255:
        expert = int(scales.flatten(1).amax(1).argmax())
        raise CheckpointCorrupt(
            f"{modules[expert]}.weight_scale holds byte 255, which stands for NaN",
            hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
        )
