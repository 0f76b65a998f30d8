"""What the trainings of a comparison have in common: samples, states, vocabulary, settings, environment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.serving.gpus import MASK_VARIABLE, physical_gpus
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import extraction_server
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.training import make_plan
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from eagle3_pipeline.waves import turns

_NEVER_S = 1e9


def plan_of(lineage: Lineage) -> TrainingPlan:
    """The plan of the recipe's training; states that are missing are made first, which starts a server."""
    audit_samples(lineage)
    make_vocabulary(lineage)
    (turn,) = turns(lineage)
    server = open_server(extraction_server(lineage, lineage.staging), lineage.logs)
    extract_shards(lineage, turn.shards, server, lambda shard, manifest: None)
    return make_plan(lineage, turn)


def for_timing(plan: TrainingPlan, folder: Path, **changes: Any) -> TrainingPlan:
    """The same training in another folder, one epoch of it, without a checkpoint on the way."""
    return replace(plan, folder=str(folder), epochs=1, checkpoint_every_s=_NEVER_S, **changes)


def quiet_environment(devices: tuple[str, ...]) -> dict[str, str]:
    """As this project's step has it; the others get the same."""
    root = str(Path(__file__).parents[2])
    visible = {MASK_VARIABLE: ",".join(physical_gpus(devices))} if devices else {}
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"}
    quiet |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**quiet, "PYTHONPATH": root, **visible}
