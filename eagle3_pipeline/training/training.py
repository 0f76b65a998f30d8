"""The step that trains the draft: a plan, a process of its own, its events as news.

    draft_checkpoint/<fingerprint>/
        plan.json          what the process reads
        samples.json       what trains in which wave; only in waves, as the next two
        validation/        states of the samples that judge, until the draft stands
        turn-0000.json     one for each wave that is done: see waves.py
        training.log       its stderr, and what libraries print
        metrics.jsonl      its step and epoch events; those after the checkpoint of a resume are cut off
        checkpoints/       latest two and the best; removed when the draft stands
        draft/             config.json, model.safetensors
        manifest.json

A kill at any point leaves what the next call goes on from. In waves one call trains one turn, and only
the last one makes draft/ and the manifest. Alternatives of `training.sweep` are trained one after the other,
each in a folder of its own: see sweep.py.
"""

import logging
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from eagle3_pipeline.base_draft import require_base_layers
from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.release.names import target_name
from eagle3_pipeline.shards.listing import parts_of_shard
from eagle3_pipeline.training.child import METRICS_NAME, loss_curve, run_process
from eagle3_pipeline.training.curves import validation_curve
from eagle3_pipeline.training.events import Listener
from eagle3_pipeline.training.plan import FULL_DISK, TrainingPlan
from eagle3_pipeline.training.sweep import take_best, train_alternatives
from eagle3_pipeline.training.wave_samples import SAMPLES_NAME, VALIDATION_FOLDER, write_wave_samples
from eagle3_pipeline.vocabulary.mapping import VOCABULARY_NAME
from eagle3_pipeline.waves import (
    Turn,
    TurnRecord,
    finish_turn,
    finished_turn,
    next_turn,
    records,
    settle,
    too_early,
    turns,
)

logger = logging.getLogger(__name__)


def train_draft(
    lineage: Lineage,
    lease: AbstractContextManager[None],
    shards: Sequence[str] | None = None,
    on_event: Listener = lambda event: None,
) -> Manifest | TurnRecord:
    """Train the draft, or its next turn where there are waves; returns at once where it is made.

    A training that was stopped goes on. `lease` holds the training partition; it is entered only where
    there is work. The record of a turn is returned for each but the last one, which makes the draft.
    `shards` are those that the caller's run takes: where they are trained on already, the record of that
    turn is returned, so that a run that is repeated, or comes late, never trains another wave. `on_event`
    hears how it goes, see events.py.

    Raises RecipeError (`shards` of a later wave, alternatives in waves), MissingInput, BadInput (a base
    draft that does not fit), QualityError (a loss that is no number), NotEnoughRoom, DamagedFile (a
    finished turn's checkpoint or validation samples), and Eagle3Error with the end of the log where the
    process died otherwise.
    """
    place = lineage.draft_checkpoint()
    with full_disk_named(place.folder, FULL_DISK):
        if (made := clean_up(lineage)) is not None:
            return made
        if lineage.recipe.training.sweep:
            return _train_alternatives(lineage, place, lease, on_event)
        return _train(lineage, place, lease, shards, on_event)


def _train_alternatives(
    lineage: Lineage, place: Place, lease: AbstractContextManager[None], on_event: Listener
) -> Manifest:
    def train(alternative: Lineage, heard: Listener) -> Manifest:
        if (made := clean_up(alternative)) is not None:
            return made
        made_now = _train(alternative, alternative.draft_checkpoint(), nullcontext(), None, heard)
        assert isinstance(made_now, Manifest), "alternatives are never trained in waves"
        return made_now

    with lease:
        if (made := clean_up(lineage)) is not None:  # by another run, while this one waited
            return made
        trained = train_alternatives(lineage, train, on_event)
    take_best(place, trained)
    return clean_up(lineage) or place.require()


