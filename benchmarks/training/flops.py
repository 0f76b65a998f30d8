"""Floating-point operations that the training of an EAGLE-3 draft asks for, however it is written.

Counted as in PaLM, appendix B (Chowdhery et al. 2022, arXiv 2204.02311): 6 for each weight of a trained
matrix and each row that it is applied to (2 forward, 4 backward), 4 for a frozen one that gradients go
through, 2 for one without gradients; 12 for each head dimension, head, query and key that it sees. Only keys
that a query may see are counted, and rows that have something to propose: padding, and rows whose output
nobody asks for, are no use.

    applied to                         what
    each row                           fc, keys and values of test-time step 0
    each supervised row                the verifier's head
    each supervised row and step       queries, output, MLP, the draft's head; from step 1 on keys and values
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.training.invented import Shape
from eagle3_pipeline.training.batches import supervised_rows

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets; those of the SXM form where there are several.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
_TRAINED, _FROZEN, _FORWARD = 6, 4, 2
_PER_KEY = 12


@dataclass(frozen=True)
class Rows:
    """What of some samples the work depends on."""

    rows: int
    supervised: int
    keys: int
    """Sum over the supervised rows of the rows that each may look at."""


def count_rows(masks: Iterable[torch.Tensor]) -> Rows:
    """Count rows of samples by their loss masks, `[tokens]` each."""
    rows = supervised = keys = 0
    for mask in masks:
        at = supervised_rows(mask)
        rows += len(mask) - 1
        supervised += len(at)
        keys += int((at + 1).sum())
    return Rows(rows, supervised, keys)


def flops(shape: Shape, rows: Rows, *, steps: int, train_head: bool) -> float:
    """Operations of one pass over the rows with `steps` test-time steps, optimizer left out."""
    hidden, head = shape.hidden, shape.hidden * shape.draft_tokens
    aux_layers = len(shape.layer_ids) - 1
    queries = 2 * hidden * shape.heads * shape.head_dim
    keys_and_values = 2 * 2 * hidden * shape.key_heads * shape.head_dim
    output = shape.heads * shape.head_dim * hidden
    mlp = 3 * hidden * shape.intermediate
    of_row = _TRAINED * (aux_layers * hidden * hidden + keys_and_values)
    of_step = _TRAINED * (queries + output + mlp) + (_TRAINED if train_head else _FROZEN) * head
    of_supervised = steps * of_step + (steps - 1) * _TRAINED * keys_and_values + _FORWARD * head
    seen = sum(rows.keys + step * rows.supervised for step in range(steps))
    of_keys = _PER_KEY * shape.heads * shape.head_dim * seen
    return float(rows.rows * of_row + rows.supervised * of_supervised + of_keys)


def utilization(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilization: the useful operations a second, as a share of what the device could do."""
    return tokens_per_second * flops_per_token / peak


def peak_of(gpu: str) -> float | None:
    """Peak of a GPU by the name that its driver gives; None for one that is not listed, or not as SXM."""
    if "PCIe" in gpu:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)
