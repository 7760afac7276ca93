"""Products of matrices that TP divides: by inputs (partial sums), or by vocabulary rows. Whole on a rank alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.linear import StackedMatrix, StoredMatrix, Weight, linear
from k3tool.parallel.groups import Group


def partial_linear(x: Tensor, weight: Weight, group: Group) -> Tensor:
    """x [T, in], weight [out, in], where `group` divides `in` -> [T, out], to be summed over the group.

    float32, so that only the sum is rounded; in x.dtype where the group is one rank and this is the whole product."""
    if group.size == 1:
        return linear(x, weight)
    is_plain = isinstance(weight, Tensor)
    if x.is_cuda and is_plain and x.dtype == weight.dtype == torch.bfloat16 and torch.version.hip is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x.float(), weight)


def row_linear(x: Tensor, weight: Weight, group: Group) -> Tensor:
    """x [T, in], weight [out, in], where `group` divides `in` -> the whole [T, out] in x.dtype on every rank."""
    return group.sum(partial_linear(x, weight, group)).to(x.dtype)


def embedding(ids: Tensor, rows: Weight, first: int, group: Group, dtype: torch.dtype) -> Tensor:
    """ids [T] -> [T, hidden] in dtype. rows: those of the vocabulary from id `first`; `group` holds all of them."""
    if group.size == 1:
        return _rows(ids, rows).to(dtype)
    local = ids - first
    mine = (local >= 0) & (local < rows.shape[0])
    found = _rows(local.clamp(0, rows.shape[0] - 1), rows).float()
    return group.sum(found.masked_fill_(~mine.unsqueeze(-1), 0.0)).to(dtype)


def _rows(ids: Tensor, rows: Weight) -> Tensor:
    assert not isinstance(rows, StackedMatrix)
    return rows.rows(ids) if isinstance(rows, StoredMatrix) else functional.embedding(ids, rows)
