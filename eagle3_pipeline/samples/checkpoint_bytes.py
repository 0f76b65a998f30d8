"""What the checkpoints of the draft will take, estimated before there is a draft."""

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.samples.folder_bytes import bytes_below

CHECKPOINTS_FOLDER = "checkpoints"

# Float32 weights and the two moments of AdamW.
_BYTES_PER_PARAMETER = 12
# Two are kept while one more is being written; the weights of the best one and the draft itself are a fourth.
_CHECKPOINTS = 4


def checkpoint_bytes(lineage: Lineage) -> int:
    """Bytes of checkpoints that are still to be written; raises MissingInput without a target.

    With hidden size H, a draft layer has about 4 H^2 numbers of attention and 9 H^2 of its MLP, the fc takes
    in all layers but the last, and the head has a row of H for each token of the draft. The embedding is
    frozen and in no checkpoint.
    """
    hidden = int(lineage.target_model().require().facts["hidden_size"])
    inputs = len(lineage.recipe.extraction.layers) - 1
    parameters = (4 + 9 + inputs) * hidden**2 + lineage.recipe.vocabulary.draft_tokens * hidden
    place = _draft(lineage)
    if place is None:
        there = 0
    elif place.manifest() is not None:
        return 0
    else:
        there = bytes_below(place.folder / CHECKPOINTS_FOLDER)
    return max(_CHECKPOINTS * _BYTES_PER_PARAMETER * parameters - there, 0)


def _draft(lineage: Lineage) -> Place | None:
    try:
        return lineage.draft_checkpoint()
    except MissingInput:  # nothing is trained before the plan, the vocabulary and the first states
        return None
