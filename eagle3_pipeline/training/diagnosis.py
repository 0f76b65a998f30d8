"""What is told where a loss or gradient is no number: of which samples, and whether their states are."""

import math
from collections.abc import Iterable

from eagle3_pipeline.training.batches import SampleSource
from eagle3_pipeline.training.checkpoint import TrainingState


def explain_loss(
    source: SampleSource, indices: Iterable[int], at: TrainingState, loss: float, norm: float
) -> str:
    """The message for the step after `at`: its loss, the norm of its gradients, its samples, the way out."""
    names = {index: source.name(index) for index in indices}
    damaged = _damaged(source, names)
    what = f"gradients of norm {norm} at loss {loss}" if math.isfinite(loss) else f"loss {loss}"
    way_out = (
        "Make their shard again: without waves this trains anew"
        if damaged
        else "Lower training.learning_rate: this trains anew"
    )
    return (
        f"{what} at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1}: samples "
        f"{', '.join(names.values())}), expected a finite number; {_cause(damaged)}. "
        f"The weights before this step are kept in its checkpoint, of step {at.step}; started again with "
        f"nothing changed, the training ends here again. {way_out}."
    )


def explain_judgement(source: SampleSource, indices: Iterable[int], at: TrainingState, loss: float) -> str:
    """The message for held-out samples of such a loss, judged in the state `at`."""
    names = {index: source.name(index) for index in indices}
    damaged = _damaged(source, names)
    way_out = "Lower training.learning_rate" if at.step else "Take another base draft, or none"
    return (
        f"loss {loss} of the held-out samples {', '.join(names.values())} after step {at.step}, expected a "
        f"finite number; {_cause(damaged)}. {'Make their shard again' if damaged else way_out}, then start "
        "again."
    )


def _damaged(source: SampleSource, names: dict[int, str]) -> list[str]:
    """Names of the samples whose states are not finite."""
    return [name for index, name in names.items() if not _is_finite(source, index)]


def _cause(damaged: list[str]) -> str:
    if damaged:
        return f"its states are not finite in {', '.join(damaged)}"
    return "its states are all finite"


def _is_finite(source: SampleSource, index: int) -> bool:
    return bool(source.read(index)["hidden_states"].float().isfinite().all())
