"""What is told of a step whose loss or gradient is no number: which samples, and whether their states are."""

import math
from collections.abc import Iterable

from eagle3_pipeline.training.batches import SampleSource
from eagle3_pipeline.training.checkpoint import TrainingState


def explain_loss(
    source: SampleSource, indices: Iterable[int], at: TrainingState, loss: float, norm: float
) -> str:
    """The message for the step after `at`: its loss, the norm of its gradients, its samples, the way out."""
    names = {index: source.name(index) for index in indices}
    damaged = [name for index, name in names.items() if not _is_finite(source, index)]
    what = f"gradients of norm {norm} at loss {loss}" if math.isfinite(loss) else f"loss {loss}"
    cause = f"its states are not finite in {', '.join(damaged)}" if damaged else "its states are all finite"
    return (
        f"{what} at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1}: samples "
        f"{', '.join(names.values())}), expected a finite number; {cause}. "
        "Weights up to the last checkpoint are kept. "
        f"{'Make their shard again' if damaged else 'Lower training.learning_rate'}, then start again."
    )


def _is_finite(source: SampleSource, index: int) -> bool:
    return bool(source.read(index)["hidden_states"].float().isfinite().all())