def _train(
    lineage: Lineage,
    place: Place,
    lease: AbstractContextManager[None],
    shards: Sequence[str] | None,
    on_event: Listener,
) -> Manifest | TurnRecord:
    if shards is not None and (done := finished_turn(lineage, shards)) is not None:
        logger.info("%s is done already: nothing is trained", done.name)
        return done
    turn = _turn_to_train(lineage, place, shards)
    plan = make_plan(lineage, turn)
    with lease:
        if (made := clean_up(lineage)) is not None:  # by another run, while this one waited
            return made
        if turn.of > 1 and (later := records(place.folder)[turn.number :]):
            return later[0]
        facts = run_process(plan, on_event)
    consumed = {shard: lineage.hidden_state_shards(shard).require().digest for shard in turn.shards}
    if not turn.is_last:
        return finish_turn(lineage, turn, facts.pop("checkpoint"), consumed, facts)
    metrics = place.folder / METRICS_NAME
    facts["without_states"] = _without_states(lineage)
    facts["loss_curve"], facts["validation_curve"] = loss_curve(metrics), validation_curve(metrics)
    if turn.of > 1:
        before = {one.name: one.consumed for one in records(place.folder)}
        facts["waves"] = {**before, turn.name: consumed}
    place.finish([*sorted((place.folder / "draft").iterdir()), metrics], facts)
    return clean_up(lineage) or place.require()


def _without_states(lineage: Lineage) -> int:
    """How many samples were to be trained on, but their states were unusable."""
    shards = map(lineage.hidden_state_shards, lineage.recipe.shards)
    return sum(sum(place.require().facts.get("quarantined", {}).values()) for place in shards)


def clean_up(lineage: Lineage) -> Manifest | None:
    """The finished draft, if it is there; what only its making needed is removed, where a kill left it.

    Whoever comes after the training calls it too: once the last turn is recorded no run trains again.
    """
    place, planned = lineage.draft_checkpoint(), turns(lineage)
    in_waves = len(planned) > 1
    if in_waves:
        settle(lineage)
    if (manifest := place.manifest()) is None:
        return None
    if in_waves and len(records(place.folder)) < len(planned):
        consumed = manifest.facts["waves"][planned[-1].name]
        finish_turn(lineage, planned[-1], manifest.digest, consumed, {})
    # Of the alternatives, only those that failed have left theirs.
    failed = [place.folder.parent / one["folder"] for one in manifest.facts.get("sweep", ()) if one["failed"]]
    for folder in (place.folder, *failed):
        for name in ("checkpoints", VALIDATION_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
    return manifest


def _turn_to_train(lineage: Lineage, place: Place, shards: Sequence[str] | None) -> Turn:
    if (turn := next_turn(lineage)) is None:
        raise DamagedFile(
            f"all waves are recorded in {place.folder}, but it has no manifest: was it deleted? The states "
            "are gone. Move the folder away: all waves are then extracted and trained on again."
        )
    if shards and not set(shards) & set(turn.shards):
        raise too_early(lineage, turn, shards, "cannot be trained on yet")
    return turn


def make_plan(lineage: Lineage, turn: Turn) -> TrainingPlan:
    """The plan of one turn of the recipe's training; raises MissingInput where an input is not made."""
    recipe = lineage.recipe
    settings = recipe.training.model_dump(exclude={"draft_layers", "sweep"})
    vocabulary = lineage.vocabulary_map()
    vocabulary.require()
    require_base_layers(lineage)
    base = lineage.base_draft_path()
    place = lineage.draft_checkpoint()
    states = [lineage.hidden_state_shards(shard) for shard in turn.shards]
    for one in states:
        one.require()
        parts_of_shard(one.folder)
    samples = place.folder / SAMPLES_NAME
    place.folder.mkdir(parents=True, exist_ok=True)
    waves, passes = lineage.waves()
    if turn.of > 1 and not samples.exists():
        write_wave_samples(lineage, waves, samples)
    return TrainingPlan(
        folder=str(place.folder),
        target=str(lineage.model_path()),
        target_name=target_name(recipe.target),
        shards=tuple(str(one.folder) for one in states),
        samples=str(samples) if turn.of > 1 else None,
        turn=turn.number,
        passes=passes,
        vocabulary=str(vocabulary.folder / VOCABULARY_NAME),
        base_draft=str(base) if base is not None else None,
        layers=recipe.extraction.layers,
        model_fingerprint=str(lineage.target_model().require().facts["model_fingerprint"]),
        devices=recipe.partitions.training,
        processes=max(1, len(recipe.partitions.training)),
        validation=tuple(lineage.prompts().require().facts["validation"]),
        keep_free_bytes=int(recipe.storage.keep_free_gib * 2**30),
        fingerprint=place.fingerprint,
        **settings,
    )
