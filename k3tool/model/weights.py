"""Tensors of a checkpoint as torch tensors: declared first, then read in file order straight to where they belong.

Declaring allocates; `fill` reads what has been declared since the last call, scattering large positional reads into
the destinations, so that stacked projections and stacked experts are never copied. In measuring mode nothing is
allocated and nothing read: names, shapes and schemes are checked and the bytes are counted.

On a CPU quantized matrices stay codes and scales (`k3tool.model.storage`). What no kernel takes so (odd widths, any quantized
matrix on a GPU but experts) is widened to the dtype of the run while it is read.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from k3tool.catalog import count
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.origin import again, look
from k3tool.checkpoint.reader import Checkpoint, Located
from k3tool.checkpoint.source import Source, unreadable
from k3tool.disk import disk_errors
from k3tool.errors import CheckpointCorrupt, CheckpointMissing
from k3tool.events import Progress
from k3tool.kernels.linear import StackedMatrix, StoredMatrix, Weight
from k3tool.model.storage import Piece, Storage, check_codes, storage_of
from k3tool.names import parse_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PLAIN_SCHEMES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
READ_BYTES = 256 << 20  # one system call reads at most this much
READ_BUFFERS = 1000  # and scatters it into at most this many destinations (IOV_MAX is 1024)


def formats() -> ModuleType:
    """`k3tool.formats`, when something is read from a checkpoint: it needs numpy, which a model by itself does not."""
    from k3tool import formats

    return formats


class Matrix(NamedTuple):
    """A linear layer to load: its module path and logical shape [out, in]."""

    module: str
    shape: tuple[int, ...]


class _Read(NamedTuple):
    shard: str
    offset: int
    buffer: memoryview


class Weights:
    """Declares and reads tensors. `nbytes` counts what the declared tensors occupy in the memory of `device`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        located: Mapping[str, Located],
        device: torch.device,
        progress: Progress | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """progress: None measures only. dtype: of the run, and of what must be widened."""
        self.source = checkpoint.source
        self.device = device
        self.dtype = dtype
        self.progress = progress
        self.nbytes = 0
        self.used: set[str] = set()
        self.modules: dict[str, dict[str, Located]] = defaultdict(dict)
        for name, place in located.items():
            parsed = parse_name(name)
            if parsed is not None:
                self.modules[parsed.module_path][parsed.part] = place
        self._reads: list[_Read] = []
        self._conversions: list[Callable[[], object]] = []  # on the host, after the reads
        self._copies: list[Callable[[], object]] = []  # to the device, after the conversions
        self._checks: list[Callable[[], object]] = []

    @property
    def measuring(self) -> bool:
        return self.progress is None

    def scheme(self, matrix: Matrix) -> str:
        """How a module is stored. Raises CheckpointMissing, CheckpointCorrupt, UnsupportedError."""
        parts = {part: place.spec for part, place in self._parts(matrix).items()}
        if not parts.keys() & {"weight", "weight_packed"}:
            raise _missing(self.source, f"{matrix.module}.weight")
        scheme = formats().detect(parts, where=matrix.module, shape=matrix.shape)
        found = formats().logical_shape(scheme, parts)
        if found is not None and tuple(found) != tuple(matrix.shape):
            raise _mismatch(f"{matrix.module}.weight", [matrix.shape], found)
        return scheme

    def stack(self, matrices: Sequence[Matrix]) -> Weight:
        """[sum of out, in]: the rows of several modules with one input.

        One tensor where all share a plain dtype; plain matrices of several become float32 (exactly). With a quantized one
        among them, each as it is held by itself.
        """
        held = [self._storage(matrix) for matrix in matrices]
        if not any(held):
            return self.plain(matrices)
        parts = tuple(
            self._stored(matrix, storage) if storage else self.plain([matrix])
            for matrix, storage in zip(matrices, held, strict=True)
        )
        return parts[0] if len(parts) == 1 else StackedMatrix(parts)

    def plain(self, matrices: Sequence[Matrix]) -> Tensor:
        """As `stack`, but always one tensor: quantized matrices are widened to the dtype of the run."""
        dtypes = {PLAIN_SCHEMES.get(self.scheme(matrix), self.dtype) for matrix in matrices}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        result, staging = self.allocate((sum(m.shape[0] for m in matrices), matrices[0].shape[1]), dtype)
        row = 0
        for matrix in matrices:
            rows = matrix.shape[0]
            self._load(matrix, staging if staging is None else staging[row : row + rows])
            row += rows
        return result

    def matrix(self, module: str, *shape: int) -> Weight:
        """One linear layer, [out, in]."""
        return self.stack([Matrix(module, shape)])

    def storage(self, matrix: Matrix, scheme: str) -> Storage | None:
        """How a module of a scheme is held as codes and scales on this device; None where it is not."""
        parts = {part: place.spec for part, place in self._parts(matrix).items()}
        return storage_of(scheme, parts, matrix.shape, gpu=self.device.type != "cpu")

    def _storage(self, matrix: Matrix) -> Storage | None:
        scheme = self.scheme(matrix)
        return None if scheme in PLAIN_SCHEMES or self.device.type != "cpu" else self.storage(matrix, scheme)

    def _stored(self, matrix: Matrix, storage: Storage) -> StoredMatrix:
        held: dict[str, Tensor] = {}
        for piece in storage.pieces:
            held[piece.field], staging = self.allocate(piece.shape, piece.dtype)
            self.piece(matrix, piece, staging)
        self.rest(matrix, storage.pieces)
        self.check(lambda: check_codes(storage.kind, held["codes"], held["scale"], matrix.module))
        return StoredMatrix(storage.kind, held["codes"], held["scale"], storage.group_size, held.get("divisor"))

    def vector(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """A small plain tensor as float32, of one of the `shapes` (the first is the expected one), as stored."""
        spec = self._spec(name)
        if spec.shape not in shapes:
            raise _mismatch(name, shapes, spec.shape)
        result, staging = self.allocate(spec.shape, torch.float32)
        self._convert(name, staging)
        return result

    def check(self, action: Callable[[], object]) -> None:
        """Run `action` once everything declared so far is filled. Not when measuring."""
        if not self.measuring:
            self._checks.append(action)

    def raw(self, name: str, destination: Tensor | None) -> None:
        """Bytes of a tensor into a contiguous tensor of the same size in host memory."""
        spec = self._spec(name)
        if destination is None:
            return
        assert destination.nbytes == spec.nbytes
        place = self._place(name)
        view = destination.reshape(-1).view(torch.uint8).numpy().data
        self._reads.append(_Read(place.shard, place.offset, view))

    def piece(self, matrix: Matrix, piece: Piece, destination: Tensor | None) -> None:
        """One tensor of a matrix as it is held."""
        if piece.make is None:
            self.raw(f"{matrix.module}.{piece.parts[0]}", destination)
        else:
            self.made(matrix, piece.parts, piece.make, destination)

    def made(
        self,
        matrix: Matrix,
        parts: Sequence[str],
        make: Callable[[dict[str, NDArray]], NDArray],
        destination: Tensor | None,
    ) -> None:
        """What `make` makes of some stored parts of a module, by name, rounded to the dtype of `destination`."""
        specs = {part: self._spec(f"{matrix.module}.{part}") for part in parts}
        if destination is None:
            return
        held = {part: self._read_aside(f"{matrix.module}.{part}") for part in parts}

        def convert() -> None:
            arrays = {part: formats().view(held[part], spec.dtype, spec.shape) for part, spec in specs.items()}
            destination.copy_(torch.from_numpy(make(arrays)))

        self._conversions.append(convert)

    def dequantized(self, matrix: Matrix, scheme: str, destination: Tensor | None) -> None:
        """A module of a quantized scheme into `destination` [out, in], rounded to its dtype."""
        shape = matrix.shape
        self.made(
            matrix, tuple(self.parts(matrix)), lambda arrays: formats().dequantize(scheme, arrays, shape), destination
        )

    def rest(self, matrix: Matrix, pieces: Sequence[Piece]) -> None:
        """The parts that no piece is made of (they repeat the shape): read like all others, and of no use."""
        known = {part for piece in pieces for part in piece.parts}
        for part in self.parts(matrix):
            if part not in known and not self.measuring:
                self._read_aside(f"{matrix.module}.{part}")

    def _read_aside(self, name: str) -> bytearray:
        place = self._place(name)
        held = bytearray(place.spec.nbytes)
        self._reads.append(_Read(place.shard, place.offset, memoryview(held)))
        return held

    def fill(self) -> None:
        """Read everything that was declared, in file order, then convert, copy to the device and check it."""
        for shard, reads in groupby(sorted(self._reads, key=lambda read: read[:2]), key=lambda read: read.shard):
            scatter(self.source, shard, [(read.offset, read.buffer) for read in reads], self.progress)
        self._reads.clear()
        for actions in (self._conversions, self._copies, self._checks):
            for action in actions:
                action()
            actions.clear()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """A tensor on the device, and the host tensor to fill (the same one on the CPU, None when measuring)."""
        self.nbytes += count(shape) * dtype.itemsize
        if self.measuring:
            return torch.empty(shape, dtype=dtype, device="meta"), None
        result = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            return result, result
        staging = torch.empty(shape, dtype=dtype)
        self._copies.append(lambda: result.copy_(staging))
        return result, staging

    def _load(self, matrix: Matrix, destination: Tensor | None) -> None:
        scheme = self.scheme(matrix)
        if scheme not in PLAIN_SCHEMES:
            self.dequantized(matrix, scheme, destination)
        elif destination is None or destination.dtype == PLAIN_SCHEMES[scheme]:
            self.raw(f"{matrix.module}.weight", destination)
        else:
            self._convert(f"{matrix.module}.weight", destination)

    def _convert(self, name: str, destination: Tensor | None) -> None:
        """A plain tensor into a destination of another dtype."""
        spec = self._spec(name)
        if spec.dtype not in TORCH_DTYPES:
            raise CheckpointCorrupt(
                f"tensor {name}: expected BF16, F16 or F32, found {spec.dtype}",
                hint="nothing but a plain float type can stand here: ask the publisher of the checkpoint",
            )
        if destination is None:
            return
        held = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        self.raw(name, held)
        self._conversions.append(lambda: destination.copy_(held))

    def parts(self, matrix: Matrix) -> dict[str, Located]:
        """The tensors that hold the matrix, for those who read them on their own; they count as used."""
        parts = self._parts(matrix)
        self.used.update(f"{matrix.module}.{part}" for part in parts)
        return parts

    def _parts(self, matrix: Matrix) -> dict[str, Located]:
        """The tensors that hold the matrix; a router's bias shares its path but is not one of them."""
        places = self.modules.get(matrix.module, {})
        return {part: place for part, place in places.items() if part.startswith("weight")}

    def _place(self, name: str) -> Located:
        parsed = parse_name(name)
        place = self.modules.get(parsed.module_path, {}).get(parsed.part) if parsed else None
        if place is None:
            raise _missing(self.source, name)
        return place

    def _spec(self, name: str) -> TensorSpec:
        self.used.add(name)
        return self._place(name).spec


def scatter(source: Source, shard: str, reads: list[tuple[int, memoryview]], progress: Progress | None) -> None:
    """Fill buffers from ascending file offsets; neighbours in a local file share one system call."""
    path = source.local_path(shard)
    if path is None:
        for offset, buffer in reads:
            source.read_into(shard, offset, buffer)
            _advance(progress, len(buffer))
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        run: list[memoryview] = []
        start = end = size = 0
        for offset, buffer in reads:
            if run and (offset != end or size + len(buffer) > READ_BYTES or len(run) >= READ_BUFFERS):
                _read_run(descriptor, start, run, str(path), progress)
                run, size = [], 0
            if not run:
                start = offset
            run.append(buffer)
            size += len(buffer)
            end = offset + len(buffer)
        if run:
            _read_run(descriptor, start, run, str(path), progress)
    finally:
        os.close(descriptor)


def _read_run(descriptor: int, offset: int, buffers: list[memoryview], path: str, progress: Progress | None) -> None:
    """Fill neighbouring buffers from `offset`. Raises CheckpointCorrupt where the file ends early."""
    wanted = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < wanted:
        with disk_errors(path):
            got = os.preadv(descriptor, buffers, offset + done)
        if got == 0:
            raise CheckpointCorrupt(
                f"{path} is truncated: it ends at {offset + done}, needed up to {offset + wanted}",
                hint=again(*os.path.split(path), overwrite=True),
            )
        done += got
        _advance(progress, got)
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _advance(progress: Progress | None, amount: int) -> None:
    if progress is not None:
        progress.advanced("load", amount)


def _mismatch(name: str, expected: Sequence[Sequence[int]], found: Sequence[int]) -> CheckpointCorrupt:
    wanted = " or ".join(str(list(shape)) for shape in expected)
    return CheckpointCorrupt(
        f"tensor {name}: the configuration implies {wanted}, found {list(found)}",
        hint="config.json and shards must come from the same checkpoint",
        name=name,
        expected=[list(shape) for shape in expected],
        found=list(found),
    )


def _missing(source: Source, name: str) -> CheckpointMissing:
    return CheckpointMissing(f"{source.label} holds no tensor {name}", hint=look(source.label))
