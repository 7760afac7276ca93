"""Plans: what a region is in bytes, files of bounded size, identities that change when the work does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.plan import Compute, Copy, LazySteps, Plan, Region, TensorOut, Zeros, carry, file_job, pack, whole
from k3tool.transform.base import Applied


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["U8", "BF16", "F32"]), st.data())
def test_region_blocks_are_the_bytes_of_a_slice(shape, dtype, data):
    shape = tuple(shape)
    width = {"U8": 1, "BF16": 2, "F32": 4}[dtype]
    axis = data.draw(st.integers(0, max(0, len(shape) - 1)))
    extent = shape[axis] if shape else 1
    start = data.draw(st.integers(0, extent))
    stop = data.draw(st.integers(start, extent))
    array = np.arange(int(np.prod(shape)), dtype=f"u{width}").reshape(shape or (1,))
    window = tuple(slice(start, stop) if index == axis else slice(None) for index in range(max(1, len(shape))))
    region = Region("t", dtype, shape, axis, start, stop)
    memory = array.tobytes()
    for blocks in (region.rows, region.blocks):
        rows = (memory[blocks.offset + row * blocks.pitch :][: blocks.width] for row in range(blocks.rows))
        assert b"".join(rows) == array[window].tobytes()
    assert region.nbytes == array[window].nbytes


def test_a_cut_inside_a_byte_is_our_own_mistake():
    with pytest.raises(AssertionError):
        _ = Region("t", "F4", (4, 3), 0, 1, 2).blocks


def test_whole_rows_are_one_range():
    assert Region("t", "U8", (8, 6), 0, 2, 5).blocks == (12, 18, 18, 1)
    assert Region("t", "U8", (8, 6), 1, 2, 5).blocks == (2, 3, 6, 8)
    assert whole("t", "F32", ()).blocks == (0, 4, 4, 1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30)), max_size=30), st.integers(1, 40))
def test_pack_keeps_order_labels_and_limit(items, limit):
    packed = list(pack(((label, number, size) for number, (label, size) in enumerate(items)), limit))
    assert [number for _, held, _ in packed for number in held] == list(range(len(items)))
    for label, held, size in packed:
        assert {items[number][0] for number in held} == {label}
        assert size == sum(items[number][1] for number in held)
        assert size <= limit or len(held) == 1
    for (label, _, size), (following, held, _) in pairwise(packed):
        assert label != following or size + items[held[0]][1] > limit  # no file is cut early


def test_lazy_steps_are_built_each_time_and_slice():
    made = []

    def make(item: int):
        made.append(item)
        return carry(str(item), "U8", (item,))

    steps = LazySteps([1, 2, 3], make)
    assert not made and len(steps) == 3
    assert [step.outputs[0].name for step in steps] == ["1", "2", "3"] and made == [1, 2, 3]
    assert steps[1].outputs[0].shape == (2,)
    assert [step.outputs[0].name for step in steps[1:]] == ["2", "3"]


class Twice:
    def describe(self) -> str:
        return "twice"

    def apply(self, inputs):
        return Applied([bytes(inputs[0]) * 2])


def make_plan(**more):
    quantized = Compute((TensorOut("b", "U8", (20,)),), (whole("b", "U8", (10,)),), Twice(), working_bytes=5)
    padded = Copy(TensorOut("c", "U8", (3, 4)), (Region("c", "U8", (3, 9), 1, 0, 3), Zeros(1)), 1)
    jobs = (file_job("x.safetensors", [carry("a", "F32", (2, 2)), quantized]), file_job("y.safetensors", [padded]))
    return Plan(more.pop("command", "test"), jobs, {"source": "s", **more})


def test_plan_sums_up_what_it_will_do():
    plan = make_plan()
    assert [job.data_bytes for job in plan.jobs] == [36, 12]
    assert [job.read_bytes for job in plan.jobs] == [26, 9]
    assert plan.step_bytes == 10 + 10 + 20 + 5  # the inputs twice: the next step's are read meanwhile
    assert plan.as_json()["files"] == [
        {"name": "x.safetensors", "tensors": 2, "bytes": 36},
        {"name": "y.safetensors", "tensors": 1, "bytes": 12},
    ]
    assert [[job.path for job in batch] for batch in plan.batches()] == [["x.safetensors"], ["y.safetensors"]]


def test_identity_follows_command_options_and_files():
    assert make_plan().id == make_plan().id
    others = {make_plan(command="other").id, make_plan(source="t").id, make_plan(option=1).id}
    assert len(others | {make_plan().id}) == 4
