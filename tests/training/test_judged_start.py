"""A base draft is judged before its first step: against chance, and as the first that may be the best."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training import loop
from eagle3_pipeline.training.batches import pack
from eagle3_pipeline.training.chance import require_above_chance
from eagle3_pipeline.training.checkpoint import Checkpoints
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.schedule import make_schedule
from eagle3_pipeline.training.validation import Judgement
from tests.training.tiny import draft, memory, plan, split

_SIZES = [(14, 4), (9, 3), (20, 8), (16, 5), (11, 2), (18, 6), (13, 4), (22, 9), (10, 3), (15, 5)]


def _training(folder: Path, events: list[dict[str, Any]], base: str | None = "the-draft") -> Any:
    source, changed = memory(_SIZES), plan(folder, base_draft=base)
    divided = split(source)

    def emit(kind: str, **values: Any) -> None:
        events.append({"event": kind, **values})

    return Training(
        changed,
        draft(),
        source,
        divided,
        make_schedule(changed, divided, lambda _: True),
        Checkpoints(folder, changed.fingerprint),
        emit,
        torch.device("cpu"),
    )


def _judge(monkeypatch: pytest.MonkeyPatch, lengths: list[float], accuracy: float = 0.9) -> None:
    """Acceptance lengths of the judgements, one after the other."""
    left: Iterator[float] = iter(lengths)

    def judgement(*_: Any, **__: Any) -> Judgement:
        length = next(left)
        by_position, by_tokens = (length - 1, 0.0, 0.0), (length,) * 3
        return Judgement(1.0, (accuracy, 0.5, 0.5), by_position, length, 1000, 0.1, by_tokens)

    monkeypatch.setattr(loop, "judge", judgement)


def _weights(training: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in training._optimizer.parameters.items()}


def test_a_training_that_only_harms_gives_the_base_draft_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _judge(monkeypatch, [1.8, 1.5, 1.8])  # a tie goes to the earlier
    events: list[dict[str, Any]] = []
    training = _training(tmp_path, events)
    start = _weights(training)
    training.run()
    assert not all(torch.equal(start[name], one) for name, one in _weights(training).items())
    best = Checkpoints(tmp_path, "f" * 64).verify_best()
    assert (best.best_step, best.best, best.validation[-1]["epoch"]) == (0, 1.8, -1)
    kept = load_file(tmp_path / "best" / "weights.safetensors")
    assert all(torch.equal(one, kept[name]) for name, one in start.items())
    judged = [one for one in events if one["event"] == "start_judged"]
    assert [(one["step"], one["acceptance_length"]) for one in judged] == [(0, 1.8)]
    assert judged[0]["chance"] == 0.1


def test_a_training_that_helps_is_better_than_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _judge(monkeypatch, [1.2, 1.5, 1.4])
    training = _training(tmp_path, [])
    training.run()
    assert Checkpoints(tmp_path, "f" * 64).verify_best().best == 1.5
    assert [one["epoch"] for one in training.state.validation] == [-1, 0, 1]


def test_a_start_that_was_judged_is_not_judged_again_after_a_checkpoint_and_is_before_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    _judge(monkeypatch, [1.2])
    _training(tmp_path, events).run(stop=1)  # killed before its first checkpoint
    _judge(monkeypatch, [1.2, 1.5])
    killed = _training(tmp_path, events)
    killed.run(stop=killed._schedule.starts[1] + 1)
    _judge(monkeypatch, [1.1])
    resumed = _training(tmp_path, events)
    resumed.run()
    assert [one["epoch"] for one in resumed.state.validation] == [-1, 0, 1]
    assert sum(one["event"] == "start_judged" for one in events) == 2


def test_a_base_draft_worse_than_chance_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _judge(monkeypatch, [1.0], accuracy=0.01)
    events: list[dict[str, Any]] = []
    with pytest.raises(
        BadInput, match=r"proposes 1\.0 % of the held-out tokens rightly .* more than 10\.0 %"
    ):
        _training(tmp_path, events).run()
    assert [one["event"] for one in events] == ["start"]
    assert not list(tmp_path.glob("best"))


def test_a_new_draft_is_not_judged_before_it_is_trained(tmp_path: Path) -> None:
    training = _training(tmp_path, [], base=None)
    training.run()
    assert [one["epoch"] for one in training.state.validation] == [0, 1]


@pytest.mark.parametrize(
    ("accuracy", "rows", "outcome"),
    [
        (0.101, 1000, "taken"),
        (0.1, 1000, "warned"),
        (0.08, 1000, "warned"),  # three standard errors are 0.028
        (0.07, 1000, "refused"),
        (0.0, 200, "refused"),
        (0.0, 199, "warned"),
    ],
)
def test_luck_may_put_a_base_draft_below_chance_and_few_rows_say_nothing(
    accuracy: float, rows: int, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    judgement = Judgement(1.0, (accuracy, 0.0), (0.0, 0.0), 1.0, rows, 0.1, (1.0, 1.0))
    with pytest.raises(BadInput) if outcome == "refused" else nullcontext():
        require_above_chance(judgement)
    assert ("expected more than 10.0 %" in caplog.text) == (outcome == "warned")


def test_chance_is_the_share_of_the_most_frequent_label_and_no_state_is_read_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "require_above_chance", lambda _: None)
    events: list[dict[str, Any]] = []
    training = _training(tmp_path, events)
    read = training._source.read
    counted: list[int] = []
    training._source.read = lambda index: counted.append(index) or read(index)
    training._judge_start()
    held_out = training._schedule.validation
    assert sorted(counted) == sorted(held_out)
    labels = pack(memory(_SIZES), held_out).labels
    assert events[0]["rows"] == len(labels)
    assert events[0]["chance"] == int(labels.bincount().max()) / len(labels)
