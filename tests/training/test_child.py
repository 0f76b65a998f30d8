"""Several processes as their parent sees them: started by torchrun, ended and taken up again."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.training import child
from eagle3_pipeline.training.child import run_process
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.training import make_plan
from eagle3_pipeline.waves import next_turn
from tests.training.world import make_lineage, write_states


@pytest.fixture
def pair(tmp_path: Path, tiny_llama: Path) -> TrainingPlan:
    """The plan of a training by two processes."""
    lineage = make_lineage(tmp_path, tiny_llama)
    write_states(lineage, list(lineage.recipe.shards))
    turn = next_turn(lineage)
    assert turn is not None
    return replace(make_plan(lineage, turn), processes=2, tokens_per_step=128)


def _interrupt(plan: TrainingPlan) -> list[psutil.Process]:
    """Start the training and interrupt it when it begins; returns the processes that it had."""
    together: list[psutil.Process] = []

    def interrupted(event: dict[str, object]) -> None:
        together.extend(psutil.Process().children(recursive=True))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "describe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_process(plan)
    return together


def test_an_interruption_ends_all_processes_with_a_checkpoint(pair: TrainingPlan) -> None:
    together = _interrupt(pair)
    assert len(together) == 3  # torchrun and its two
    assert not any(one.is_running() for one in together)
    (checkpoint,) = (Path(pair.folder) / "checkpoints").glob("step-*")
    assert int(checkpoint.name[-8:]) > 0
    log = (Path(pair.folder) / "training.log").read_text()
    assert log.count("asked to end: training goes on at the checkpoint") == 2


@pytest.mark.real
def test_two_processes_that_were_interrupted_go_on_to_a_draft(pair: TrainingPlan) -> None:
    _interrupt(pair)
    facts = run_process(pair)
    assert facts["epochs"] == 2
    assert facts["steps"] > 0
    assert (Path(pair.folder) / "draft" / "model.safetensors").exists()
