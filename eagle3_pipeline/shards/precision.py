"""States in 8 bits: float8_e4m3fn (1 sign, 4 exponent, 3 mantissa bits, at most 448), a scale for each row.

    state = value * scale        scale = the smallest power of two with |state| / scale <= 448 in the row

A row is one token's state of one layer. No value saturates. A power of two makes the product exact in
bfloat16, and shards that are read and written again come out the same, so nothing is lost twice.

The error of one state is at most 1/16 of it (half of the last mantissa bit), and at most scale / 1024
below scale / 64, where the numbers of this type lie evenly.
"""

import numpy as np
import torch
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_SCALE = -126  # as an exponent: the smallest normal float32
# The bits of all pairs of values in bfloat16: looking up two at once is seven times as fast on the CPU as
# torch's conversion. The lower byte comes first in memory.
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
_PAIRS = (
    torch.stack((_VALUES.repeat(256), _VALUES.repeat_interleave(256)), 1).view(torch.int32).flatten().numpy()
)


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Values float8_e4m3fn `[..., hidden]`, scales float32 `[...]` of finite bf16 states `[..., hidden]`.

    The hidden size is even, as that of every transformer is; ValueError if not.
    """
    if states.shape[-1] % 2:
        raise ValueError(f"a hidden size of {states.shape[-1]}, expected an even one")
    largest = states.abs().amax(dim=-1).float() / _LARGEST
    mantissa, exponent = largest.frexp()  # mantissa in 0.5 .. 1, and 0.5 is a power of two already
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp_(min=_SMALLEST_SCALE)
    scales = ((exponent + 127) << 23).view(torch.float32)  # 2 ** exponent, exactly
    return (states * scales.reciprocal().to(states.dtype)[..., None]).to(torch.float8_e4m3fn), scales


def restore(values: Tensor, scales: Tensor) -> Tensor:
    """The states, bf16 `[..., hidden]`, of values `[..., hidden]` and scales `[...]`."""
    pairs = np.take(_PAIRS, values.view(torch.uint16).numpy())
    states = torch.from_numpy(pairs.view(np.int16)).view(torch.bfloat16)
    return states.mul_(scales.to(torch.bfloat16)[..., None])
