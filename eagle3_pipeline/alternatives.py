"""The alternatives of `training.sweep`, each as the recipe that has its settings and no sweep.

    draft_checkpoint/<fingerprint>/    of the sweep: the draft of the best alternative, and the table of all
    draft_checkpoint/<fingerprint>/    of each alternative: where its recipe alone would train

So what was trained once is never trained again: not when alternatives are added, changed or removed, and not
when the settings of the best one are written into the recipe.
"""

from dataclasses import replace

from eagle3_pipeline.lineage import Lineage


def alternatives(lineage: Lineage) -> dict[str, Lineage]:
    """The alternatives by name, in the recipe's order; none where nothing is compared."""
    recipe = lineage.recipe
    return {name: replace(lineage, recipe=recipe.alternative(name)) for name in recipe.training.sweep}


def chosen(lineage: Lineage) -> Lineage:
    """The recipe whose training made the draft: the best alternative's, or its own. Raises MissingInput."""
    found = alternatives(lineage)
    return found[lineage.draft_checkpoint().require().facts["alternative"]] if found else lineage
