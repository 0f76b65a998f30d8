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
the last one makes draft/ and the manifest.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import write_atomic
from eagle3_pipeline.errors import DamagedFile, Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.release.names import target_name
from eagle3_pipeline.shards.listing import parts_of_shard
from eagle3_pipeline.training.events import MARK, describe, error_of, parse
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.wave_samples import SAMPLES_NAME, VALIDATION_FOLDER, write_wave_samples
from eagle3_pipeline.vocabulary.mapping import VOCABULARY_NAME
from eagle3_pipeline.waves import Turn, TurnRecord, finish_turn, next_turn, records, settle, turns

logger = logging.getLogger(__name__)

PLAN_NAME = "plan.json"
LOG_NAME = "training.log"
METRICS_NAME = "metrics.jsonl"
_GRACE_S = 10
_LOG_TAIL = 15
# The loss curve in the facts has at most so many points: a plot needs no more.
_CURVE_POINTS = 100


def train_draft(lineage: Lineage, lease: AbstractContextManager[None]) -> Manifest | TurnRecord:
    """Train the draft, or its next turn where there are waves; returns at once where it is made.

    A training that was stopped goes on. `lease` holds the training partition; it is entered only where
    there is work. The record of a turn is returned for each but the last one, which makes the draft.

    Raises MissingInput, BadInput (a base draft that does not fit), QualityError (a loss that is no
    number), NotEnoughRoom, DamagedFile (a finished turn's checkpoint or validation samples), and
    Eagle3Error with the end of the log where the process died otherwise.
    """
    place, planned = lineage.draft_checkpoint(), turns(lineage)
    if (made := _made(lineage, place, planned)) is not None:
        return made
    turn = _turn_to_train(lineage, place, planned)
    plan = make_plan(lineage, turn)
    with lease:
        if (made := _made(lineage, place, planned)) is not None:  # by another run, while this one waited
            return made
        if turn.of > 1 and (done := records(place.folder)[turn.number :]):
            return done[0]
        facts = run_process(plan)
    consumed = {shard: lineage.hidden_state_shards(shard).require().digest for shard in turn.shards}
    if not turn.is_last:
        return finish_turn(lineage, turn, facts.pop("checkpoint"), consumed, facts)
    facts["loss_curve"] = loss_curve(place.folder / METRICS_NAME)
    if turn.of > 1:
        before = {one.name: one.consumed for one in records(place.folder)}
        facts["waves"] = {**before, turn.name: consumed}
    files = [*sorted((place.folder / "draft").iterdir()), place.folder / METRICS_NAME]
    place.finish(files, facts)
    return _made(lineage, place, planned) or place.require()


def _made(lineage: Lineage, place: Place, planned: list[Turn]) -> Manifest | None:
    """The finished draft, if it is there; what only its making needed is removed, where a kill left it."""
    in_waves = len(planned) > 1
    if in_waves:
        settle(lineage)
    if (manifest := place.manifest()) is None:
        return None
    if in_waves and len(records(place.folder)) < len(planned):
        consumed = manifest.facts["waves"][planned[-1].name]
        finish_turn(lineage, planned[-1], manifest.digest, consumed, {})
    for name in ("checkpoints", VALIDATION_FOLDER):
        shutil.rmtree(place.folder / name, ignore_errors=True)
    return manifest


def _turn_to_train(lineage: Lineage, place: Place, planned: list[Turn]) -> Turn:
    if (turn := next_turn(lineage)) is not None:
        return turn
    raise DamagedFile(
        f"all {len(planned)} waves are recorded in {place.folder}, but it has no manifest: was it deleted? "
        "The states are gone. Move the folder away: all waves are then extracted and trained on again."
    )


def make_plan(lineage: Lineage, turn: Turn) -> TrainingPlan:
    """The plan of one turn of the recipe's training; raises MissingInput where an input is not made."""
    recipe = lineage.recipe
    settings = recipe.training.model_dump(exclude={"draft_layers"})
    vocabulary = lineage.vocabulary_map()
    vocabulary.require()
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
        devices=recipe.partitions.training,
        fingerprint=place.fingerprint,
        **settings,
    )


def loss_curve(metrics: Path) -> dict[str, list[float]]:
    """Steps and losses of the metrics, thinned out evenly to what a plot needs."""
    steps = [event for line in _lines(metrics) if (event := json.loads(line))[MARK] == "step"]
    thin = max(1, math.ceil(len(steps) / _CURVE_POINTS))
    kept = steps[::-1][::thin][::-1]  # the last one is always in
    return {"steps": [event["step"] for event in kept], "loss": [round(event["loss"], 4) for event in kept]}


def run_process(plan: TrainingPlan) -> dict[str, Any]:
    """Run one training process to its end and return its facts. It ends when this call does."""
    folder = Path(plan.folder)
    plan.write(folder / PLAN_NAME)
    failure: Eagle3Error | None = None
    facts: dict[str, Any] | None = None
    for event in _events(plan, folder):
        _record(folder / METRICS_NAME, event)
        if (line := describe(event)) is not None:
            logger.info("%s", line)
        if event[MARK] == "done":
            facts = {name: value for name, value in event.items() if name != MARK}
        elif event[MARK] == "failed":
            failure = error_of(event)
    if failure is not None:
        raise failure
    if facts is None:
        lines = (folder / LOG_NAME).read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        tail = "\n".join(lines)
        raise Eagle3Error(
            f"the training process ended without a draft. The end of {folder / LOG_NAME}:\n{tail}\n"
            "Start it again: it goes on at its last checkpoint."
        )
    return facts


def _events(plan: TrainingPlan, folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / LOG_NAME).open("ab") as log, _process(plan, folder, log) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            event = parse(raw.decode(errors="replace"))
            if event is None:
                log.write(raw)
                log.flush()
            else:
                yield event


@contextlib.contextmanager
def _process(plan: TrainingPlan, folder: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The training process. Nothing is written to its stdin: its end says that nobody waits any more."""
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle3_pipeline.training", str(folder / PLAN_NAME)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=_environment(plan.devices),
        start_new_session=True,  # a second Ctrl-C must not reach it half-way through a checkpoint
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _environment(devices: tuple[str, ...]) -> dict[str, str]:
    from eagle3_pipeline.serving.gpus import physical_gpus

    root = str(Path(__file__).parents[2])  # the package, wherever the caller's working directory is
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(physical_gpus(devices))} if devices else {}
    # Threads that spin while they wait for each other cost a factor of ten as soon as anything else runs.
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **visible}


def _record(path: Path, event: dict[str, Any]) -> None:
    """Append a step or an epoch to the metrics; at a start, forget what came after the checkpoint."""
    if event[MARK] == "start":
        write_atomic(
            path, "".join(line for line in _lines(path) if json.loads(line)["step"] <= event["step"])
        )
    elif event[MARK] in ("step", "epoch"):
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def _lines(path: Path) -> Iterator[str]:
    """Whole lines of the metrics; a torn last one is left out."""
    if path.exists():
        yield from (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
