"""The base draft as training starts from it, in the layout of the drafts that are trained.

So it is served beside the trained one by the same reading of its config: norms, rope, layer ids in one
numbering, vocabulary map as offsets. Its own folder may be of a layout that a server reads otherwise.
"""

from pathlib import Path

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.release.names import target_name
from eagle3_pipeline.target_weights import read_target_weights
from eagle3_pipeline.training.draft import new_draft, speculator_config
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.warm_start import load_base, read_base_config
from eagle3_pipeline.vocabulary.mapping import VOCABULARY_NAME, read_mapping


def export_base(lineage: Lineage, folder: Path) -> None:
    """Write the recipe's base draft to `folder`, whole or not at all; nothing where it is there.

    Raises MissingInput, and BadInput where it does not fit the target.
    """
    if folder.is_dir():
        return
    base = lineage.base_draft_path()
    assert base is not None, "the recipe names no base draft"
    recipe, vocabulary = lineage.recipe, lineage.vocabulary_map()
    vocabulary.require()
    weights = read_target_weights(lineage.model_path())
    d2t, t2d = read_mapping(vocabulary.folder / VOCABULARY_NAME)
    layers = recipe.extraction.layers[:-1]
    layer, norms = read_base_config(base, weights, layers)
    config = speculator_config(
        layer,
        weights,
        target_name=target_name(recipe.target),
        aux_layers=layers,
        draft_tokens=len(d2t),
        speculative_tokens=recipe.training.test_time_steps,
        norms=norms,
    )
    model = new_draft(config, weights, d2t, t2d, seed=0, train_head=False)
    load_base(model, base)
    export_draft(model, folder, layers)
