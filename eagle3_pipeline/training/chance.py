"""Whether a base draft knows anything here: its first proposals against chance.

A draft that is fed what it was not trained on (other layers, other norms, another target), or whose head's rows
mean other tokens than its map says, loads without complaint and trains as if from scratch. Chance is what the
best guess reaches that knows nothing but the text's frequencies: always its most frequent token.
"""

from collections.abc import Iterable

import torch

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training.batches import SampleSource, supervised_rows


def chance(source: SampleSource, indices: Iterable[int]) -> float:
    """Share of the most frequent token among all that these samples want proposed."""
    labels = []
    for index in indices:
        sample = source.read(index)
        labels.append(sample["token_ids"].to(torch.int64)[supervised_rows(sample["loss_mask"]) + 2])
    counts = torch.bincount(torch.cat(labels))
    return float(counts.max() / counts.sum())


def require_above(chance_: float, accuracy: float) -> None:
    """Raise BadInput where a base draft proposes no better than chance before its first step."""
    if accuracy > chance_:
        return
    raise BadInput(
        f"the base draft proposes {100 * accuracy:.1f} % of the held-out tokens rightly before its first step, "
        f"expected more than {100 * chance_:.1f} %, which always proposing the most frequent one gives. Either "
        "it was trained for another target, or its layers are counted otherwise than was taken (set "
        "base_draft.layers_counted), or its config does not say how it was trained (norms, rope). Take "
        "another base draft, or none."
    )
