"""How a recipe extracts its samples: to which length, and in which layout of shards. Needs no torch."""

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.shards.format import ShardLayout


def longest_sample(lineage: Lineage) -> int:
    """Tokens to which samples are cut: max_sample_tokens, and one less than the server's longest sequence.

    The request generates one token, which must have its place in the server's sequence. Raises MissingInput
    without a target.
    """
    recipe = lineage.recipe
    target = lineage.target_model().require().facts
    longest = recipe.server.extraction.max_model_len or target.get("max_context")  # not every model names one
    wanted = recipe.extraction.max_sample_tokens
    return wanted if longest is None else min(wanted, int(longest) - 1)


def layout_of(lineage: Lineage) -> ShardLayout:
    """What all shards of the recipe have in common; raises MissingInput without a target."""
    target = lineage.target_model().require().facts
    extraction = lineage.recipe.extraction
    return ShardLayout(
        extraction.layers,
        int(target["hidden_size"]),
        str(target["model_fingerprint"]),
        precision=extraction.precision,
        kept=extraction.kept,
    )
