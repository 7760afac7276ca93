"""The arithmetic of the lossy formats as torch, for a GPU: the same bytes as the compiled kernels give.

Decoded weights go over in batches of rows, staged in pinned memory on a stream of each worker's own, and come back
quantized. Every number that is stored comes from the same float32 operations as in `compiled`. Only sums of squared errors
are added up in another order: where that could decide between two scales, the compiled kernel decides for these rows. What
was changed is summed up in another order too, so that reports may differ in the last digit.

MXFP4 that becomes something else by table stays with `convert`: that is as fast as memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3tool.errors import UnsupportedError
from k3tool.formats import bnb, compiled, convert, fp8, integer, mxfp4, nvfp4
from k3tool.formats.codes import E2M1_PAIRS, E4M3, E8M0
from k3tool.formats.convert import Converted, Stored, Target
from k3tool.formats.measure import Measured

BATCH_VALUES = 8 << 20  # on the device at once, for each worker: about 0.5 GB with everything beside them
_NATIVE = ("bf16", "f16", "f32", "mxfp4")
_own = threading.local()


def check_device(name: str) -> None:
    """Raises UnsupportedError where there is no such device here."""
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch finds no GPU on this machine",
            hint="leave --device out: the result is the same, byte for byte",
        )


def convert_on(name: str, sources: Sequence[Stored], target: Target) -> list[Converted]:
    """As `convert.convert`, with the same parts to the bit; `name` is a torch device. Raises the same."""
    convert.check(sources, target)
    sources = [convert.settled(source) for source in convert.recognized(sources, target)]
    if not all(_goes(source, target) for source in sources):
        return convert.convert(sources, target)
    device = torch.device(name)
    with torch.inference_mode(), _stream(device):
        work = _Work(device, target, _factor(device, sources) if target.scheme.startswith("nvfp4") else None)
        return [work.one(source) for source in sources]


def _goes(source: Stored, target: Target) -> bool:
    return source.scheme in _NATIVE and not convert.by_table(source, target)


def _stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return nullcontext()
    if not hasattr(_own, "stream"):
        _own.stream = torch.cuda.Stream(device)
    return torch.cuda.stream(_own.stream)


# Batches of rows, there and back.


def _up(array: NDArray, device: torch.device) -> Tensor:
    array = np.ascontiguousarray(array)
    held = torch.from_numpy(array if array.flags.writeable else array.copy())
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def _down(tensor: Tensor, out: NDArray) -> None:
    """Fill a numpy array of the same bytes."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if tensor.is_cuda:
        staging = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        staging.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        flat = staging
    out.reshape(-1).view(np.uint8)[:] = flat.numpy()


