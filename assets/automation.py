"""When an asset is made by itself, once the sensor `<slug>_automation` is switched on.

Each asset follows those it is made from: it is made when one of them was made anew, none is missing and none
is being made. So new prompts flow through the graph, a run for each stage, and wait wherever all shards are
needed. Nothing is tried again that failed until something before it changes, and nothing is made merely
because the sensor was switched on.
"""

import dagster as dg

from eagle3_pipeline.recipe import Recipe

# Of a recipe in waves, what comes after its plan is the business of the sensor of waves.
_UP_TO_PLAN = {"target_model", "base_draft", "prompts", "synthetic_samples", "sample_audit", "vocabulary_map"}


# What is made from samples and from what follows them waits for the latter. States wait for the audit, which
# passes when all samples are there and their server has stopped; the draft waits for the states. Otherwise
# one shard of samples, made again, would call for extraction beside the generation, and for training before.
_NOT_FOLLOWED = {"hidden_state_shards": "synthetic_samples", "draft_checkpoint": "vocabulary_map"}


def automation_condition(recipe: Recipe, name: str) -> dg.AutomationCondition | None:
    """The condition of an asset; None where it is never made by itself."""
    if recipe.extraction.waves != 1 and name not in _UP_TO_PLAN:
        return None
    eager, updated = dg.AutomationCondition.eager(), dg.AutomationCondition.any_deps_updated()
    if (other := _NOT_FOLLOWED.get(name)) is not None:
        return eager.replace(updated, updated.ignore(dg.AssetSelection.assets([recipe.slug, other])))
    return eager
