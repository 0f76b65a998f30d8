"""What a training step holds in memory, computed from shapes before the first one, and whether there is room.

    weights      float32, as they are trained (the head too where it is not)
    frozen       the target's embedding, final norm and its head's rows of the draft's tokens
    optimizer    float32: two moments for AdamW, one for what Muon takes, and the start that is pulled to
    buckets      float32, of several processes: torch sums gradients in them, and keeps them
    gradients    float32, beside the buckets where a process has several batches to a step
    batches      those that are read ahead, and the one under way
    activations  what a pass keeps for its backward, and what the backward makes: in the pass's dtype

Gradients come into being while activations go, so one pass holds the larger of both, unless gradients stay
for the next batch of the step. Buckets stay always.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_pipeline.errors import NotEnoughMemory
from eagle3_pipeline.host_memory import available_bytes
from eagle3_pipeline.samples.state_room import gib
from eagle3_pipeline.training.batches import SampleSource, supervised_rows
from eagle3_pipeline.training.draft import FROZEN, trained_parameters
from eagle3_pipeline.training.loss import block_bytes
from eagle3_pipeline.training.optimizer import is_for_muon
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.reading import AHEAD
from eagle3_pipeline.training.schedule import Schedule
from eagle3_pipeline.training.step_shape import StepShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process, by what they hold."""

    weights: int
    frozen: int
    optimizer: int
    buckets: int
    gradients: int
    batches: int
    activations: int
    gradients_stay: bool

    @property
    def lasting(self) -> int:
        """What is there between steps."""
        return self.weights + self.frozen + self.optimizer + self.buckets + self.batches

    @property
    def total(self) -> int:
        """The most that is held at once."""
        if self.gradients_stay:
            return self.lasting + self.gradients + self.activations
        return self.lasting + max(self.gradients, self.activations)

    def in_words(self) -> str:
        """The parts, for a log."""
        names = ("weights", "frozen", "optimizer", "buckets", "gradients", "batches", "activations")
        return ", ".join(f"{name} {gib(size)}" for name in names if (size := getattr(self, name)))


def expected_bytes(
    model: Any,
    *,
    rows: int,
    steps: int,
    supervised: int | None = None,
    loss: str = "kl_div",
    optimizer: str = "adamw",
    pulled: bool = False,
    accumulation: int = 1,
    processes: int = 1,
    longest: int | None = None,
    device: str = "cpu",
) -> MemoryPlan:
    """Bytes of one process's part of a step, of batches of at most `rows` rows, all of them supervised unless
    it is said.

    `accumulation` is how many batches a process goes through. The longest sample has `longest` rows, all
    `rows` unless it is said. `model` may be on the meta device;
    `device` is the kind that trains: "cpu" or "cuda". Activations are those of a pass in bfloat16.
    """
    ahead, longest = AHEAD, rows if longest is None else longest
    if device != "cpu":
        ahead = longest = 0  # batches wait in the memory of the machine; attention is the GPU's own
    trained = trained_parameters(model)
    count = sum(one.numel() for one in trained.values())
    orthogonal = sum(
        one.numel() for name, one in trained.items() if optimizer == "muon" and is_for_muon(name, one)
    )
    named = dict(model.named_parameters())
    frozen = sum(_bytes(one) for name, one in named.items() if name in FROZEN)
    shape = StepShape(model)
    queries = rows if supervised is None else supervised
    return MemoryPlan(
        weights=sum(_bytes(one) for name, one in named.items() if name not in FROZEN),
        frozen=frozen,
        optimizer=4 * (2 * count - orthogonal + (count if pulled else 0)),
        buckets=4 * count if processes > 1 else 0,
        gradients=4 * count if processes == 1 or accumulation > 1 else 0,
        batches=(1 + ahead) * shape.batch(rows, queries),
        activations=shape.pass_(rows, queries, steps, loss)
        + shape.scores(longest)
        + block_bytes(queries * shape.tokens, device),
        gradients_stay=accumulation > 1,
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Size:
    """Rows of a batch, those of them that are supervised, and those of its longest sample."""

    rows: int
    supervised: int
    longest: int


def planned_sizes(source: SampleSource, schedule: Schedule) -> set[Size]:
    """Sizes of all batches of a turn. Those that judge keep nothing for a backward, and are left out."""
    batches = {batch for steps in schedule.epochs.values() for step in steps for batch in step}
    rows, supervised = {}, {}
    for index in {index for batch in batches for index in batch}:
        mask = source.loss_mask(index)
        rows[index], supervised[index] = len(mask) - 1, len(supervised_rows(mask))
    return {
        Size(
            sum(rows[index] for index in batch),
            sum(supervised[index] for index in batch),
            max(rows[index] for index in batch),
        )
        for batch in batches
    }


def require_memory(
    model: Any, plan: TrainingPlan, sizes: Iterable[Size], device: torch.device
) -> MemoryPlan | None:
    """Log what a step of the plan holds, and raise NotEnoughMemory where the device has less.

    `sizes` are those of all batches; the model is built and still on the CPU. None where there is no batch.
    """
    shape = StepShape(model)

    def activations(one: Size) -> int:
        return shape.pass_(one.rows, one.supervised, plan.test_time_steps, plan.loss)

    if (largest := max(sizes, key=activations, default=None)) is None:
        return None
    parts = plan.accumulation * plan.processes
    wanted = expected_bytes(
        model,
        rows=largest.rows,
        supervised=largest.supervised,
        steps=plan.test_time_steps,
        loss=plan.loss,
        optimizer=plan.optimizer,
        pulled=plan.pull_to_start > 0,
        accumulation=plan.accumulation,
        processes=plan.processes,
        longest=largest.longest,
        device=device.type,
    )
    free = free_bytes(device)
    if device.type == "cpu":
        # Each process has its model already; what is left is for all.
        free = free // plan.processes + wanted.weights + wanted.frozen
    batch = f"{largest.rows} rows, {largest.supervised} of them supervised"
    logger.info(
        "a step holds up to %s in a batch of %s (%s); the %s has %s free",
        *(gib(wanted.total), batch, wanted.in_words(), device.type, gib(free)),
    )
    if wanted.total > free:
        raise NotEnoughMemory(
            f"a training step holds up to {gib(wanted.total)} in a batch of {batch} ({wanted.in_words()}), "
            f"the {device.type} has {gib(free)} free. Lower training.tokens_per_step, or raise training."
            f"accumulation: its batches are smaller{_too_long(largest, plan.tokens_per_step // parts)}."
        )
    return wanted


def _too_long(largest: Size, batch_rows: int) -> str:
    if largest.rows <= batch_rows:
        return ""
    return (
        f". This is one sample, of {largest.rows} rows, which is never cut: lower "
        "extraction.max_sample_tokens for less"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take, of a GPU or of the machine."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()
