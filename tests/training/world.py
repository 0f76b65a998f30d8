"""A run up to the training, invented: samples, states, vocabulary; and a trainer within this process."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline import waves
from eagle3_pipeline.base_draft import make_base_draft
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, read_samples, write_samples
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.target import make_target
from eagle3_pipeline.training import child, process, training
from eagle3_pipeline.training.events import Listener
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.vocabulary.mapping import make_vocabulary
from tests.recipes import finish_prompts, tiny_recipe


def make_lineage(
    tmp_path: Path, model_folder: Path, waves: Any = 1, passes: int = 1, **changes: Any
) -> Lineage:
    """A run of three shards with its samples and vocabulary; without states."""
    extraction = {"waves": waves, "passes": passes, **changes.pop("extraction", {})}
    path = tiny_recipe(tmp_path / "recipe", model_folder, extraction=extraction, **changes)
    lineage = Lineage(load_recipe(str(path), tmp_path), tmp_path / "storage")
    make_target(lineage)
    if lineage.recipe.base_draft is not None:
        make_base_draft(lineage)
    plan = lineage.recipe.prompts
    finish_prompts(lineage, [f"{plan.shards[0]}-{number}" for number in range(plan.validation_prompts)])
    generator = torch.Generator().manual_seed(0)
    for shard in lineage.recipe.shards:
        place = lineage.synthetic_samples(shard)
        write_samples(place.folder / SAMPLES_NAME, [_reply(f"{shard}-{n}", generator) for n in range(8)])
        place.finish([place.folder / SAMPLES_NAME], {})
    make_vocabulary(lineage)
    return lineage


def plan_waves(lineage: Lineage, *planned: list[str]) -> None:
    """What the audit says about waves; each shard by itself where nothing is given."""
    plan = list(planned) or [[shard] for shard in lineage.recipe.shards]
    place = lineage.sample_audit()
    place.folder.mkdir(parents=True)
    place.finish([], {"waves": plan, "passes": lineage.recipe.extraction.passes})


def write_states(lineage: Lineage, shards: list[str], leave_out: frozenset[str] = frozenset()) -> None:
    """Random states of shards that have none, the same whenever they are made; some samples are left out."""
    facts = lineage.target_model().require().facts
    layout = ShardLayout(lineage.recipe.extraction.layers, facts["hidden_size"], facts["model_fingerprint"])
    for shard in shards:
        place = lineage.hidden_state_shards(shard)
        if place.manifest() is not None:
            continue
        generator = torch.Generator().manual_seed(int(shard[-3:]))
        place.folder.mkdir(parents=True, exist_ok=True)
        with ShardWriter(place.folder, layout, 1 << 30, place.fingerprint) as writer:
            samples = read_samples(lineage.synthetic_samples(shard).folder / SAMPLES_NAME)
            for one in samples:
                shape = (len(one.token_ids), len(layout.layer_ids), layout.hidden_size)
                states = torch.randn(shape, generator=generator).to(torch.bfloat16)
                mask = torch.tensor(one.loss_mask)
                if one.sample_id not in writer.done | leave_out:
                    writer.add(one.sample_id, states, torch.tensor(one.token_ids), mask)
            left_out = sum(one.sample_id in leave_out for one in samples)
            place.finish(writer.complete(), {"quarantined": {"left out": left_out}})
            writer.close(finished=True)


class _NoServer(Exception):
    pass


def go_through(lineage: Lineage) -> None:
    """What `eagle3 run` does with waves: extract what is due, train, until nothing is left; then measure.

    There is no server to measure, so the last one ends where it would be started.
    """
    while (turn := waves.next_turn(lineage)) is not None:
        write_states(lineage, waves.due(lineage, turn.shards))
        training.train_draft(lineage, nullcontext(), turn.shards)

    def no_server(*_: object) -> Any:
        raise _NoServer

    with suppress(_NoServer):
        evaluate_draft(lineage, no_server)


def left_over(lineage: Lineage) -> list[Path]:
    """What a finished training must not leave: checkpoints, the copy of its judges, states of its waves."""
    folder = lineage.draft_checkpoint().folder
    shards = map(lineage.hidden_state_shards, lineage.recipe.shards)
    parts = [part for place in shards for part in place.folder.glob("*part-*")]
    names = ("checkpoints", "validation", ".draft.tmp")
    return [*parts, *(folder / name for name in names if (folder / name).exists())]


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process, on one thread: seconds of imports less for each turn."""

    def run_process(plan: TrainingPlan, on_event: Listener = lambda event: None) -> dict[str, Any]:
        done: dict[str, Any] = {}

        def emit(kind: str, **values: Any) -> None:
            event = json.loads(json.dumps({"event": kind, **values}))
            child._record(Path(plan.folder) / child.METRICS_NAME, event)
            on_event(event)
            if kind == "done":
                done.update({name: value for name, value in event.items() if name != "event"})

        monkeypatch.setattr(process, "emit", emit)
        process.run_plan(plan)
        return done

    monkeypatch.setattr(training, "run_process", run_process)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: {0})


def _reply(name: str, generator: torch.Generator) -> Sample:
    size = int(torch.randint(15, 40, (), generator=generator))
    prompt, completion = (torch.randint(0, 300, (n,), generator=generator).tolist() for n in (9, size))
    return Sample(
        sample_id=f"{name}-t0",
        prompt_id=name,
        turn=0,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        finish_reason="stop",
        content="",
        reasoning="",
        usage={},
        sampling={},
        server="",
        verdict="good",
    )


def three_waves(tmp_path: Path, tiny_llama: Path, **changes: Any) -> Lineage:
    """A lineage in three waves, whose plan is made."""
    lineage = make_lineage(
        tmp_path, tiny_llama, **{"waves": 3, "training": {"tokens_per_step": 64}, **changes}
    )
    plan_waves(lineage)
    return lineage
