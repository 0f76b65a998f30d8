"""The step `hidden_state_shards`: hidden states of the target for all samples that train.

    synthetic_samples/<shard>  ->  extraction server  ->  hidden_state_shards/<shard>

The server is opened once for all missing shards, and proven on a few samples. Nothing heavy is imported until
there is work.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.extraction.layers import check_layers
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.progress_file import ProgressFile
from eagle3_pipeline.samples.extracted_form import layout_of
from eagle3_pipeline.samples.extraction_room import require_room_for
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.shards.repair import damaged_parts, reopen
from eagle3_pipeline.waves import due

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer


def extract_shards(
    lineage: Lineage,
    shards: Sequence[str],
    server: "AbstractContextManager[RunningServer]",
    on_shard: Callable[[str, Manifest], None],
) -> list[Manifest]:
    """Make the hidden states of `shards`; those that are made already are left as they are.

    `server` leaves its files in `lineage.staging`; it is entered once, and only if states are missing.
    `on_shard` is called once for each shard, made before or now: first for those that are there,
    then as the others become complete. A part of a made shard that is cut or gone is made again.

    Raises MissingInput without samples and their audit, RecipeError for layers that the target does not have
    and for shards that are not of the next wave, QualityError for states that are wrong, NotEnoughRoom when a
    disk is full, and what the server raises. Finished shards, and finished parts of an unfinished one, stand.
    """
    target = lineage.target_model().require().facts
    check_layers(lineage.recipe.extraction.layers, int(target["num_layers"]))
    lineage.sample_audit().require()
    asked_for = due(lineage, shards)
    made: dict[str, Manifest] = {}

    def finished(manifest: Manifest) -> None:
        made[str(manifest.shard)] = manifest
        on_shard(str(manifest.shard), manifest)

    for shard in shards:
        if (manifest := _made(lineage, shard, mend=shard in asked_for)) is not None:
            finished(manifest)
    if missing := [shard for shard in shards if shard not in made]:
        _extract(lineage, missing, server, finished)
    return [made[shard] for shard in shards]


def _made(lineage: Lineage, shard: str, *, mend: bool) -> Manifest | None:
    """The manifest of a shard that is made; None for one that is not, or not whole any more."""
    place = lineage.hidden_state_shards(shard)
    if (manifest := place.manifest()) is None:
        return None
    # A kill just after the manifest leaves the journal, which must not vouch for parts later on.
    (place.folder / JOURNAL_NAME).unlink(missing_ok=True)
    if mend and damaged_parts(place):
        reopen(place)
        return None
    shutil.rmtree(lineage.captured(shard), ignore_errors=True)  # and the files that it was made of
    return manifest


def _extract(
    lineage: Lineage,
    missing: list[str],
    server: "AbstractContextManager[RunningServer]",
    finished: Callable[[Manifest], None],
) -> None:
    from eagle3_pipeline.extraction.run import ExtractionRun

    layout = layout_of(lineage)
    require_room_for(lineage, missing)
    way_out = (
        "Finished shards and parts stand. Free some space or point EAGLE3_STORAGE to a larger disk, then "
        "materialise hidden_state_shards again."
    )
    with (
        full_disk_named(lineage.folder, way_out),
        ProgressFile(lineage.progress, "hidden_state_shards") as file,
    ):
        ExtractionRun(lineage, missing, layout, file).make(server, finished)
