"""Everything that a conversion uses, brought into memory on a small matrix: what a process holds is known before it begins.

Libraries and compiled loops take more than a hundred megabytes, and compiling them for the first time on a machine more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from k3tool import formats
from k3tool.formats.codes import f32_to_bf16
from k3tool.formats.compensate import compensate
from k3tool.formats.convert import Stored, Target, convert
from k3tool.formats.weighing import weigh

SIDE = 128  # of the matrix: the least that every scheme can hold
_FLOATS = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}


def load(
    scheme: str, target: Target, *, weighted: bool = False, calibrated: bool = False, device: str | None = None
) -> None:
    """Convert small matrices from `scheme` to `target`, as a quantization of that kind would."""
    shape = (SIDE, math.lcm(SIDE, target.group_size or 1))
    for parts in _parts(scheme, shape):
        source = Stored("a small matrix", scheme, parts, shape)
        if device is None:
            made = convert([source], target)
        else:
            from k3tool.formats.device import convert_on

            made = convert_on(device, [source], target)
        if weighted or calibrated:
            source = source._replace(weight=np.ones(shape[1], np.float32))
            weigh(source, target.scheme, convert([source], target)[0].parts)
        if calibrated:
            compensate(source, target, partial(_identity, shape[1]))
        del made


def _parts(scheme: str, shape: tuple[int, int]) -> Iterator[dict[str, NDArray]]:
    """Matrices in that storage: one that holds what MXFP4 could hold, and one that does not."""
    rows, columns = shape
    if scheme == "mxfp4":
        packed = np.arange(rows * columns // 2).astype(np.uint8).reshape(rows, columns // 2)
        for scales in ([127, 127], [1, 250]):  # 1 to 250: more than the scales of other formats can span
            yield {
                "weight_packed": packed,
                "weight_scale": np.resize(np.array(scales, np.uint8), (rows, columns // 32)),
            }
        return
    for values in (np.ones(shape, np.float32), np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(shape)):
        if scheme == "bf16":
            yield {"weight": f32_to_bf16(values)}
        elif scheme in _FLOATS:
            yield {"weight": values.astype(_FLOATS[scheme])}
        else:
            yield formats.quantize(scheme, values)


def _identity(size: int) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    yield slice(0, size), np.eye(size, dtype=np.float32)
