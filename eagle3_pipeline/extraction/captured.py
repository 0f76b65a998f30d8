"""States that were captured while a sample was generated, in a file per sample that waits for its shard.

    captured/<fp12>/p500-s007/<sample id>.safetensors
        hidden_states [tokens, layers, hidden], token_ids [tokens]     prompt and reply without its last token

The server never reads the last token of a reply, so it has no states: a sample of n tokens has n - 1 here.
"""

import asyncio
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.extraction.capture import Captured
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.inspection import Fetch
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.staging import FILE_SUFFIX

_logger = logging.getLogger(__name__)


def shards_of_files(lineage: Lineage, samples: Mapping[str, Iterable[PlannedSample]]) -> dict[str, str]:
    """The shard of each sample, of those planned for each shard, that has a file."""
    return {
        sample.sample_id: shard
        for shard, planned in samples.items()
        for sample in planned
        if _path(lineage, shard, sample).is_file()
    }


def from_files(lineage: Lineage, shard_of: Mapping[str, str], server: Fetch | None) -> Fetch:
    """Take states from the files of `shard_of`, and those of the other samples from the extraction server.

    Without a server, a file that cannot be used is deleted and DamagedFile raised.
    """

    async def fetch(sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        shard = shard_of.get(sample.sample_id)
        if shard is not None and not alone and not again:
            found = await asyncio.to_thread(captured, lineage, shard, sample)
            if found is not None:
                return found
        if server is not None:
            return await server(sample, alone=alone)
        assert shard is not None  # a server is opened where a sample has no file
        path = _path(lineage, shard, sample)
        path.unlink(missing_ok=True)
        raise DamagedFile(
            f"{path} could not be used and is deleted. Materialise hidden_state_shards again: the extraction "
            "server then makes the states of this sample; finished parts are kept."
        )

    return fetch


def _path(lineage: Lineage, shard: str, sample: PlannedSample) -> Path:
    return lineage.captured(shard) / f"{sample.sample_id}{FILE_SUFFIX}"


def captured(lineage: Lineage, shard: str, sample: PlannedSample) -> Captured | None:
    """The states of a planned sample, cut as it is, or None where there are none that one can use.

    None is for the extraction server to make: no file, one that a kill or a power loss tore, one of another
    reply to the same prompt, one that the checks refuse.
    """
    path = _path(lineage, shard, sample)
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


def discard_all(lineage: Lineage, shard: str) -> None:
    """Delete what is left of a shard whose manifest stands."""
    shutil.rmtree(lineage.captured(shard), ignore_errors=True)
