"""Each source byte is read once and each tensor converted once, however many ranks hold it; and what is left of that
where files may not all be open at once, or several processes divide them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from k3tool import execute
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.reader import LEAST_GUESS, read_header
from k3tool.checkpoint.source import LocalSource
from k3tool.execute import Options, Part
from k3tool.layout import Layout
from k3tool.lockstep import divide, limit, lockstep, neighbours, reads_of
from k3tool.quantize import quantize
from k3tool.reshard import Request, prepare, reshard
from k3tool.standin import serve
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.transform.quantize_step import Convert

LAYOUTS = [
    Layout(8, 1, 1), Layout(1, 8, 1), Layout(1, 1, 4), Layout(2, 4, 1), Layout(8, 2, 1), Layout(2, 2, 2),
    Layout(1, 4, 4), Layout(4, 2, 2),
]  # fmt: skip


def ask(layout: Layout, **more: Any) -> Request:
    return Request(tp=layout.tp, ep=layout.ep, pp=layout.pp, **more)


def make(folder: Path, *, tied: bool = False) -> Path:
    document = tiny_config(
        num_layers=4, hidden_size=128, kda_heads=8, kda_head_dim=16, mla_heads=8, moe_intermediate_size=256,
        num_experts=8, latent_size=64, intermediate_size=128, vocab_size=513, vision=False,
    )  # fmt: skip
    document["tie_word_embeddings"] = document["text_config"]["tie_word_embeddings"] = tied
    write_checkpoint(folder, document, seed=3)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("wide") / "k3")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def tensors_of(path: Path) -> Sequence[TensorSpec]:
    return read_header(LocalSource(path.parent), path.name, {path.name: path.stat().st_size}).tensors


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each module has been converted."""
    counted: Counter[str] = Counter()
    apply = Convert.apply

    def counting(self: Convert, inputs: Any) -> Any:
        counted.update(work.path for work in self.works)
        return apply(self, inputs)

    monkeypatch.setattr(Convert, "apply", counting)
    return counted


