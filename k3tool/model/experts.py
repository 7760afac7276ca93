"""The routed experts of one layer, stacked, as they are stored: FP4, FP8, integers and NF4 as codes and scales, or plain.

What no kernel takes as it is stored (groups of other sizes, on a GPU also NF4) is widened to the dtype of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from k3tool.catalog import EXPERT_MATRICES, expert_matrix_shapes
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.kernels.moe import DenseExperts, Experts, PackedExperts, ScaledExperts
from k3tool.kernels.moe.scaled import GROUP_SIZES
from k3tool.model.storage import Piece, Storage, check_codes
from k3tool.model.weights import PLAIN_SCHEMES, Matrix, Weights, formats

# Scheme to the parts that hold codes, scales and, with NVFP4, the scale of the whole matrix.
PACKED = {
    "mxfp4": ("weight_packed", "weight_scale", None),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


class Field(NamedTuple):
    """One field of the stacked experts, and the piece of a matrix of each expert that it holds."""

    name: str
    matrix: str
    piece: Piece


class ExpertStorage(NamedTuple):
    """How all experts of a layer are held. scaled: what their w1 is held as, where that is codes of `ScaledExperts`."""

    scheme: str
    fields: tuple[Field, ...]
    scaled: Storage | None

    def assemble(self, held: dict[str, Tensor]) -> Experts:
        """Stacked tensors by field name as experts of one layer."""
        if self.scheme in PACKED:
            return PackedExperts(**held, group_size=32 if self.scheme == "mxfp4" else 16)
        if self.scaled is None:
            return DenseExperts(**held)
        kind, group_size, scale_rows, _ = self.scaled
        return ScaledExperts(kind, **held, group_size=group_size, rows_per_scale=scale_rows)

    def settle(self, held: dict[str, Tensor], modules: Sequence[str]) -> None:
        """What must happen to stacked tensors once they are read, in place. `modules` names the experts in them.

        Raises CheckpointCorrupt for a code or a scale that stands for NaN.
        """
        for name, tensor in held.items():
            matrix, _, field = name.partition("_")
            if self.scheme == "mxfp4" and field == "scale":
                check_scales(tensor, [f"{module}.{matrix}" for module in modules])
            elif self.scheme == "nvfp4-modelopt" and field == "global":
                tensor.reciprocal_()  # a multiplier, where the packed experts hold divisors
            elif self.scaled is not None and field == "codes":
                for slot, module in enumerate(modules):
                    check_codes(self.scaled.kind, tensor[slot], tensor, f"{module}.{matrix}")


def load_experts(weights: Weights, config: K3Config, prefix: str, owned: range) -> Experts:
    """Declare the experts `{prefix}.E.w1|w2|w3` of one layer, E in `owned`.

    Raises CheckpointCorrupt where the experts of a layer are not all stored in one scheme.
    """
    storage = expert_storage(weights, config, prefix, owned)
    shapes = expert_matrix_shapes(config)
    held: dict[str, Tensor] = {}
    for field in storage.fields:
        held[field.name], staging = weights.allocate((len(owned), *field.piece.shape), field.piece.dtype)
        for slot, expert in enumerate(owned):
            matrix = Matrix(f"{prefix}.{expert}.{field.matrix}", shapes[field.matrix])
            weights.piece(matrix, field.piece, None if staging is None else staging[slot])
    if storage.scaled is not None:
        for name, shape in shapes.items():
            pieces = [field.piece for field in storage.fields if field.matrix == name]
            for expert in owned:
                weights.rest(Matrix(f"{prefix}.{expert}.{name}", shape), pieces)
    weights.check(lambda: storage.settle(held, [f"{prefix}.{expert}" for expert in owned]))
    return storage.assemble(held)


def expert_storage(weights: Weights, config: K3Config, prefix: str, owned: range) -> ExpertStorage:
    """How the experts `owned` of a layer are held. Raises CheckpointCorrupt naming two that are not stored alike."""
    scheme = _common_scheme(weights, config, prefix, owned)
    shapes = expert_matrix_shapes(config)
    if scheme in PACKED or scheme in PLAIN_SCHEMES:
        return ExpertStorage(scheme, tuple(_fields(shapes, scheme)), None)
    held = {name: _common_storage(weights, prefix, owned, name, shapes[name], scheme) for name in EXPERT_MATRICES}
    held = _with_one_group(held)
    first = held["w1"]
    forms = {storage[:3] if storage else None for storage in held.values()}
    types = {piece.dtype for storage in held.values() if storage for piece in storage.pieces if piece.field == "scale"}
    if first is None or len(forms) > 1 or len(types) > 1 or first.group_size not in GROUP_SIZES:
        return ExpertStorage(scheme, tuple(_widened(weights, shapes, scheme, prefix, owned)), None)
    fields = [
        Field(f"{name}_{piece.field}", name, piece)
        for name, storage in held.items()
        for piece in (storage.pieces if storage else ())
    ]
    return ExpertStorage(scheme, tuple(fields), first)


def _common_scheme(weights: Weights, config: K3Config, prefix: str, owned: range) -> str:
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


def _common_storage(
    weights: Weights, prefix: str, owned: range, name: str, shape: tuple[int, int], scheme: str
) -> Storage | None:
    """What a matrix is held as, where all experts agree on that."""
    first = weights.storage(Matrix(f"{prefix}.{owned[0]}.{name}", shape), scheme)
    for expert in owned[1:] if first is not None else ():
        if not first.alike(weights.storage(Matrix(f"{prefix}.{expert}.{name}", shape), scheme)):
            return None
    return first


def _with_one_group(held: dict[str, Storage | None]) -> dict[str, Storage | None]:
    """A matrix whose rows are one group of the size that others have is divided as they are."""
    sizes = {storage.group_size for storage in held.values() if storage} - {0}
    found = dict(held)
    for name, storage in held.items():
        if storage and not storage.group_size and len(sizes) == 1 and storage.columns in sizes:
            found[name] = storage._replace(group_size=storage.columns)
    return found


def _fields(shapes: dict[str, tuple[int, int]], scheme: str) -> list[Field]:
    """Of plain and FP4 experts."""
    found: list[Field] = []
    for matrix, (rows, columns) in shapes.items():
        if scheme in PLAIN_SCHEMES:
            piece = Piece(matrix, (rows, columns), PLAIN_SCHEMES[scheme], ("weight",))
            found.append(Field(matrix, matrix, piece))
            continue
        codes, scales, overall = PACKED[scheme]
        group, scale_dtype = (32, torch.uint8) if scheme == "mxfp4" else (16, torch.float8_e4m3fn)
        pieces = [
            Piece("packed", (rows, columns // 2), torch.uint8, (codes,)),
            Piece("scale", (rows, columns // group), scale_dtype, (scales,)),
        ]
        if overall is not None:
            pieces.append(Piece("global", (), torch.float32, (overall,)))
        found += [Field(f"{matrix}_{piece.field}", matrix, piece) for piece in pieces]
    return found


def _widened(
    weights: Weights, shapes: dict[str, tuple[int, int]], scheme: str, prefix: str, owned: range
) -> list[Field]:
    found: list[Field] = []
    for name, shape in shapes.items():
        parts = tuple(weights.parts(Matrix(f"{prefix}.{owned[0]}.{name}", shape)))
        make = partial(formats().dequantize, scheme, shape=shape)
        found.append(Field(name, name, Piece(name, shape, weights.dtype, parts, make)))
    return found


def check_scales(scales: Tensor, modules: Sequence[str]) -> None:
    """E8M0 byte 255 stands for NaN: one of them would spoil every token. Raises CheckpointCorrupt naming the expert."""
    if int(scales.max()) == 255:
        expert = int(scales.flatten(1).amax(1).argmax())
        check_codes("e2m1", scales, scales, modules[expert])
