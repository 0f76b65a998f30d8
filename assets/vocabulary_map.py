"""vocabulary_map: the tokens that the draft may propose."""

from typing import Any

import dagster as dg

from assets.checks import check_vocabulary, checks_of
from assets.identity import identity
from assets.outcome import outcome
from assets.step import step
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from resources import Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("synthetic_samples", *(("base_draft",) if recipe.base_draft else ()))

    @dg.asset(
        **identity(recipe, "vocabulary_map", {"safetensors"}, deps),
        check_specs=checks_of(recipe, "vocabulary_map"),
    )
    def vocabulary_map(storage: Storage) -> dg.MaterializeResult:
        """The tokens that the draft may propose: a head over fewer tokens is smaller and faster.

        They are the most frequent ones of the completions, mapped both ways between draft and target.
        A base draft keeps its own map: its head's rows mean those tokens. The data version is that of the
        file alone, which is all that the draft depends on.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = make_vocabulary(lineage)
            place, tokens = lineage.vocabulary_map(), [one.sha256 for one in manifest.files]
            covered = check_vocabulary(manifest)
            return outcome(place, manifest, covered, decided_by=tokens, **_pictures(manifest))

    return vocabulary_map


def _pictures(manifest: Manifest) -> dict[str, Any]:
    """What each size of the vocabulary could reach, where replies are held out to say so."""
    rows = manifest.facts.get("sizes", [])
    if not rows:
        return {}
    best = {"best acceptance length": [row["best_acceptance_length"] for row in rows]}
    title = f"Longest acceptance possible, {manifest.facts['speculative_tokens']} tokens speculated"
    image = lines([row["draft_tokens"] for row in rows], best, title, "tokens in the draft's vocabulary")
    return {
        "sizes": dg.MetadataValue.table([dg.TableRecord(row) for row in rows]),
        "size_plot": dg.MetadataValue.md(markdown_image(image, "best acceptance length by size")),
    }
