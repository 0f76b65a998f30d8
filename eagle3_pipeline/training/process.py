"""What the training process does from start to end: build or resume, train, export, tell."""

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.errors import Busy
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights
from eagle3_pipeline.training.batches import split_samples
from eagle3_pipeline.training.checkpoint import Checkpoints
from eagle3_pipeline.training.draft import (
    NEW_NORMS,
    layer_config,
    new_draft,
    speculator_config,
    trained_parameters,
)
from eagle3_pipeline.training.events import emit
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.source import ShardSource
from eagle3_pipeline.training.warm_start import load_base, read_base_config
from eagle3_pipeline.vocabulary.mapping import read_mapping

logger = logging.getLogger(__name__)

DRAFT_FOLDER = "draft"
_LOCK_NAME = "training.lock"
# The process of a killed parent ends within milliseconds; a step of a large model may hold it up.
_LOCK_WAIT_S = 60.0


def run_plan(plan: TrainingPlan) -> None:
    """Train to the end and write draft/; the last event carries the facts."""
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_NAME).open("w") as lock:
        _wait_for(lock, folder)
        device = torch.device("cuda" if plan.devices else "cpu")
        if not plan.devices:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        source = ShardSource([Path(one) for one in plan.shards], plan.layers)
        split = split_samples(source, plan.validation_share, plan.seed)
        model = build_model(plan).to(device)
        checkpoints = Checkpoints(folder / "checkpoints", plan.identity())
        training = Training(plan, model, source, split, checkpoints, emit, device)
        last = training.run()
        best = training.finish()
        export_draft(model, folder / DRAFT_FOLDER)
        judgement = best.validation[-1]
        emit(
            "done",
            steps=training.steps,
            epochs=plan.epochs,
            tokens=last.tokens,
            seconds=round(last.seconds, 1),
            best_step=best.step,
            loss=judgement["loss"],
            accuracy_by_position=judgement["accuracy_by_position"],
            simulated_acceptance_by_position=judgement["acceptance_by_position"],
            simulated_acceptance_length=judgement["acceptance_length"],
            parameters=sum(one.numel() for one in trained_parameters(model).values()),
            samples=len(split.training),
            held_out=len(split.validation),
            without_supervision=split.without_supervision,
            warm_start=plan.base_draft is not None,
        )


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
    return layer_config(weights.config, len(plan.layers) - 1), NEW_NORMS


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
