"""What the checkpoints of the draft will take, estimated before there is a draft."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from eagle3_pipeline.alternatives import alternatives
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.waves import is_trained

CHECKPOINTS_FOLDER = "checkpoints"

# Float32 weights and the two moments of AdamW.
_BYTES_PER_PARAMETER = 12
_BYTES_OF_BF16 = 2
# Two are kept while one more is being written; the weights of the best one and the draft itself are a fourth.
_CHECKPOINTS = 4


def checkpoint_bytes(lineage: Lineage) -> int:
    """Bytes of checkpoints and drafts that are still to be written; raises MissingInput without a target.

    With hidden size H, a draft layer has about 4 H^2 numbers of attention and 9 H^2 of its MLP, the fc takes
    in all layers but the last, and the head has a row of H for each token of the draft. The embedding is
    frozen and in no checkpoint. Alternatives have checkpoints one after the other, and each keeps its draft,
    the embedding in it.
    """
    target = lineage.target_model().require().facts
    hidden = int(target["hidden_size"])
    inputs = len(lineage.recipe.extraction.layers) - 1
    parameters = (4 + 9 + inputs) * hidden**2 + lineage.recipe.vocabulary.draft_tokens * hidden
    if is_trained(lineage):
        return 0
    compared = [one for one in alternatives(lineage).values() if not is_trained(one)]
    there = sum(bytes_below(folder / CHECKPOINTS_FOLDER) for folder in _folders(compared or [lineage]))
    drafts = sum(_BYTES_OF_BF16 * (parameters + int(target["vocab_size"]) * hidden) for _ in compared)
    return max(_CHECKPOINTS * _BYTES_PER_PARAMETER * parameters - there, 0) + drafts


def _folders(lineages: Iterable[Lineage]) -> Iterator[Path]:
    for one in lineages:
        with suppress(MissingInput):  # nothing is trained before plan, vocabulary and first states
            yield one.draft_checkpoint().folder
