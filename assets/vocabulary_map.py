"""vocabulary_map: the tokens that the draft may propose."""

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import step
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("synthetic_samples", *(("base_draft",) if recipe.base_draft else ()))

    @dg.asset(**identity(recipe, "vocabulary_map", {"safetensors"}, deps))
    def vocabulary_map(storage: Storage) -> dg.MaterializeResult:
        """The most frequent tokens of the completions, mapped both ways between draft and target.

        A base draft keeps its own map: its head's rows mean those tokens.
        """
        lineage = storage.lineage(recipe)
        with step():
            return outcome(lineage.vocabulary_map(), make_vocabulary(lineage))

    return vocabulary_map
