"""Whether the shards that are extracted next fit beside what lies on the disk at this moment."""

from collections.abc import Iterator

from eagle3_pipeline.errors import MissingInput, NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.byte_plan import BytePlan, byte_plan, shard_lengths
from eagle3_pipeline.samples.fitting import Fit
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.samples.leftovers import what_to_delete
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, trained_lengths
from eagle3_pipeline.samples.state_room import gib


def require_room_for(lineage: Lineage, shards: list[str]) -> None:
    """Raise NotEnoughRoom where what is missing of the states of `shards` does not fit.

    `sample_audit` looked at the whole. But a training that begins anew finds what the one before it left:
    its checkpoints, and the states of a later wave. The message names them.
    """
    if not shards:
        return
    plan = _plan_of(lineage, shards)
    fit = Fit.of(lineage, plan)
    copy = _validation_bytes(lineage)
    if plan.at_once + copy <= max(fit.room.bytes, 0):
        return
    names = shards[0] if len(shards) == 1 else f"{shards[0]} to {shards[-1]} ({len(shards)} shards)"
    what = f" and the copy of the validation samples {gib(copy)}" if copy else ""
    raise NotEnoughRoom(
        f"The hidden states of {names} still take {gib(plan.at_once)}{what}, but {fit.room.why}. Finished "
        f"shards and parts stand. Ways out: {'; '.join(_ways_out(lineage, fit, shards))}."
    )


def _plan_of(lineage: Lineage, shards: list[str]) -> BytePlan:
    train_truncated = lineage.recipe.generation.train_truncated
    lengths = {
        shard: trained_lengths(lineage.synthetic_samples(shard).folder / SAMPLES_NAME, train_truncated)
        for shard in shards
    }
    return byte_plan(lineage, [shard_lengths(lineage, *one) for one in lengths.items()])


def _ways_out(lineage: Lineage, fit: Fit, shards: list[str]) -> Iterator[str]:
    if fit.leftovers:
        yield what_to_delete(fit.leftovers)
    waves, _ = lineage.waves()
    if len(waves) > 1:
        wave = next(one for one in waves if shards[0] in one)
        others = [shard for one in waves if one != wave for shard in one]
        folders = [lineage.hidden_state_shards(shard).folder for shard in others]
        early = [folder for folder in folders if any(folder.glob("part-*.safetensors"))]
        if early:
            size = gib(sum(map(bytes_below, early)))
            more = f" and {len(early) - 5} more" if len(early) > 5 else ""
            yield (
                f"shards of other waves hold {size}, which are made again in their turn: delete "
                f"{', '.join(map(str, early[:5]))}{more}"
            )
    enlarge = "raise storage.max_gib, " if "max_gib" in fit.room.why else ""
    yield f"{enlarge}free some space, or point EAGLE3_STORAGE to a larger disk"


def _validation_bytes(lineage: Lineage) -> int:
    """Bytes of the copy of the validation samples while there is none; it is made beside the first wave."""
    waves, _ = lineage.waves()
    if len(waves) == 1:
        return 0
    try:
        if any((lineage.draft_checkpoint().folder / "validation").glob("part-*.safetensors")):
            return 0
    except MissingInput:  # nothing is trained before there is a vocabulary
        pass
    return _plan_of(lineage, list(waves[0][:1])).validation_bytes  # they are all in the first shard
