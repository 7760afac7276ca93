"""FP4 decoding in plain torch, on any device: the specification of the other twins.

Code table and nibble order: OCP Microscaling Formats v1.0 (E2M1, E8M0) and the compressed-tensors layout
`mxfp4-pack-quantized` / `nvfp4-pack-quantized`.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def code_values(device: torch.device) -> Tensor:
    """[16] float32: the number behind each nibble, -0.0 for code 8."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    return torch.cat([magnitudes, -magnitudes])


def scale_values(scale: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """float32 scales: E8M0 bytes as 2^(byte - 127) with 255 as NaN, or E4M3 numbers over the global divisor."""
    if scale.dtype == torch.float8_e4m3fn:
        values = scale.float()
    else:
        byte = scale.view(torch.uint8).to(torch.int32)
        # byte << 23 is the float with that exponent; byte 0 would be zero, and 2^-127 is the subnormal 1 << 22.
        bits = torch.where(byte == 0, 1 << 22, byte << 23)
        values = torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)
    return values if global_scale is None else values / global_scale.float()


def decode_values(
    packed: Tensor, scale: Tensor, dtype: torch.dtype, *, global_scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """packed [..., N/2], scale [..., N/group_size] -> [..., N] in dtype. See the public twin."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = code_values(packed.device)[nibbles.long()]
    scales = scale_values(scale, global_scale)
    grouped = values.unflatten(-1, (scales.shape[-1], -1))
    numbers = (grouped * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    return numbers if out is None else out.copy_(numbers)
