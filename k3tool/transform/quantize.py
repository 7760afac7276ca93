"""From one storage format to another on the way: which tensors a checkpoint will hold, and the steps that make them.

`QuantizedForm` shows a source as it will be stored; `QuantizingResharder` makes each rank's share of it. A module that
changes is read whole, converted by `k3tool.formats.convert`, and cut afterwards, so that every layout holds the same
values. What is not to change is carried as it is.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from k3tool import formats
from k3tool.activations import Activations, is_recorded
from k3tool.catalog import MatrixShapes
from k3tool.checkpoint.table import Kind, Tensors
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, UnsupportedError, UsageError
from k3tool.layout import Layout
from k3tool.names import INPUT_SCALES, TensorName, component_of, module_and_part, parse_name
from k3tool.plan import FileJob, LazySteps
from k3tool.transform.base import Compute, Region, Step, TensorOut
from k3tool.transform.quantize_partners import Partners
from k3tool.transform.quantize_policy import FOUR_BIT, Choice, Policy, component_of_module
from k3tool.transform.quantize_step import Convert, Converting, Input, KeepParts, PartCut, Work
from k3tool.transform.reshard import Form, Resharder
from k3tool.transform.split import Cut, Rule, Splitter, parsed, unit_of

NATIVE = ("mxfp4", "bf16", "f16", "f32")  # may become anything; other schemes may only be decoded
COMPENSATED = ("int4", "int8", "nvfp4", "nvfp4-modelopt", "mxfp4", "fp8-channel", "fp8-block")  # by `--calibrated`
ROW_BYTES = 1100  # of what is reported of one module
_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


class QuantizedForm:
    """Another form, with the modules that `policy` names in their new storage.

    changing: module path to what it becomes. untouched: component to how many matrices are carried as they are.
    bytes_in: of the source's tensors.
    """

    def __init__(self, form: Form, splitter: Splitter, policy: Policy) -> None:
        self.inner = form
        self.config: K3Config = form.config
        self.layout = form.layout
        self.policy = policy
        self.splitter = splitter
        self.changing: dict[str, Converting] = {}
        self.untouched: dict[str, int] = {}
        self.bytes_in = 0
        self._kinds: dict[Any, Converting] = {}
        self._unfit: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.matrix_shape = MatrixShapes(self.config)
        self._find()

    @property
    def tensors(self) -> Tensors:
        return self.inner.tensors

    def padding_is_ours(self) -> bool:
        return self.inner.padding_is_ours()

    def regions(self, name: TensorName, kind: Kind, rule: Rule, first: int, last: int) -> tuple[Region, ...]:
        return self.inner.regions(name, kind, rule, first, last)

    def one(self, name: TensorName, kind: Kind, rule: Rule) -> Region:
        return self.inner.one(name, kind, rule)

    def _find(self) -> None:
        """Which modules change. Raises what makes the job impossible, before anything is written."""
        modules: dict[str, tuple[tuple[str, Kind], ...]] = {}
        interned: dict[Any, Any] = {}
        for text, kind in self.inner.items():
            self.bytes_in += TensorOut(text, kind.dtype, kind.shape).nbytes
            path, part = module_and_part(text)
            parts = (*modules.get(path, ()), (part, kind))
            modules[path] = interned.setdefault(parts, parts)
        of_experts = self.policy.components.get("experts", Choice())
        for path, parts in modules.items():
            if ".experts." in path and not self.policy.rules:
                name, choice, component = None, of_experts, "routed_experts"
            else:
                name = parse_name(f"{path}.{parts[0][0]}")
                choice, component = (self.policy.choice(name) if name else Choice()), component_of(name)
            converting = None if choice.scheme == "keep" else self._converting(path, component, parts, choice)
            if converting is not None:
                self.changing[path] = converting
            elif _is_matrix(parts):
                self.untouched[component] = self.untouched.get(component, 0) + 1
        self._check_fit()
        if self.policy.rules:
            self._check_experts(modules)

    def _converting(
        self, path: str, component: str, parts: tuple[tuple[str, Kind], ...], choice: Choice
    ) -> Converting | None:
        """What a module becomes; None where it is no matrix, or stored so already."""
        if not _is_matrix(parts):
            if any(rule.match == path for rule in self.policy.rules):
                raise UnsupportedError(f"{path} is no matrix, so {choice.scheme} does not apply", hint="leave it out")
            return None
        flat = any(part.startswith("weight.") for part, _ in parts)  # their shapes do not tell the matrix's
        key = (path if flat else component, parts, choice)
        if key not in self._kinds:
            made = self._convert_kind(path, dict(parts), choice)
            if made is None:
                return None
            self._kinds[key] = made
        return self._kinds[key]

    def _convert_kind(self, path: str, specs: dict[str, Kind], choice: Choice) -> Converting | None:
        specs = {part: kind for part, kind in specs.items() if part not in INPUT_SCALES}  # not of the values
        scheme = formats.detect(specs, where=path, shape=self.matrix_shape(path))
        if scheme == choice.scheme and scheme in NATIVE:
            return None
        if scheme not in NATIVE and choice.scheme != "bf16":
            raise UnsupportedError(
                f"{path} is stored as {scheme} already: {choice.scheme} would quantize it twice",
                hint=f"start from the release, leave the option out to keep {scheme}, or decode it with bf16 first",
            )
        rows, columns = formats.logical_shape(scheme, specs) or self._logical_shape(path)
        problem = formats.shape_problem(choice.scheme, (rows, columns), group_size=choice.group_size)
        if problem:
            self._unfit.setdefault((path.rpartition(".")[2], choice, rows, columns), (path, problem))
            return None
        outputs = formats.stored_tensors(
            choice.scheme,
            (rows, columns),
            group_size=choice.group_size,
            dtype=_DTYPES.get(scheme, self.config.dtype),
        )
        made = {part: Kind(dtype, size) for part, (dtype, size) in outputs.items()}
        return Converting(scheme, (rows, columns), tuple(sorted(specs.items())), choice, made)

    def _check_fit(self) -> None:
        """Raises UnsupportedError naming every kind of matrix whose shape its scheme cannot hold, and what can."""
        if not self._unfit:
            return
        said: dict[Choice, str] = {}
        for (matrix, choice, rows, columns), (path, problem) in self._unfit.items():
            if choice in said:
                said[choice] += f", nor {matrix} {[rows, columns]}"
            else:
                said[choice] = f"{path}: {choice.scheme} cannot hold {[rows, columns]}: {problem}"
        raise UnsupportedError("; ".join(said.values()), hint=self._what_fits())

    def _what_fits(self) -> str:
        """The same choices with a scheme that holds these shapes: engines fuse matrices, so that all change together."""
        instead: dict[str, str] = {}
        for (_, choice, *_), (path, _) in self._unfit.items():
            name = parse_name(f"{path}.weight")
            ruled = name is None or self.policy.ruled(name) is not None
            option = "the rule's scheme" if ruled or name is None else f"--{component_of_module(name)}"
            shapes = [(rows, columns) for (_, other, rows, columns) in self._unfit if other == choice]
            instead[option] = next(
                scheme
                for scheme in (*(("nvfp4",) if choice.scheme in FOUR_BIT else ()), "fp8-channel")
                if not any(formats.shape_problem(scheme, shape) for shape in shapes)
            )
        chosen = " and ".join(f"{option} {scheme}" for option, scheme in instead.items())
        return f"choose {chosen}, which holds every one of these"

    def _logical_shape(self, path: str) -> tuple[int, ...]:
        """[out, in] that the configuration implies, for storage that does not tell it (nf4, fp4)."""
        shape = self.matrix_shape(path)
        if shape is None:
            raise CheckpointCorrupt(
                f"{path} is no module of this configuration",
                hint="check that config.json belongs to these shards: inspect lists what is unexpected",
            )
        return shape

    def _check_experts(self, modules: Mapping[str, Any]) -> None:
        """All experts of a layer must end up alike: engines stack them. Raises UsageError naming the layer."""
        made: dict[int, dict[Any, str]] = defaultdict(dict)
        for path in modules:
            name = parse_name(path + ".weight") if ".experts." in path else None
            if name is None or name.layer is None or name.expert is None:
                continue
            converting = self.changing.get(path)
            made[name.layer].setdefault(converting and (converting.choice, converting.scheme), path)
            if len(made[name.layer]) > 1:
                one, other = made[name.layer].values()
                raise UsageError(
                    f"layer {name.layer}: {one} and {other} would be stored differently",
                    hint="give all routed experts of a layer the same scheme",
                )

    def check_activations(self, activations: Activations, *, calibrated: bool) -> None:
        """Everything that will be asked of the activations is there, before anything is written.

        Raises what `Activations` raises, and UsageError where nothing is there to be `calibrated`."""
        activations.check_model(self.inner.config)
        compensated = 0
        for path, converting in self.changing.items():
            if is_recorded(path):
                activations.mean_square(path, converting.shape[1])
            if calibrated and is_compensated(path, converting):
                activations.check_gram(path, converting.shape[1])
                compensated += 1
        if calibrated and not compensated:
            raise UsageError(
                "--calibrated: no latent projection becomes a scheme whose errors can be compensated",
                hint=f"add --latent with one of {', '.join(COMPENSATED)}",
            )

    def items(self) -> Iterator[tuple[str, Kind]]:
        """Every tensor as it will be; what replaces a module comes where its first part stood."""
        seen: set[str] = set()
        for text, kind in self.inner.items():
            path, _ = module_and_part(text)
            converting = self.changing.get(path)
            if converting is None:
                yield text, kind
            elif path not in seen:
                seen.add(path)
                for part, made in converting.outputs.items():
                    yield f"{path}.{part}", made

    def kind(self, name: str) -> Kind:
        path, part = module_and_part(name)
        converting = self.changing.get(path)
        return self.inner.kind(name) if converting is None else converting.outputs[part]


class QuantizingResharder(Resharder):
    """Steps of a quantized form: modules that change are made in one step with those that share a scale.

    activations: what squared errors count in each column, where a run has recorded it. calibrated: errors of the latent
    projections are compensated, see `is_compensated`. device: where the arithmetic runs (None: compiled, on the CPU).
    """

    def __init__(
        self,
        form: QuantizedForm,
        splitter: Splitter,
        target: Layout,
        *,
        search: bool,
        exact: bool,
        activations: Activations | None = None,
        calibrated: bool = False,
        device: str | None = None,
    ) -> None:
        super().__init__(form, splitter, target)
        self.quantized = form
        self.search = search
        self.exact = exact
        self.activations = activations
        self.calibrated = calibrated
        self.device = device
        self.partners = Partners(form.config, form.changing, lambda path: form.changing[path].choice.scheme)

    def jobs(
        self, paths: Sequence[str], names: Sequence[str], places: Sequence[int], size: int, *, batch: str = ""
    ) -> list[FileJob]:
        items, at = self._items(names, places)
        read = memory = 0
        measured: dict[tuple[Converting, ...], tuple[int, int]] = {}
        for item in items:
            if isinstance(item, str):
                kind = self.form.kind(item)
                read += TensorOut(item, kind.dtype, kind.shape).nbytes
                continue
            alike = tuple(self.quantized.changing[module] for module in item)
            if alike not in measured:
                step = self._convert(item, 0)
                measured[alike] = (sum(region.nbytes for region in step.needs), step.memory_bytes)
            read += measured[alike][0]
            memory = max(memory, measured[alike][1])
        return [
            FileJob(
                path,
                LazySteps(items, partial(self._step, tp_rank=share)),
                size,
                read,
                memory,
                batch=batch,
                places=at,
                share=share,
            )
            for share, path in enumerate(paths)
        ]

    def _items(self, names: Sequence[str], places: Sequence[int]) -> tuple[list[str | tuple[str, ...]], array[int]]:
        """Names that are carried, and groups of module paths that are converted together, unit by unit; and a place for
        each, ascending: no unit has more items than names."""
        items: list[str | tuple[str, ...]] = []
        at = array("q")
        for _, run in groupby(zip(names, places, strict=True), key=lambda entry: self.unit(entry[0])):
            groups: dict[str, list[str]] = {}
            first = None
            for text, place in run:
                first = place if first is None else first
                path, _ = module_and_part(text)
                converting = self.quantized.changing.get(path)
                if converting is None:
                    items.append(text)
                    continue
                group = groups.setdefault(self.partners.group(path), [])
                if path not in group:
                    group.append(path)
            items.extend(tuple(group) for group in groups.values())
            assert first is not None
            at.extend(range(first, first + len(items) - len(at)))
        return items, at

    def load(self) -> int:
        """One conversion of each kind is tried on a small matrix. What is held until the end are the rows of the report."""
        tried: set[Any] = set()
        for path, converting in self.quantized.changing.items():
            kind = converting.scheme, converting.choice, is_recorded(path), is_compensated(path, converting)
            if kind not in tried:
                tried.add(kind)
                self._convert((path,), 0).transform.load()
        return ROW_BYTES * len(self.quantized.changing)

    def unit(self, text: str) -> str:
        return self.partners.unit(text) or unit_of(text)

    def _step(self, item: str | tuple[str, ...], tp_rank: int) -> Step:
        return self.step(item, tp_rank) if isinstance(item, str) else self._convert(item, tp_rank)

    def _convert(self, paths: Sequence[str], tp_rank: int) -> Compute:
        needs: list[Region] = []
        outputs: list[TensorOut] = []
        works: list[Work] = []
        cuts: list[PartCut] = []
        made = 0
        for path in paths:
            converting = self.quantized.changing[path]
            inputs = []
            for part, kind in converting.parts:
                regions, axis = self._source(f"{path}.{part}", kind)
                inputs.append(Input(part, kind, tuple(_extents(region) for region in regions), axis))
                needs.extend(regions)
            for part, kind in converting.outputs.items():
                cut, axis, first, last = self._cut(f"{path}.{part}", kind, tp_rank)
                cuts.append(PartCut(part == "weight_shape", axis, first, last))
                outputs.append(TensorOut(f"{path}.{part}", kind.dtype, cut.shape(kind.shape)))
                made += TensorOut(part, kind.dtype, kind.shape).nbytes
            works.append(Work(path, converting, tuple(inputs)))
        transform = Convert(
            tuple(works),
            self.config_dtype(works[0]),
            search=self.search,
            exact=self.exact,
            activations=self.activations if is_recorded(paths[0]) else None,
            calibrated=self.calibrated and is_compensated(paths[0], self.quantized.changing[paths[0]]),
            device=self.device,
        )
        return Compute(
            tuple(outputs), tuple(needs), transform, transform.working_bytes, KeepParts(tuple(cuts)), made_bytes=made
        )

    def config_dtype(self, work: Work) -> str:
        return _DTYPES.get(work.converting.scheme, self.form.config.dtype)

    def _source(self, text: str, kind: Kind) -> tuple[tuple[Region, ...], int]:
        """All of a stored tensor of the source, and the axis along which its regions join."""
        name = parsed(text)
        rule = self.rule(name)
        here = self.splitter.cut(name, rule, kind, self.form.layout.tp)
        if here.axis is None or self.form.layout.tp == 1:
            return (self.form.one(name, kind, rule),), 0
        return self.form.regions(name, kind, rule, 0, here.content), here.axis

    def _cut(self, text: str, kind: Kind, tp_rank: int) -> tuple[Cut, int | None, int, int]:
        name = parsed(text)
        rule = self.rule(name)
        cut = self.splitter.cut(name, rule, kind, self.target.tp)
        if name.part == "weight_shape" and rule.axis is not None and self.target.tp > 1:
            return cut, rule.axis, 0, self.target.tp
        if cut.axis is None:
            return cut, None, 0, 0
        first, last = cut.window(tp_rank)
        if cut.kept != last - first:
            raise UnsupportedError(
                f"{text} would need padding at TP {self.target.tp}", hint="quantize with --tp 1, then reshard"
            )
        return cut, cut.axis, first, last


def is_compensated(path: str, converting: Converting) -> bool:
    """Whether `--calibrated` is for this module: a latent projection on its way into a scheme with scales of its own."""
    return component_of(parse_name(path + ".weight")) == "latent" and converting.choice.scheme in COMPENSATED


def _extents(region: Region) -> tuple[int, ...]:
    return (*region.shape[: region.axis], region.size, *region.shape[region.axis + 1 :]) if region.shape else ()


def _is_matrix(parts: tuple[tuple[str, Kind], ...]) -> bool:
    """Not one `weight` of another rank (norms, convolutions, patch embeddings), and not `A_log` or a bias."""
    (part, kind), *others = parts
    return bool(part) and (bool(others) or part != "weight" or len(kind.shape) == 2)
