"""Held-out prompt sets: read as they stand, in the order of the file."""

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.parsing import RowRejected, parse
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.sources import read_file
from eagle3_pipeline.recipe.evaluation import EvaluationSet


def read_set(evaluation_set: EvaluationSet) -> list[Prompt]:
    """The first `count` prompts of a set, or all. The evaluation sends the first turn of each.

    Raises BadInput for a row without a prompt: numbers are compared over the same prompts or not at all.
    """
    rows = read_file(evaluation_set.path, evaluation_set.column)
    count = evaluation_set.count or len(rows)
    if not rows or count > len(rows):
        raise BadInput(
            f"evaluation set {evaluation_set.name}: {evaluation_set.path} has {len(rows)} rows, "
            f"expected {evaluation_set.count or 'at least 1'}. Lower its count, or add prompts."
        )
    prompts = []
    for row in rows[:count]:
        try:
            parsed = parse(row.value, row.column)
        except RowRejected as rejected:
            raise BadInput(
                f"evaluation set {evaluation_set.name}: {row.where} gives no prompt ({rejected}). "
                "Mend or remove the row."
            ) from rejected
        source = evaluation_set.name
        prompts.append(Prompt.create(parsed.turns, system=parsed.system, source=source))
    return prompts
