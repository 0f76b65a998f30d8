"""Under which settings the draft is measured, and how often.

    headline         evaluation.speculative_tokens, temperature and concurrency    evaluation.repeats times
    further cells    those of evaluation.grid, each with each and with the above   once

A server proposes one number of tokens, so each number is a server of its own. The target alone is measured at
each temperature and concurrency, as often, and once more at the batch size of the greedy comparison.
"""

from dataclasses import dataclass, replace
from itertools import product

from eagle3_pipeline.evaluation.greedy import other_batch_size
from eagle3_pipeline.recipe.evaluation import Evaluation


@dataclass(frozen=True)
class Cell:
    """One setting. `speculative_tokens` is 0 for the target alone."""

    speculative_tokens: int
    temperature: float
    in_flight: int

    @property
    def alone(self) -> "Cell":
        """The same without a draft."""
        return replace(self, speculative_tokens=0)

    @property
    def other_batch(self) -> "Cell":
        """The target alone in steps of as many rows as those that check this one's drafts."""
        return replace(self.alone, in_flight=other_batch_size(self.in_flight, self.speculative_tokens))

    def settings(self, evaluation: Evaluation) -> Evaluation:
        """The recipe's settings as they are in this cell."""
        return evaluation.model_copy(
            update={
                "speculative_tokens": self.speculative_tokens,
                "temperature": self.temperature,
                "concurrency": self.in_flight,
            }
        )


Times = dict[Cell, int]
"""How often each cell is measured."""


def cells(evaluation: Evaluation) -> list[Cell]:
    """All cells, none twice; the headline is the first."""
    further = evaluation.grid
    axes = product(
        (evaluation.speculative_tokens, *further.speculative_tokens),
        (evaluation.temperature, *further.temperature),
        (evaluation.concurrency, *further.concurrency),
    )
    return list(dict.fromkeys(Cell(*values) for values in axes))


def token_counts(evaluation: Evaluation) -> list[int]:
    """The numbers of speculative tokens; the headline's is the first."""
    return list(dict.fromkeys(cell.speculative_tokens for cell in cells(evaluation)))


def greedy_cell(evaluation: Evaluation) -> Cell | None:
    """The first cell at temperature 0: there replies with and without the draft are compared."""
    return next((cell for cell in cells(evaluation) if cell.temperature == 0), None)


def of_base(evaluation: Evaluation) -> Times:
    """What the base draft is measured with: the headline."""
    return {cells(evaluation)[0]: evaluation.repeats}


def of_draft(evaluation: Evaluation, speculative_tokens: int) -> Times:
    """What one server with the draft is measured with."""
    every = cells(evaluation)
    times = {cell: evaluation.repeats if cell == every[0] else 1 for cell in every}
    return {cell: n for cell, n in times.items() if cell.speculative_tokens == speculative_tokens}


def of_target(evaluation: Evaluation) -> Times:
    """What the target alone is measured with."""
    with_draft = of_draft(evaluation, evaluation.speculative_tokens)
    times = {cell.alone: n for cell, n in with_draft.items()}
    if (greedy := greedy_cell(evaluation)) is not None:
        times.setdefault(greedy.other_batch, 1)
    return times
