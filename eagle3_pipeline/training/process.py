"""What the training process does from start to end: build or resume, train, export, tell."""

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import Busy, NotEnoughMemory
from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights
from eagle3_pipeline.training.batches import SampleSource, Split, hold_out, of_prompts, split_samples
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.draft import layer_config, new_draft, speculator_config, trained_parameters
from eagle3_pipeline.training.events import emit
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.group import Group, join
from eagle3_pipeline.training.judging_source import JudgingSource
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.memory import planned_sizes, require_memory
from eagle3_pipeline.training.norms import new_norms
from eagle3_pipeline.training.optimizer import freeze_parts
from eagle3_pipeline.training.parent import heed_sigterm
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


def run_plan(plan: TrainingPlan) -> bool:
    """Train the turn to its end; the last one writes draft/. The last event carries the facts.

    Each of the processes that train together calls it. Asked to end by SIGTERM it leaves a checkpoint and
    returns False. Raises NotEnoughMemory where a GPU's memory ends all the same.
    """
    folder = Path(plan.folder)
    with full_disk_named(folder, FULL_DISK), join(plan.processes, bool(plan.devices)) as group:
        folder.mkdir(parents=True, exist_ok=True)
        with _full_memory_named(plan), _alone_in(folder) if group.is_first else nullcontext():
            return _train(plan, folder, group)


def _train(plan: TrainingPlan, folder: Path, group: Group) -> bool:
    device = _device(plan, group)
    with group.first_goes_first():  # it may have states to copy
        source, split, schedule = _read(plan, device)
    model = build_model(plan)
    require_memory(model, plan, planned_sizes(source, schedule), device)
    model = model.to(device)
    checkpoints = Checkpoints(folder / "checkpoints", plan.fingerprint)
    tell = emit if group.is_first else _say_nothing
    with heed_sigterm() as is_stopping:
        training = Training(
            *(plan, model, source, split, schedule, checkpoints, tell, device),
            group=group,
            is_stopping=is_stopping,
        )
        reached = training.run()
    if not training.is_done:
        logger.warning("asked to end: training goes on at the checkpoint of step %d", reached.step)
        return False
    if group.is_first:
        facts: dict[str, Any] = {
            "steps": reached.step,
            "tokens": reached.tokens,
            "seconds": round(reached.seconds, 1),
            "waited_seconds": round(reached.waited, 1),
            "samples": len(split.training),
            "judges": len(schedule.validation),
            "greedy_agreement": round(source.greedy_agreement, 4),
            "without_supervision": split.without_supervision,
        }
        emit("done", **facts, **_finish(plan, training, model, schedule))
    return True


@contextmanager
def _full_memory_named(plan: TrainingPlan) -> Iterator[None]:
    """What was computed beforehand knows nothing of others on the GPU, or of gaps between tensors."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"the memory of the GPU ended, though what a step holds fitted when it was computed: {error}. "
            "Look for other processes on the GPU (nvidia-smi). Or lower training.tokens_per_step (now "
            f"{plan.tokens_per_step}), or raise training.accumulation (now {plan.accumulation}): its batches "
            "are smaller."
        ) from error


def _say_nothing(kind: str, **values: Any) -> None:
    """What processes other than the first tell."""


def _device(plan: TrainingPlan, group: Group) -> torch.device:
    if not plan.devices:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // group.size))
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16
    device = torch.device("cuda", group.rank)
    torch.cuda.set_device(device)
    return device


def _finish(plan: TrainingPlan, training: Training, model: Any, schedule: Schedule) -> dict[str, Any]:
    """Write the draft, or make sure of what the next turn needs; returns the facts of it."""
    reached = training.state
    if schedule.end == schedule.total:
        best = training.progress.finish()
        export_draft(model, Path(plan.folder) / DRAFT_FOLDER, plan.layers[:-1])
        facts: dict[str, Any] = {
            "epochs": reached.epoch if reached.stopped else plan.epochs,
            "parameters": sum(one.numel() for one in trained_parameters(model).values()),
            "warm_start": plan.base_draft is not None,
        }
    else:
        facts = {"checkpoint": training.progress.secure()}
        best = reached
    if reached.lost_best:
        facts["lost_best"] = True
    if reached.stopped:
        facts["stopped_early"] = True
    return facts | _judged(best)


def _judged(state: TrainingState) -> dict[str, Any]:
    judgement = state.validation[-1]
    return {
        "best_step": state.best_step,
        "loss": judgement["loss"],
        "chance": judgement["chance"],
        "accuracy_by_position": judgement["accuracy_by_position"],
        "simulated_acceptance_by_position": judgement["acceptance_by_position"],
        "simulated_acceptance_length": judgement["acceptance_length"],
        "simulated_acceptance_by_tokens": judgement["acceptance_by_tokens"],
    }


def _read(plan: TrainingPlan, device: torch.device) -> tuple[JudgingSource, Split, Schedule]:
    """The samples of this turn, and what is planned for all turns."""
    source, split, schedule = _read_at_once(plan) if plan.samples is None else _read_wave(plan, plan.samples)
    judging = JudgingSource(source, schedule.validation, lambda: Head.read(Path(plan.target)), device)
    return judging, split, schedule


def _read_at_once(plan: TrainingPlan) -> tuple[SampleSource, Split, Schedule]:
    source = _open(plan, plan.shards)
    split = split_samples(source, plan.validation)
    return source, split, make_schedule(plan, split, lambda _: True)


def _read_wave(plan: TrainingPlan, listed: str) -> tuple[SampleSource, Split, Schedule]:
    samples = WaveSamples.read(Path(listed))
    judges = of_prompts(dict(enumerate(samples.names)), plan.validation)
    rows = dict(enumerate(samples.rows))
    split = hold_out(samples.waves(), rows, samples.without_supervision, judges)
    copy = keep_validation(plan, [samples.names[one] for one in split.validation])
    there = WaveSource(samples, split.validation, _open(plan, plan.shards), _open(plan, [copy]))
    return there, split, make_schedule(plan, split, there.__contains__)


def _open(plan: TrainingPlan, folders: Iterable[str | Path]) -> ShardSource:
    return ShardSource([Path(one) for one in folders], plan.layers, plan.model_fingerprint)


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
    freeze_parts(model, plan.rates)
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
    return layer, new_norms(
        per_layer_norm=plan.per_layer_norm,
        norm_output=plan.norm_output,
        norm_before_residual=plan.norm_before_residual,
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; raises Busy where another process keeps it."""
    until = time.monotonic() + _LOCK_WAIT_S
    with (folder / _LOCK_NAME).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise Busy(
                        f"another process trains in {folder} since over {_LOCK_WAIT_S:.0f} s: wait for it"
                    ) from error
                time.sleep(0.1)
        yield
