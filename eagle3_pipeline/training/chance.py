"""Whether a base draft knows anything here: its first proposals against chance.

A draft that is fed what it was not trained on (other layers, other norms, another target), or whose head's
rows mean other tokens than its map says, loads without complaint and trains as if from scratch. Chance is
what the best guess reaches that knows nothing but how frequent each token is: always the most frequent one.

    above chance                                    it is taken
    at chance, or below it by what luck may do      a warning
    below it by three standard errors, of 200       it is refused
    rows or more

The standard error is that of a share c of n independent rows, sqrt(c (1 - c) / n). Chance is counted over the
very rows that judge, so it is a little too high where these are few; hence the least number.
"""

import logging
import math

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training.validation import Judgement

logger = logging.getLogger(__name__)

_LEAST_ROWS = 200
_ERRORS = 3.0


def require_above_chance(judgement: Judgement) -> None:
    """Raise BadInput where a base draft is worse than chance at its start; warn where it is no better."""
    chance, rows, accuracy = judgement.chance, judgement.rows, judgement.accuracy_by_position[0]
    if accuracy > chance:
        return
    message = (
        f"the base draft proposes {100 * accuracy:.1f} % of the held-out tokens rightly before its first "
        f"step ({rows:,} rows), expected more than {100 * chance:.1f} %, which always proposing the most "
        "frequent one gives. Either it was trained for another target, or its layers are counted otherwise "
        "than was taken (set base_draft.layers_counted), or its config does not say how it was trained "
        "(norms, rope). Take another base draft, or none."
    )
    error = math.sqrt(chance * (1 - chance) / max(rows, 1))
    if rows >= _LEAST_ROWS and accuracy < chance - _ERRORS * error:
        raise BadInput(message)
    logger.warning("%s", message)
