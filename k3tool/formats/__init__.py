"""How weights are stored: one module per format, and one table that maps scheme names to them.

A *module* here is a linear layer of the checkpoint, and its *parts* are the tensors that share its path: `weight`, or
`weight_packed` and `weight_scale`, and so on. Arrays are numpy; bfloat16 and float8 travel as raw bits (see `codes`).
Nothing here reads files, knows tensor names beyond the parts, or imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UnsupportedError, UsageError
from k3tool.formats import bnb, fp8, integer, mxfp4, nvfp4, plain
from k3tool.formats.codes import view

__all__ = [
    "SCHEMES",
    "PartSpec",
    "check_shape",
    "dequantize",
    "detect",
    "logical_shape",
    "quantize",
    "stored_tensors",
    "view",
]

SCHEMES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "bf16": (plain, {"stored": "BF16"}),
    "f16": (plain, {"stored": "F16"}),
    "f32": (plain, {"stored": "F32"}),
    "mxfp4": (mxfp4, {}),
    "nvfp4": (nvfp4, {"naming": "compressed-tensors"}),
    "nvfp4-modelopt": (nvfp4, {"naming": "modelopt"}),
    "fp8-block": (fp8, {"strategy": "block"}),
    "fp8-channel": (fp8, {"strategy": "channel"}),
    "int8": (integer, {"bits": 8}),
    "int4": (integer, {"bits": 4}),
    "nf4": (bnb, {"kind": "nf4"}),
    "fp4": (bnb, {"kind": "fp4"}),
}
"""Scheme name to (format module, the arguments that make it this scheme)."""


class PartSpec(Protocol):
    """What detection needs to know of a stored tensor; `TensorSpec` and `Entry` are such."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def detect(parts: Mapping[str, PartSpec], *, where: str = "module", shape: tuple[int, ...] | None = None) -> str:
    """The scheme in which a module is stored, from the names, dtypes and shapes of its parts alone.

    `shape` (the logical [out, in]) settles packed integers, whose width the packed shape alone may leave open.
    Raises CheckpointMissing where a part is absent, UnsupportedError for a storage that k3tool does not read,
    CheckpointCorrupt where the shapes of the parts do not belong together.
    """
    for module in (bnb, nvfp4, mxfp4, integer, fp8, plain):
        scheme = module.match(parts, shape)
        if scheme is None:
            continue
        if scheme.missing:
            raise CheckpointMissing(
                f"{where}: {scheme.missing} is missing beside {scheme.found}", hint="verify lists what is absent"
            )
        if scheme.problem:
            raise CheckpointCorrupt(
                f"{where}: {scheme.problem}",
                hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
            )
        return scheme.name
    held = ", ".join(f"{part} {spec.dtype} {list(spec.shape)}" for part, spec in sorted(parts.items()))
    raise UnsupportedError(f"{where}: no known storage scheme holds {held[:300]}", hint=f"known schemes: {_names()}")


def logical_shape(scheme: str, parts: Mapping[str, PartSpec]) -> tuple[int, ...] | None:
    """[out, in] of a stored module from the shapes of its parts; None where only the data says it (nf4, fp4)."""
    module, options = _scheme(scheme)
    return module.logical_shape(parts, **options)


def stored_tensors(
    scheme: str, shape: tuple[int, ...], *, group_size: int | None = None, dtype: str = "BF16"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parts of a module of logical `shape` under `scheme`: part to (dtype, shape), in the order of writing.

    group_size: values per scale of the integer schemes (default 32; 0: one scale per row).
    dtype: of the values before quantization; bitsandbytes records it. Raises UnsupportedError (see `check_shape`).
    """
    module, options = _scheme(scheme)
    check_shape(scheme, shape, group_size=group_size)
    return module.stored_tensors(shape, group_size=group_size, dtype=dtype, **options)


def check_shape(
    scheme: str,
    shape: tuple[int, ...],
    *,
    group_size: int | None = None,
    where: str = "module",
    hint: str = "choose another scheme",
) -> None:
    """Raises UnsupportedError where `scheme` cannot hold a matrix of this shape, naming the dimension."""
    problem = shape_problem(scheme, shape, group_size=group_size)
    if problem:
        raise UnsupportedError(f"{where}: {scheme} cannot hold {list(shape)}: {problem}", hint=hint)


def shape_problem(scheme: str, shape: tuple[int, ...], *, group_size: int | None = None) -> str:
    """Why `scheme` cannot hold a matrix of this shape, naming the dimension; empty where it can."""
    module, options = _scheme(scheme)
    return str(module.shape_problem(shape, group_size=group_size, **options))


def dequantize(scheme: str, parts: Mapping[str, NDArray], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The values that the stored parts stand for, as float32 [*shape]: code times scale, not rounded to 16 bits.

    Loaders that answer in bfloat16 give exactly the bfloat16 nearest to these. Raises CheckpointCorrupt where the
    parts do not fit the shape.
    """
    module, options = _scheme(scheme)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is damaged comes out as NaN or infinity
        return module.dequantize(parts, tuple(shape), **options)


def quantize(
    scheme: str, values: NDArray[np.float32], *, group_size: int | None = None, dtype: str = "BF16", **options: Any
) -> dict[str, NDArray]:
    """Store float32 values [out, in] under `scheme` by plain rounding to nearest; parts in the order of writing.

    This is the readable form that the fast kernels are compared with. Raises UnsupportedError for a shape that the
    scheme cannot hold.
    """
    module, fixed = _scheme(scheme)
    check_shape(scheme, values.shape, group_size=group_size)
    return module.quantize(
        np.ascontiguousarray(values, np.float32), group_size=group_size, dtype=dtype, **fixed, **options
    )


def _scheme(name: str) -> tuple[ModuleType, dict[str, Any]]:
    if name not in SCHEMES:
        raise UsageError(f"unknown scheme {name!r}", hint=f"schemes: {_names()}")
    return SCHEMES[name]


def _names() -> str:
    return ", ".join(SCHEMES)
