"""The things made, one file each, for every loaded recipe."""

import dagster as dg

from assets import (
    acceptance_report,
    base_draft,
    draft_checkpoint,
    hidden_state_shards,
    prompts,
    released_draft,
    sample_audit,
    synthetic_samples,
    target_model,
    vocabulary_map,
)
from eagle3_pipeline.recipe import Recipe

_ALWAYS = (
    target_model,
    prompts,
    synthetic_samples,
    sample_audit,
    hidden_state_shards,
    vocabulary_map,
    draft_checkpoint,
    acceptance_report,
    released_draft,
)


def assets_of(recipe: Recipe) -> list[dg.AssetsDefinition]:
    """All assets of one recipe, each with its place in the code; `base_draft` only where there is one."""
    modules = [*_ALWAYS, base_draft] if recipe.base_draft else _ALWAYS
    return [_with_code(module.build(recipe)) for module in modules]


def _with_code(asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
    (found,) = dg.with_source_code_references([asset])
    assert isinstance(found, dg.AssetsDefinition)
    return found
