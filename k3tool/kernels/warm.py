"""Compile the CPU kernels that a model is going to need, on tiny inputs, while its weights are still being read.

Compiling takes a second or two of one processor and reading waits for the disk, so the two overlap; and the time of the
first prompt is that of its work. What is not foreseen here is compiled when it is first called.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from k3tool.config import K3Config
from k3tool.kernels import cpu as compiled
from k3tool.kernels.attn_res import mix_blocks
from k3tool.kernels.conv import causal_conv
from k3tool.kernels.elementwise import add, convert, multiply_by_sigmoid, put
from k3tool.kernels.kda import kda, kda_decode
from k3tool.kernels.linear import linear
from k3tool.kernels.mla import mla
from k3tool.kernels.moe import DenseExperts, Experts, PackedExperts, experts_forward, gated_activation
from k3tool.kernels.norm import gated_rms_norm, rms_norm
from k3tool.kernels.router import select_experts

WIDTH = 32  # one group of the packed formats


def start_warming(config: K3Config, dtype: torch.dtype) -> threading.Thread | None:
    """Compile in a thread of its own; join it before the model runs. None where nothing is compiled."""
    if not compiled.available():
        return None
    thread = threading.Thread(target=_quietly, args=(config, dtype), name="k3tool-warm", daemon=True)
    thread.start()
    return thread


def _quietly(config: K3Config, dtype: torch.dtype) -> None:
    # A kernel that fails here fails again where it is needed, and is reported there.
    with contextlib.suppress(Exception), torch.inference_mode():
        warm_up(config, dtype)


def warm_up(config: K3Config, dtype: torch.dtype) -> None:
    """Call every kernel of the model once."""
    row = torch.zeros(1, WIDTH, dtype=dtype)
    weight = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    linear(row, weight)
    linear(row.float(), weight)
    rms_norm(row, torch.ones(WIDTH), 1e-5)
    if config.attn_res_block_size is not None:
        mix_blocks(row[None], torch.zeros(WIDTH), 1e-5)
    gated_activation(row, row, config.activation, config.situ_beta, config.situ_linear_beta)
    put(add(row, multiply_by_sigmoid(row, row)), torch.empty_like(row))
    for other in (torch.float32, torch.bfloat16):
        convert(convert(row, other), dtype)
    if config.num_experts:
        ids, weights = select_experts(torch.zeros(1, 1), None, 1, activation=config.router_activation)
        betas = (config.situ_beta, config.situ_linear_beta)
        experts_forward(row, _experts(config.expert_scheme), ids, weights, config.activation, *betas)
    if "kda" in config.layer_kinds:
        _warm_kda(config, dtype)
    if "mla" in config.layer_kinds:
        mla(row.view(1, 1, 2, 16), torch.zeros(1, 1, 16, dtype=dtype), weight[:, :8].reshape(2, 16, 8), key_dim=8)


def _warm_kda(config: K3Config, dtype: torch.dtype) -> None:
    taps = config.conv_kernel_size
    x = torch.zeros(1, 2, 24, dtype=dtype)
    conv_weight, history = torch.zeros(taps, 24), torch.zeros(1, taps - 1, 24, dtype=dtype)
    heads = causal_conv(x, conv_weight, history).unflatten(-1, (3, 1, 8))
    q, k, v = heads.unbind(2)
    a_log, dt_bias, state, norm = torch.zeros(1), torch.zeros(1, 8), torch.zeros(1, 1, 8, 8), torch.ones(8)
    bound = config.gate_lower_bound
    out = kda(q, k, v, q, q[..., 0], a_log, dt_bias, state, lower_bound=bound)
    gated_rms_norm(out[0], out[0], norm, 1e-5)
    gate = q[:, 0]
    kda_decode(
        x[:, 0],
        conv_weight,
        history,
        gate,
        gate[..., 0],
        a_log,
        dt_bias,
        state,
        gate,
        norm,
        lower_bound=bound,
        eps=1e-5,
    )


def _experts(scheme: str) -> Experts:
    """One expert of the smallest size, stored as the configuration says."""
    if scheme == "bf16":
        return DenseExperts(*(torch.zeros(1, WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(3)))
    group, scale_dtype = (32, torch.uint8) if scheme == "mxfp4" else (16, torch.float8_e4m3fn)
    matrices = {f"{name}_packed": torch.zeros(1, WIDTH, WIDTH // 2, dtype=torch.uint8) for name in ("w1", "w2", "w3")}
    scales = {f"{name}_scale": torch.zeros(1, WIDTH, WIDTH // group, dtype=scale_dtype) for name in ("w1", "w2", "w3")}
    overall = {f"{name}_global": torch.ones(1) for name in ("w1", "w2", "w3")} if scheme == "nvfp4" else {}
    return PackedExperts(**matrices, **scales, **overall, group_size=group)
