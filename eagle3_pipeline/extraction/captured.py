"""States that were captured while a sample was generated, in a file per sample that waits for its shard.

    captured/<fp12>/p500-s007/<sample id>.safetensors
        hidden_states [tokens, layers, hidden], token_ids [tokens]     prompt and reply without its last token

The server never reads the last token of a reply, so it has no states: a sample of n tokens has n - 1 here.
"""

import logging
import shutil
from collections.abc import Iterable

from safetensors import SafetensorError, safe_open

from eagle3_pipeline.extraction.capture import Captured
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.staging import FILE_SUFFIX

_logger = logging.getLogger(__name__)


def captured(lineage: Lineage, shard: str, sample: PlannedSample) -> Captured | None:
    """The states of a planned sample, cut as it is, or None where there are none that one can use.

    None is for the extraction server to make: no file, one that a kill or a power loss tore, one of another
    reply to the same prompt, one that the checks refuse.
    """
    path = lineage.captured(shard) / f"{sample.sample_id}{FILE_SUFFIX}"
    rows = len(sample.token_ids)
    try:
        with safe_open(path, framework="pt") as file:
            ids, states = file.get_tensor("token_ids")[:rows], file.get_slice("hidden_states")[:rows]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        reason = f"cannot be read ({error})"
    else:
        layers = len(lineage.recipe.extraction.layers)
        hidden = int(lineage.target_model().require().facts["hidden_size"])
        reason = reason_against(sample.token_ids, ids, states, layers, hidden) or ""
        if not reason:
            return Captured(ids, states)
    _logger.warning(f"{path} is not used, the extraction server makes these states again: {reason}")
    return None


def discard(lineage: Lineage, shard: str, sample_ids: Iterable[str]) -> None:
    """Delete the files of samples whose states are in a durable part of the shard."""
    for sample_id in sample_ids:
        (lineage.captured(shard) / f"{sample_id}{FILE_SUFFIX}").unlink(missing_ok=True)


def discard_all(lineage: Lineage, shard: str) -> None:
    """Delete what is left of a shard whose manifest stands."""
    shutil.rmtree(lineage.captured(shard), ignore_errors=True)
