"""The training's attention on a GPU held against that of the CPU, which tests hold against a plain softmax.

No test runs the GPU's operators: nothing is measured before they are known to give the same numbers.

    python -m benchmarks.gpu.attention      on the first GPU that is visible; exits with 1 where they differ
"""

import sys

import torch
from torch import Tensor

from eagle3_pipeline.training.attention import attend, make_context
from eagle3_pipeline.training.geometry import Run

_HEADS, _KEY_HEADS, _WIDTH = 8, 2, 128
# Samples of 300, 200 and 70 rows: two runs with rows between and behind them, one whole, one at the end.
_RUNS = (Run(0, 90, 10, 100), Run(90, 190, 10, 250), Run(190, 390, 300, 500), Run(390, 400, 500, 570))
_ROWS, _QUERIES = 570, 400
# A window that is off by one differs by a fifth.
_WINDOW = 24
# Relative, by norm: bfloat16 alone makes 0.004.
_TOLERANCE = 0.02
_CPU = torch.device("cpu")


def require_same_attention(device: torch.device) -> float:
    """The largest relative difference, in bfloat16 on `device`, of outputs and gradients.

    Raises SystemExit where it is above the tolerance, or no number.
    """
    most = 0.0
    for window in (None, _WINDOW):
        for step in (0, 2):
            here = _results(_CPU, torch.float32, window, step)
            there = _results(device, torch.bfloat16, window, step)
            for name, expected in here.items():
                off = float((there[name] - expected).norm() / expected.norm())
                if not off <= _TOLERANCE:
                    raise SystemExit(
                        f"attention on {device} (step {step}, window {window}): {name} differs by {off:.3f} "
                        f"from the CPU's, expected at most {_TOLERANCE}: nothing is measured"
                    )
                most = max(most, off)
    return most


def _results(device: torch.device, dtype: torch.dtype, window: int | None, step: int) -> dict[str, Tensor]:
    """Output and gradients, float32 on the CPU; numbers are the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int, heads: int) -> Tensor:
        values = torch.randn(count, heads, _WIDTH, generator=generator)
        return values.to(torch.bfloat16).to(device, dtype).requires_grad_()

    query, keys, values = some(_QUERIES, _HEADS), some(_ROWS, _KEY_HEADS), some(_ROWS, _KEY_HEADS)
    chain = [(some(_QUERIES, _KEY_HEADS), some(_QUERIES, _KEY_HEADS)) for _ in range(step)]
    output = attend(query, keys, values, chain, make_context(_RUNS, window, step, dtype, device))
    weights = some(_QUERIES, _HEADS).detach().flatten(1)
    leaves = {"query": query, "keys": keys, "values": values}
    for number, link in enumerate(chain, 1):
        leaves |= {f"key {number}": link[0], f"value {number}": link[1]}
    gradients = torch.autograd.grad((output * weights).sum(), tuple(leaves.values()))
    found = {"output": output.detach()}
    found |= {f"gradient of {name}": one for name, one in zip(leaves, gradients, strict=True)}
    return {name: one.float().cpu() for name, one in found.items()}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no GPU here: torch shows none. Run this on a machine with a GPU.")
    print(
        f"attention differs by at most {require_same_attention(torch.device('cuda', 0)):.4f} from the CPU's"
    )