def _batches(source: Stored, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their float32 values [r, columns] on the device; every batch but the last has a multiple of 128 rows."""
    rows, columns = source.shape
    step = max(1, BATCH_VALUES // columns // convert.TILE_ROWS) * convert.TILE_ROWS
    for first in range(0, rows, step):
        taken = slice(first, min(first + step, rows))
        yield taken, _values({part: array[taken] for part, array in source.parts.items()}, source.scheme, device)


def _values(parts: dict[str, NDArray], scheme: str, device: torch.device) -> Tensor:
    if scheme == "mxfp4":
        packed = _up(parts["weight_packed"], device).long()
        step = _up(E8M0, device)[_up(parts["weight_scale"], device).long()]
        codes = _up(E2M1_PAIRS, device)[packed].view(*step.shape, mxfp4.GROUP)
        return (codes * step.unsqueeze(-1)).flatten(1)
    if scheme == "bf16":
        return _up(parts["weight"].view(np.int16), device).view(torch.bfloat16).float()
    return _up(parts["weight"], device).float()


def _factor(device: torch.device, sources: Sequence[Stored]) -> np.float32:
    """The global scale of NVFP4 that modules share."""
    most = [float(values.abs().amax()) for source in sources for _, values in _batches(source, device)]
    if not all(map(math.isfinite, most)):
        raise convert.not_finite(" and ".join(source.name for source in sources), "NaN or infinity")
    return nvfp4.global_scale(max(most))


# Pieces of arithmetic, each operation rounded on its own as in `compiled`. Divisors are tensors on the device: by a plain
# number torch multiplies with the reciprocal, which rounds otherwise.


def _divided(x: Tensor, by: float) -> Tensor:
    return x / torch.full((), by, dtype=torch.float32, device=x.device)


def _e2m1(x: Tensor) -> Tensor:
    """Index 0..7 of the nearest magnitude of |x|."""
    a = x.abs()
    index = (a > 0.25).to(torch.uint8)
    for above in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        index += above
    return index


def _e2m1_value(x: Tensor) -> Tensor:
    """The nearest magnitude of |x|, as a sum of steps."""
    a = x.abs()
    value = (a > 0.25).float()
    for above in (a >= 0.75, a > 1.25, a >= 1.75):
        value += above
    value *= 0.5
    for above in (a > 2.5, a >= 3.5, a > 5.0, a > 5.0):
        value += above
    return value


def _e2m1_code(x: Tensor) -> Tensor:
    return _e2m1(x) | (torch.signbit(x).to(torch.uint8) << 3)


def _e4m3_value(x: Tensor) -> Tensor:
    a = x.abs().clamp(max=448.0)
    exponent = (a.view(torch.int32) >> 23).clamp(min=121)
    anchor = ((exponent + 20) << 23).view(torch.float32)
    return (a + anchor) - anchor


def _e4m3_code(x: Tensor) -> Tensor:
    value = _e4m3_value(x)
    normal = (value.view(torch.int32) >> 20) - 960
    code = torch.where(value < 0.015625, (value * 512.0).int(), normal)
    return (code | (torch.signbit(x).int() << 7)).to(torch.uint8)


def _doubt(terms: int) -> float:
    """By how much two float64 sums of so many squares may differ, relative, whatever their order."""
    return 8 * terms * 2.0**-53


def _squares(lacks: Tensor, weight: Tensor) -> Tensor:
    return (lacks.double().square_() * weight).sum(-1)


class _Choice:
    """For each group: the best scale so far, its error, and whether another order of summation could choose another."""

    def __init__(self, best: Tensor, least: Tensor) -> None:
        self.best = best
        self.least = least
        self.doubtful = torch.zeros_like(best, dtype=torch.bool)

    def offer(self, stored: Tensor, error: Tensor, terms: int) -> None:
        """Another scale: taken where its error, a sum of so many terms, is less."""
        larger = torch.maximum(error, self.least)
        close = (error - self.least).abs() <= _doubt(terms) * larger
        self.doubtful |= close & (larger > 0) & (stored != self.best)
        better = error < self.least
        self.best = torch.where(better, stored, self.best)
        self.least = torch.where(better, error, self.least)


class _Work:
    """One conversion: `one` makes the parts of a module."""

    def __init__(self, device: torch.device, target: Target, factor: np.float32 | None) -> None:
        self.device = device
        self.target = target
        self.factor = factor
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)

    def one(self, source: Stored) -> Converted:
        self.sums.zero_()
        run: Callable[[Stored], dict[str, NDArray]] = getattr(self, _RUN[self.target.scheme])
        parts = run(source)
        sums = self.sums.tolist()
        if not math.isfinite(sums[0]):
            raise convert.not_finite(source.name, "NaN or infinity")
        return Converted(parts, Measured(math.prod(source.shape), *sums))

    def _measure(self, values: Tensor, kept: Tensor) -> None:
        a, b = values.flatten().double(), kept.flatten().double()
        self.sums[0] += a.dot(a)
        self.sums[1] += b.dot(b)
        self.sums[2] += (a - b).square().sum()
        self.sums[3] = torch.maximum(self.sums[3], (values - kept).abs().amax().double())

    def _search(
        self, groups: Tensor, weight: Tensor, tried: Sequence[Tensor], step: Callable[[Tensor], Tensor],
        lacks: Callable[[Tensor, Tensor], Tensor],
    ) -> _Choice:  # fmt: skip
        """groups [..., g]; weight broadcasts to it; tried: stored scales [...]; lacks: (groups, step) to differences."""
        choice = _Choice(tried[0], torch.full(tried[0].shape, math.inf, dtype=torch.float64, device=self.device))
        if len(tried) == 1:
            return choice
        for stored in tried:
            choice.offer(stored, _squares(lacks(groups, step(stored).unsqueeze(-1)), weight), groups.shape[-1])
        return choice

    def _decide(self, choice: _Choice, values: Tensor, rows: int, kernel: Callable[[NDArray, NDArray], None]) -> Tensor:
        """The scales, with those of doubtful rows from the compiled kernel.

        rows: of values that share a row of scales. kernel: (values [rows, columns], scales to fill [1, groups]).
        """
        doubtful = choice.doubtful.any(1).nonzero().flatten().tolist()
        best = choice.best
        for row in doubtful:
            scale = np.empty(best.shape[1:], _NUMPY[best.dtype])
            kernel(values[row * rows : (row + 1) * rows].cpu().numpy(), scale[None])
            best[row] = torch.from_numpy(scale).to(best.device)
        return best

    def _weight(self, source: Stored, group: int) -> Tensor:
        """[groups, group] float64."""
        return _up(convert.column_weight(source), self.device).double().view(-1, group)

    # Schemes

    def mxfp4(self, source: Stored) -> dict[str, NDArray]:
        rows, columns = source.shape
        packed, scale = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 32), np.uint8)
        table, weight = _up(E8M0, self.device), self._weight(source, mxfp4.GROUP)
        shifts = mxfp4.SHIFTS if self.target.search else (0,)

        def kernel(values: NDArray, out: NDArray) -> None:
            codes = np.empty((1, columns // 2), np.uint8)
            column = convert.column_weight(source)
            compiled.quantize_mxfp4(values, column, np.array(shifts), E8M0, codes, out, np.zeros(4))

        for taken, values in _batches(source, self.device):
            groups = values.view(len(values), -1, mxfp4.GROUP)
            plain = ((groups.abs().amax(-1).view(torch.int32) + (1 << 21)) >> 23) - 2
            plain = plain.clamp(1, 254)
            tried = [(plain + shift).clamp(1, 254).to(torch.uint8) for shift in shifts]
            choice = self._search(groups, weight, tried, lambda b: table[b.long()], _lacks_e2m1)
            best = self._decide(choice, values, 1, kernel)
            _down(self._pack_e2m1(groups, table[best.long()].unsqueeze(-1)), packed[taken])
            _down(best, scale[taken])
        return {"weight_packed": packed, "weight_scale": scale}

    def nvfp4(self, source: Stored) -> dict[str, NDArray]:
        assert self.factor is not None
        rows, columns = source.shape
        packed, scale = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 16), np.uint8)
        factor = torch.tensor(self.factor, device=self.device)
        table, weight = _up(E4M3, self.device), self._weight(source, nvfp4.GROUP)
        shifts = nvfp4.SHIFTS if self.target.search else (0,)

        def kernel(values: NDArray, out: NDArray) -> None:
            codes = np.empty((1, columns // 2), np.uint8)
            column = convert.column_weight(source)
            compiled.quantize_nvfp4(values, column, np.array(shifts), self.factor, codes, out, np.zeros(4))

        for taken, values in _batches(source, self.device):
            groups = values.view(len(values), -1, nvfp4.GROUP)
            plain = _e4m3_code(_divided(groups.abs().amax(-1), 6.0) * factor).clamp(min=1).int()
            tried = [(plain + shift).clamp(1, 126).to(torch.uint8) for shift in shifts]
            choice = self._search(groups, weight, tried, lambda b: table[b.long()] / factor, _lacks_e2m1)
            best = self._decide(choice, values, 1, kernel)
            _down(self._pack_e2m1(groups, (table[best.long()] / factor).unsqueeze(-1)), packed[taken])
            _down(best, scale[taken])
        modelopt = self.target.scheme == "nvfp4-modelopt"
        overall = np.float32(1) / self.factor if modelopt else self.factor
        return nvfp4.parts("modelopt" if modelopt else "compressed-tensors", packed, scale, overall)

    def _pack_e2m1(self, groups: Tensor, step: Tensor) -> Tensor:
        scaled = groups / step
        self._measure(groups, torch.copysign(_e2m1_value(scaled) * step, groups))
        codes = _e2m1_code(scaled).flatten(1)
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def integer(self, source: Stored) -> dict[str, NDArray]:
        bits = 8 if self.target.scheme == "int8" else 4
        rows, columns = source.shape
        stored = integer.stored_tensors(source.shape, group_size=self.target.group_size, dtype="BF16", bits=bits)
        raw, scale = np.empty((rows, columns * bits // 8), np.uint8), np.empty(stored["weight_scale"][1], np.uint16)
        group, low = columns // scale.shape[1], -(1 << (bits - 1))
        weight = self._weight(source, group)
        factors = convert.scale_factors(self.target, integer.FACTORS[-low])

        def kernel(values: NDArray, out: NDArray) -> None:
            codes, column = np.empty((1, raw.shape[1]), np.uint8), convert.column_weight(source)
            compiled.quantize_integer(values, column, factors, bits, codes, out.view(np.uint16), np.zeros(4))

        for taken, values in _batches(source, self.device):
            groups = values.view(len(values), -1, group)
            amax = groups.abs().amax(-1)
            plain = torch.where(amax > 0, _divided(amax, (2**bits - 1) / 2), 1.0)
            choice = self._integer_scales(groups, weight, plain, factors, low)
            best = self._decide(choice, values, 1, kernel)
            step = best.view(torch.bfloat16).float().unsqueeze(-1)
            codes = (groups / step).round().clamp(low, -low - 1)
            self._measure(groups, codes * step)
            unsigned = (codes - low).to(torch.uint8).flatten(1)
            _down(unsigned if bits == 8 else unsigned[:, 0::2] | (unsigned[:, 1::2] << 4), raw[taken])
            _down(best, scale[taken])
        return convert.integer_parts(raw.view("<i4"), scale, source.shape)

    def _integer_scales(
        self, groups: Tensor, weight: Tensor, plain: Tensor, factors: NDArray[np.float32], low: int
    ) -> _Choice:
        """Scales as the bits of bfloat16 in int16."""

        def lacks(values: Tensor, step: Tensor) -> Tensor:
            return values - (values / step).round().clamp(low, -low - 1) * step

        def step_of(stored: Tensor) -> Tensor:
            return stored.view(torch.bfloat16).float()

        tried = [(plain * float(factor)).bfloat16().view(torch.int16) for factor in factors]
        choice = self._search(groups, weight, tried, step_of, lacks)
        if len(factors) == 1:
            return choice
        doubt, step = _doubt(groups.shape[-1]), step_of(choice.best)
        codes = (groups / step.unsqueeze(-1)).round().clamp(low, -low - 1).double()
        heavy = weight * codes
        above, below = (heavy * groups.double()).sum(-1), (heavy * codes).sum(-1)
        fits = (above > 0) & (below > 0)
        ratio = above / torch.where(fits, below, 1.0)
        fitted, lower, upper = (
            torch.where(fits, (ratio * scaled).float(), step).bfloat16().view(torch.int16)
            for scaled in (1.0, 1 - doubt, 1 + doubt)
        )
        choice.doubtful |= lower != upper
        choice.offer(fitted, _squares(lacks(groups, step_of(fitted).unsqueeze(-1)), weight), groups.shape[-1])
        return choice

    def fp8(self, source: Stored) -> dict[str, NDArray]:
        rows, columns = source.shape
        down, across = (1, columns) if self.target.scheme == "fp8-channel" else (fp8.BLOCK, fp8.BLOCK)
        out, scale = np.empty((rows, columns), np.uint8), np.empty((rows // down, columns // across), np.float32)
        weight = self._weight(source, across).unsqueeze(1).expand(-1, down, -1).flatten(1)
        factors = convert.scale_factors(self.target, fp8.FACTORS)

        def kernel(values: NDArray, found: NDArray) -> None:
            codes, column = np.empty(values.shape, np.uint8), convert.column_weight(source)
            compiled.quantize_fp8(values, column, factors, across, codes, found[0], np.zeros(4))

        for taken, values in _batches(source, self.device):
            blocks = values.view(-1, down, columns // across, across).transpose(1, 2).flatten(2)
            amax = blocks.abs().amax(-1)
            plain = torch.where(amax > 0, _divided(amax, 448.0), 1.0)
            tried = [plain * float(factor) for factor in factors]
            choice = self._search(blocks, weight, tried, lambda step: step, _lacks_e4m3)
            best = self._decide(choice, values, down, kernel)
            scaled = blocks / best.unsqueeze(-1)
            self._measure(blocks, torch.copysign(_e4m3_value(scaled) * best.unsqueeze(-1), blocks))
            codes = _e4m3_code(scaled).view(-1, columns // across, down, across).transpose(1, 2)
            _down(codes, out[taken])
            _down(best, scale[taken.start // down : taken.stop // down])
        return {"weight": out, "weight_scale": scale}

    def bnb(self, source: Stored) -> dict[str, NDArray]:
        kind, size, columns = self.target.scheme, math.prod(source.shape), source.shape[1]
        packed, absmax = np.empty((size // 64, 32), np.uint8), np.empty(size // 64, np.float32)
        limits, order = bnb.bounds(kind)
        middles, codes_of = _up(limits, self.device), _up(order, self.device)
        table = _up(bnb.TABLES[kind], self.device)
        for taken, values in _batches(source, self.device):
            blocks = values.view(-1, bnb.BLOCK)
            amax = blocks.abs().amax(-1, keepdim=True)
            scaled = (blocks * (torch.ones_like(amax) / amax.clamp(min=1e-38))).clamp(-1, 1)
            codes = codes_of[torch.bucketize(scaled, middles)]
            self._measure(blocks, table[codes.long()] * amax)
            at = slice(taken.start * columns // 64, taken.stop * columns // 64)
            _down((codes[:, 0::2] << 4) | codes[:, 1::2], packed[at])
            _down(amax, absmax[at])
        return bnb.parts(kind, packed.reshape(-1, 1), absmax, source.shape, self.target.dtype)

    def plain(self, source: Stored) -> dict[str, NDArray]:
        out = np.empty(source.shape, np.uint16)
        for taken, values in _batches(source, self.device):
            rounded = values.bfloat16()
            self._measure(values, rounded.float())
            _down(rounded, out[taken])
        return {"weight": out}


def _lacks_e2m1(values: Tensor, step: Tensor) -> Tensor:
    return values.abs() - _e2m1_value(values / step) * step


def _lacks_e4m3(values: Tensor, step: Tensor) -> Tensor:
    return values.abs() - _e4m3_value(values / step) * step


_NUMPY = {torch.uint8: np.uint8, torch.int16: np.int16, torch.float32: np.float32}
_RUN = {
    "bf16": "plain", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "nvfp4-modelopt": "nvfp4", "int8": "integer",
    "int4": "integer", "fp8-block": "fp8", "fp8-channel": "fp8", "nf4": "bnb", "fp4": "bnb",
}  # fmt: skip