@pytest.mark.parametrize("max_shard_bytes", [30_000, 10**9], ids=["many files", "one file a rank"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_resharded_byte_is_read_once(wide: Path, tmp_path: Path, layout: Layout, max_shard_bytes: int) -> None:
    request = ask(layout, max_shard_bytes=max_shard_bytes)
    planned = prepare(wide, request).as_json()["bytes_read"]
    report = reshard(wide, tmp_path / "out", request).report
    assert 0.9 * size_of(wide) < report.bytes_read <= size_of(wide)
    assert planned == report.bytes_read


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("scheme", ["nvfp4", "int8", "bf16"])
def test_a_module_is_converted_once_for_all_ranks(
    wide: Path, tmp_path: Path, layout: Layout, scheme: str, converted: Counter[str]
) -> None:
    job = quantize(wide, tmp_path / "out", experts=scheme, latent="fp8-channel", request=ask(layout))
    assert job.report.bytes_read <= size_of(wide)
    assert set(converted.values()) == {1} and len(converted) == len(job.rows) == 3 * (8 * 3 + 2)


def test_a_fused_attention_is_converted_once(wide: Path, tmp_path: Path, converted: Counter[str]) -> None:
    job = quantize(wide, tmp_path / "out", attention="nvfp4", request=ask(Layout(2, 4, 1)))
    assert job.report.bytes_read <= size_of(wide) and set(converted.values()) == {1}


@pytest.mark.parametrize("layout", [Layout(1, 1, 4), Layout(2, 2, 2)], ids=str)
def test_an_embedding_that_two_stages_share_is_read_once(tmp_path: Path, layout: Layout) -> None:
    source = make(tmp_path / "tied", tied=True)
    request = ask(layout, max_shard_bytes=60_000)
    assert reshard(source, tmp_path / "out", request).report.bytes_read <= size_of(source)
    reshard(tmp_path / "out", tmp_path / "joined", Request(gpus=1, form="hf"))
    assert reshard(source, tmp_path / "whole", Request(gpus=1, form="hf")).report.bytes_read <= size_of(source)
    assert shards(tmp_path / "joined") == shards(tmp_path / "whole")


@pytest.mark.parametrize("source", [Layout(4, 2, 1), Layout(2, 1, 2)], ids=str)
@pytest.mark.parametrize("target", [Layout(2, 4, 1), Layout(8, 1, 1), Layout(1, 8, 1), Layout(1, 1, 2)], ids=str)
def test_ranks_are_read_once_for_other_ranks(wide: Path, tmp_path: Path, source: Layout, target: Layout) -> None:
    """Rows that are joined of several ranks' and cut again, too."""
    reshard(wide, tmp_path / "ranks", ask(source))
    report = reshard(tmp_path / "ranks", tmp_path / "out", ask(target)).report
    assert report.bytes_read <= size_of(wide)
    reshard(wide, tmp_path / "direct", ask(target))
    assert shards(tmp_path / "out") == shards(tmp_path / "direct")


@pytest.mark.parametrize("max_shard_bytes", [200_000, 10**9], ids=["many files", "one file a rank"])
@pytest.mark.parametrize("layout", [Layout(8, 1, 1), Layout(1, 8, 1), Layout(2, 4, 1), Layout(2, 2, 2)], ids=str)
def test_a_hub_sends_each_byte_once(
    wide: Path,
    tmp_path: Path,
    layout: Layout,
    max_shard_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    converted: Counter[str],
) -> None:
    """Counted where they are sent: the tensors, and beside them headers, index and configuration."""
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 40_000)  # shards are larger, as real ones are
    tensors = sum(spec.nbytes for path in wide.glob("*.safetensors") for spec in tensors_of(path))
    beside = sum(path.stat().st_size for path in wide.iterdir() if path.suffix != ".safetensors")
    headers = len(list(wide.glob("*.safetensors"))) * LEAST_GUESS
    request = ask(layout, max_shard_bytes=max_shard_bytes)
    with serve(wide, "org/wide") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        quantize("org/wide", tmp_path / "out", experts="nvfp4", request=request)
        quantized = hub.bytes_sent
        reshard("org/wide", tmp_path / "ranks", request)
        moved = hub.bytes_sent - quantized
    assert tensors < min(quantized, moved) and max(quantized, moved) <= tensors + headers + beside
    assert set(converted.values()) == {1}


# One rank, and shares of a job


def test_one_rank_reads_what_it_writes_and_whole_the_rows_that_are_cut(wide: Path, tmp_path: Path) -> None:
    request = ask(Layout(8, 2, 1), ranks=(3,))
    prepared = prepare(wide, request)
    report = reshard(wide, tmp_path / "out", request).report
    assert report.bytes_read == prepared.as_json()["bytes_read"]
    rows = {}  # the whole of what this rank keeps some columns of
    for job in prepared.wanted:
        for step in job.steps:
            for region in step.needs:
                if region.blocks.rows > 1:
                    rows[region.tensor] = region.blocks.rows * (region.blocks.pitch - region.blocks.width)
    assert rows and all(name.rsplit(".", 2)[1] in ("w2", "o_proj", "down_proj") for name in rows)
    assert report.bytes_read <= 1.02 * report.bytes_written + sum(rows.values())


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2, 3), (5,), tuple(range(8))], ids=str)
def test_a_dry_run_says_what_some_ranks_will_read(wide: Path, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    request = ask(Layout(4, 2, 1), ranks=ranks, max_shard_bytes=60_000)
    planned = prepare(wide, request).as_json()["bytes_read"]
    assert reshard(wide, tmp_path / "out", request).report.bytes_read == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("layout", [Layout(8, 1, 1), Layout(1, 8, 1), Layout(2, 2, 2)], ids=str)
def test_parts_read_no_byte_of_each_other(wide: Path, tmp_path: Path, layout: Layout, converted: Counter[str]) -> None:
    """Processes that divide a job: together they read the source once and convert each module once."""
    request = ask(layout, max_shard_bytes=60_000)
    read = {"reshard": 0, "quantize": 0}
    for number in range(3):
        options = Options(part=Part(number, 3), max_workers=2)
        moved = reshard(wide, tmp_path / "moved", request, options=options)
        made = quantize(wide, tmp_path / "made", experts="nvfp4", request=request, options=options)
        read["reshard"] += moved.report.bytes_read
        read["quantize"] += made.report.bytes_read
        assert min(moved.report.bytes_written, made.report.bytes_written) > 0
    assert max(read.values()) <= size_of(wide)
    assert set(converted.values()) == {1} and len(converted) == 3 * 8 * 3
    assert shards(tmp_path / "moved") == shards_of(wide, tmp_path / "whole", request)


@pytest.mark.parametrize("layout", [Layout(8, 1, 1), Layout(1, 8, 1), Layout(2, 4, 1)], ids=str)
def test_little_memory_reads_no_more(
    wide: Path, tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest buffers, and rows that do not fit into them."""
    whole = shards_of(wide, tmp_path / "whole", ask(layout))
    for size in (execute.LEAST_BUFFER_BYTES, 100):
        monkeypatch.setattr(execute, "BUFFER_BYTES", size)
        report = reshard(wide, tmp_path / str(size), ask(layout)).report
        assert report.bytes_read <= size_of(wide)
        assert shards(tmp_path / str(size)) == whole


def shards(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def shards_of(source: Path, dest: Path, request: Request) -> dict[str, bytes]:
    reshard(source, dest, request)
    return shards(dest)


# Batches


def batch_of(source: Path, layout: Layout) -> tuple[Any, ...]:
    (batch,) = prepare(source, ask(layout)).plan.batches()
    return batch


def test_files_of_a_batch_are_walked_in_the_order_of_all_tensors(wide: Path) -> None:
    batch = batch_of(wide, Layout(2, 4, 1))
    seen: list[str] = []
    for members in lockstep(batch):
        (name,) = {step.outputs[0].name for _, step in members}
        experts = ".experts." in name
        assert len(members) == (2 if experts else 8)
        seen.append(name)
    assert len(seen) == len(set(seen))
    for number, job in enumerate(batch):
        mine = [step.outputs[0].name for members in lockstep(batch) for n, step in members if n == number]
        assert mine == [step.outputs[0].name for step in job.steps]


def test_batches_are_divided_between_neighbours(wide: Path) -> None:
    batch = batch_of(wide, Layout(2, 4, 1))
    assert [len(held) for held in neighbours(batch)] == [2, 2, 2, 2]
    assert [len(piece) for piece in divide(batch, 2)] == [4, 4]
    assert [len(piece) for piece in divide(batch, 99)] == [2, 2, 2, 2]
    assert [len(piece) for piece in limit(batch, 5)] == [4, 4]
    assert [len(piece) for piece in limit(batch, 1)] == [1] * 8
    whole = reads_of(batch)
    assert whole < reads_of(divide(batch, 2)[0]) * 2 < 2 * whole


def test_many_ranks_within_the_limit_of_open_files(wide: Path, tmp_path: Path) -> None:
    """32 files that share tensors, with 110 descriptors for everything: the same bytes, shared ones read again."""
    whole = shards_of(wide, tmp_path / "whole", ask(Layout(4, 8, 1)))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 110))\n"
        "from k3tool.reshard import Request, reshard\n"
        f"report = reshard({str(wide)!r}, {str(tmp_path / 'out')!r}, Request(tp=4, ep=8)).report\n"
        "print(report.bytes_read)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shards(tmp_path / "out") == whole
    assert size_of(wide) < int(done.stdout) < 3 * size_of(wide)


def test_fewer_workers_come_before_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = [256, 1000]

    def set_limits(_: int, new: tuple[int, int]) -> None:
        limits[0] = new[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert execute.open_files(4, 8) == (4, 8) and limits[0] == 256  # enough as it is
    assert execute.open_files(4, 100) == (4, 100) and 500 < limits[0] < 1000  # no more than is needed
    assert execute.open_files(4, 400) == (2, 400) and limits[0] == 1000
    workers, files = execute.open_files(4, 7168)
    assert workers == 1 and 800 < files < 1000
