"""Errors where inputs have energy: a module's stored values against its source, each square weighted by its column.

Both are decoded again, a few rows at a time, so that it works for every scheme alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from k3tool import formats
from k3tool.formats import bnb, fp8
from k3tool.formats.convert import Stored, tiles
from k3tool.formats.measure import Weighted

_WHOLE = ("weight_global_scale", "weight_scale_2", "weight_shape")


def decode_rows(scheme: str, parts: Mapping[str, NDArray], shape: tuple[int, ...], rows: slice) -> NDArray[np.float32]:
    """Values [rows, columns] of a stored module. rows: from a multiple of 128."""
    taken = (rows.stop - rows.start, shape[1])
    if scheme in ("nf4", "fp4"):
        if "weight.nested_absmax" in parts:
            return formats.dequantize(scheme, parts, shape)[rows]
        blocks = slice(rows.start * shape[1] // bnb.BLOCK, rows.stop * shape[1] // bnb.BLOCK)
        packed = parts["weight"].reshape(-1, bnb.BLOCK // 2)[blocks].reshape(-1, 1)
        return formats.dequantize(
            scheme, bnb.parts(scheme, packed, parts["weight.absmax"][blocks], taken, "BF16"), taken
        )
    cut = {part: array if part in _WHOLE else array[rows] for part, array in parts.items()}
    if scheme == "fp8-block":
        name = next(part for part in parts if part.startswith("weight_scale"))
        cut[name] = parts[name][rows.start // fp8.BLOCK : -(-rows.stop // fp8.BLOCK)]
    return formats.dequantize(scheme, cut, taken)


def weigh(source: Stored, scheme: str, parts: Mapping[str, NDArray]) -> Weighted:
    """source: with its `weight`. scheme, parts: how it is stored now."""
    assert source.weight is not None
    weight = source.weight.astype(np.float64)
    before = error = 0.0
    for rows, tile in tiles(source):
        wide = tile.astype(np.float64)
        before += float((np.square(wide) @ weight).sum())
        wide -= decode_rows(scheme, parts, source.shape, rows)
        error += float((np.square(wide, out=wide) @ weight).sum())
    return Weighted(before, error)
