"""What the training process does from start to end: build or resume, train, export, tell."""

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights
from eagle3_pipeline.training.batches import SampleSource, Split, hold_out, split_samples
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.draft import (
    layer_config,
    new_draft,
    new_norms,
    speculator_config,
    trained_parameters,
)
from eagle3_pipeline.training.events import emit
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.plan import FULL_DISK, TrainingPlan
from eagle3_pipeline.training.schedule import Schedule, make_schedule
from eagle3_pipeline.training.source import ShardSource
from eagle3_pipeline.training.warm_start import load_base, read_base_config
from eagle3_pipeline.training.wave_samples import WaveSamples
from eagle3_pipeline.training.wave_source import WaveSource, keep_validation
from eagle3_pipeline.vocabulary.mapping import read_mapping

logger = logging.getLogger(__name__)

DRAFT_FOLDER = "draft"
_LOCK_NAME = "training.lock"
# The process of a killed parent ends within milliseconds; a step of a large model may hold it up.
_LOCK_WAIT_S = 60.0


def run_plan(plan: TrainingPlan) -> None:
    """Train the turn to its end; the last one writes draft/. The last event carries the facts."""
    folder = Path(plan.folder)
    with full_disk_named(folder, FULL_DISK):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK_NAME).open("w") as lock:
            _wait_for(lock, folder)
            _train(plan, folder)


def _train(plan: TrainingPlan, folder: Path) -> None:
    device = torch.device("cuda" if plan.devices else "cpu")
    if not plan.devices:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    source, split, schedule = _read(plan)
    model = build_model(plan).to(device)
    checkpoints = Checkpoints(folder / "checkpoints", plan.fingerprint)
    training = Training(plan, model, source, split, schedule, checkpoints, emit, device)
    reached = training.run()
    facts: dict[str, Any] = {
        "steps": reached.step,
        "tokens": reached.tokens,
        "seconds": round(reached.seconds, 1),
        "waited_seconds": round(reached.waited, 1),
        "samples": len(split.training),
        "held_out": len(schedule.validation),
        "without_supervision": split.without_supervision,
    }
    if schedule.end == schedule.total:
        best = training.finish()
        export_draft(model, folder / DRAFT_FOLDER, plan.layers[:-1])
        facts |= {
            "epochs": plan.epochs,
            "parameters": sum(one.numel() for one in trained_parameters(model).values()),
            "warm_start": plan.base_draft is not None,
        }
    else:
        facts["checkpoint"] = training.secure()
        best = reached
    if training.state.lost_best:
        facts["lost_best"] = True
    emit("done", **facts, **_judged(best))


def _judged(state: TrainingState) -> dict[str, Any]:
    judgement = state.validation[-1]
    return {
        "best_step": state.best_step,
        "loss": judgement["loss"],
        "accuracy_by_position": judgement["accuracy_by_position"],
        "simulated_acceptance_by_position": judgement["acceptance_by_position"],
        "simulated_acceptance_length": judgement["acceptance_length"],
    }


def _read(plan: TrainingPlan) -> tuple[SampleSource, Split, Schedule]:
    """The samples of this turn, and what is planned for all turns."""
    folders = [Path(one) for one in plan.shards]
    if plan.samples is None:
        source = ShardSource(folders, plan.layers)
        split = split_samples(source, plan.validation_share, plan.seed)
        return source, split, make_schedule(plan, split, lambda _: True)
    samples = WaveSamples.read(Path(plan.samples))
    rows = dict(enumerate(samples.rows))
    split = hold_out(samples.waves(), rows, samples.without_supervision, plan.validation_share, plan.seed)
    copy = ShardSource([keep_validation(plan, [samples.names[one] for one in split.validation])], plan.layers)
    there = WaveSource(samples, split.validation, ShardSource(folders, plan.layers), copy)
    return there, split, make_schedule(plan, split, there.__contains__)


def build_model(plan: TrainingPlan) -> Any:
    """The draft as training starts: from the base draft, or from random weights and the target's."""
    weights = read_target_weights(Path(plan.target))
    d2t, t2d = read_mapping(Path(plan.vocabulary))
    layer, norms = _shape(plan, weights)
    config = speculator_config(
        layer,
        weights,
        target_name=plan.target_name,
        aux_layers=plan.layers[:-1],
        draft_tokens=len(d2t),
        speculative_tokens=plan.test_time_steps,
        norms=norms,
    )
    model = new_draft(config, weights, d2t, t2d, seed=plan.seed, train_head=plan.train_head)
    if plan.base_draft is not None:
        load_base(model, Path(plan.base_draft))
    return model


def _shape(plan: TrainingPlan, weights: TargetWeights) -> tuple[Any, dict[str, bool]]:
    if plan.base_draft is not None:
        return read_base_config(Path(plan.base_draft), weights, plan.layers[:-1])
    layer = layer_config(
        weights.config,
        len(plan.layers) - 1,
        intermediate_size=plan.intermediate_size,
        attention_window=plan.attention_window,
    )
    return layer, new_norms(per_layer_norm=plan.per_layer_norm, norm_output=plan.norm_output)


def _wait_for(lock: Any, folder: Path) -> None:
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise Busy(
                    f"another process trains in {folder} since over {_LOCK_WAIT_S:.0f} s: wait for it"
                ) from error
            time.sleep(0.1)
