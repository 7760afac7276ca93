"""The PTX that decodes FP4 on NVIDIA GPUs, executed here instruction by instruction on registers of numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from k3tool.kernels.moe.tiles import FP4_PTX
from k3tool.kernels.mxfp4.reference import code_values, scale_values


def halves(register):
    """uint32 [n] -> float32 [n, 2]: the bfloat16 in the low and the high half."""
    parts = np.stack([register & 0xFFFF, register >> 16], -1).astype(np.uint32) << 16
    return parts.view(np.float32)


def joined(values):
    """float32 [n, 2] rounded to bfloat16 -> uint32 [n]."""
    bits = (
        torch.from_numpy(np.ascontiguousarray(values))
        .bfloat16()
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
        .astype(np.uint32)
    )
    return bits[:, 0] | (bits[:, 1] << 16)


def permuted(a, b, selector):
    """prmt: byte i of the result is byte `nibble i of the selector` of b and a side by side."""
    both = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], axis=1)
    chosen = [(selector >> (4 * i)) & 7 for i in range(4)]
    return np.ascontiguousarray(both[:, chosen]).view(np.uint32).reshape(-1)


def execute(program, inputs):
    """Run the instructions on registers of [n] uint32; returns all registers."""
    count = len(next(iter(inputs.values())))
    registers = dict(inputs)

    def value(word):
        return registers[word] if word in registers else np.full(count, int(word, 0), np.uint32)

    for line in re.findall(r"[^;{}]+", program.value):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        operation, target, *rest = words
        a = value(rest[0])
        if operation == "mov.b32":
            result = a
        elif operation == "prmt.b32":
            result = permuted(a, value(rest[1]), int(rest[2], 0))
        elif operation == "shl.b32":
            result = a << np.uint32(int(rest[1]))
        elif operation == "shr.u32":
            result = a >> np.uint32(int(rest[1]))
        elif operation == "and.b32":
            result = a & value(rest[1])
        elif operation == "lop3.b32":
            assert rest[3] == "0xEA"  # (a & b) | c
            result = (a & value(rest[1])) | value(rest[2])
        elif operation == "fma.rn.bf16x2":
            wide = [halves(x).astype(np.float64) for x in (a, value(rest[1]), value(rest[2]))]
            result = joined((wide[0] * wide[1] + wide[2]).astype(np.float32))
        else:
            raise AssertionError(f"unknown instruction {operation}")
        registers[target] = result.astype(np.uint32)
    return registers


@pytest.mark.parametrize("scale_byte", [1, 60, 118, 127, 128, 129, 200, 251])
def test_every_byte_in_every_place(scale_byte):
    """All 256 bytes in each of the four places; also the zeros keep their signs."""
    rng = np.random.default_rng(0)
    packed = np.concatenate(
        [np.roll(np.stack([np.arange(256)] + [rng.permutation(256)] * 3, 1), place, 1) for place in range(4)]
    )
    packed = packed.astype(np.uint8)
    scale = scale_values(torch.tensor([scale_byte], dtype=torch.uint8))
    bits = int(scale.bfloat16().view(torch.int16)) & 0xFFFF
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(-1)
    inputs = {f"${index}": np.full(len(words), bits * 0x10001, np.uint32) for index in (5, 6, 7, 8)}
    found = execute(FP4_PTX, {"$4": words, **inputs})
    codes = code_values(torch.device("cpu")) * scale
    for names, nibbles in ((("$0", "$1"), packed & 15), (("$2", "$3"), packed >> 4)):
        expected = codes[torch.from_numpy(nibbles).long()]
        values = np.concatenate([halves(found[name]) for name in names], axis=1)
        assert np.array_equal(values.view(np.uint32), expected.numpy().view(np.uint32))
