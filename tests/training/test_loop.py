"""Stop and resume, damaged checkpoints, losses that are no numbers, the best that is kept."""

import errno
import functools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_pipeline.errors import DamagedFile, QualityError
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.tensor_file import write_tensors
from eagle3_pipeline.training import checkpoint
from eagle3_pipeline.training.checkpoint import Checkpoints
from eagle3_pipeline.training.loop import Training
from eagle3_pipeline.training.memory import planned_sizes, require_memory
from eagle3_pipeline.training.schedule import make_schedule, rate_share
from tests.training.tiny import Memory, draft, memory, plan, split

_SIZES = [(14, 4), (9, 3), (20, 8), (16, 5), (11, 2), (18, 6), (13, 4), (22, 9), (10, 3), (15, 5)]


def _training(
    folder: Path,
    events: list[dict[str, Any]] | None = None,
    source: Memory | None = None,
    is_there: Callable[[int], bool] = lambda _: True,
    **changes: Any,
):  # type: ignore[no-untyped-def]
    source = source or memory(_SIZES)
    changed = plan(folder, **changes)
    divided = split(source)
    heard = events if events is not None else []

    def emit(kind: str, **values: Any) -> None:
        heard.append({"event": kind, **values})

    return Training(
        changed,
        draft(),
        source,
        divided,
        make_schedule(changed, divided, is_there),
        Checkpoints(folder, changed.fingerprint),
        emit,
        torch.device("cpu"),
    )


def _weights(training: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in training._optimizer.parameters.items()}


@functools.cache
def _uninterrupted(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    training = _training(folder)
    training.run()
    return _weights(training), training.steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], int]:
    return _uninterrupted(tmp_path_factory.mktemp("whole"))


def test_a_run_that_is_killed_after_every_step_ends_with_the_same_bits(
    tmp_path: Path, whole: tuple[dict[str, torch.Tensor], int]
) -> None:
    weights, steps = whole
    at = 0
    while at < steps:
        # A checkpoint after each step; the step that follows it is lost by the kill.
        training = _training(tmp_path, checkpoint_every_s=0)
        assert training.state.step == at
        at = min(at + 1, steps)
        training.run(stop=min(at + 1, steps) if at < steps else None)
    assert {
        name: torch.equal(one, weights[name]) for name, one in _weights(training).items()
    } == dict.fromkeys(weights, True)


def test_the_newest_checkpoint_is_passed_over_with_a_warning_when_it_is_damaged(
    tmp_path: Path, whole: tuple[dict[str, torch.Tensor], int], caplog: pytest.LogCaptureFixture
) -> None:
    weights, steps = whole
    _training(tmp_path, checkpoint_every_s=0).run(stop=4)
    newest = tmp_path / "step-00000003" / "weights.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    training = _training(tmp_path)
    assert training.state.step == 2
    assert "step-00000003 is passed over" in caplog.text
    training.run()
    assert all(torch.equal(one, weights[name]) for name, one in _weights(training).items())
    assert training.state.step == steps


def test_no_gradient_is_held_after_a_step(tmp_path: Path) -> None:
    training = _training(tmp_path)
    training.run(stop=1)
    assert all(one.grad is None for one in training._optimizer.parameters.values())


def test_checkpoints_are_found_by_number_and_two_are_kept(tmp_path: Path) -> None:
    training = _training(tmp_path, checkpoint_every_s=0, epochs=3)
    training.run()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["best", f"step-{training.steps - 1:08d}", f"step-{training.steps:08d}"]
    (tmp_path / "step-9").mkdir()  # below the others by number, above them by name
    assert _training(tmp_path, epochs=3).state.step == training.steps


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    _training(tmp_path, checkpoint_every_s=0).run(stop=3)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000003.tmp")
    (tmp_path / ".step-00000003.tmp" / "state.json").unlink()
    assert _training(tmp_path).state.step == 2


def test_what_kills_left_of_any_checkpoint_goes_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    _training(tmp_path, checkpoint_every_s=0).run(stop=3)
    first, second = (tmp_path / f"step-0000000{step}" for step in (1, 2))
    for name in (".step-00000077.tmp", ".best.tmp", ".step-00000001.old"):
        shutil.copytree(first, tmp_path / name)
    second.rename(tmp_path / ".step-00000002.old")
    assert _training(tmp_path).state.step == 2
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_an_error_of_the_disk_is_raised_and_no_checkpoint_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _training(tmp_path, checkpoint_every_s=0).run(stop=3)
    before = sorted(tmp_path.iterdir())

    def fails(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sha256_of_file", fails)
        with pytest.raises(OSError, match="Input/output error"):
            _training(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert _training(tmp_path).state.step == 2


def test_a_checkpoint_of_another_version_of_the_code_is_passed_over_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _training(tmp_path, checkpoint_every_s=0).run(stop=3)
    path = tmp_path / "step-00000002" / "state.json"
    state = json.loads(path.read_text())
    del state["checksum"]
    state["progress"]["of_a_later_release"] = 1
    path.write_text(json.dumps({**state, "checksum": fingerprint(state)}))
    training = _training(tmp_path, checkpoint_every_s=0)
    assert training.state.step == 1
    assert "step-00000002 is passed over" in caplog.text
    assert path.exists()


def test_an_epoch_whose_samples_changed_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _training(tmp_path, checkpoint_every_s=0)
    whole.run(stop=whole.steps // 2 + 3)
    start = whole.steps // 2  # of the second of two epochs
    gone = whole._schedule.epochs[1][0][0][0]

    def is_there(index: int) -> bool:
        return index != gone

    training = _training(tmp_path, is_there=is_there)
    assert (training.state.step, training.state.epoch, training.state.batch) == (start, 1, 0)
    assert "the epoch begins again" in caplog.text
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{start:08d}"]
    caplog.clear()
    again = _training(tmp_path, is_there=is_there, checkpoint_every_s=0)
    again.run(stop=start + 2)
    assert _training(tmp_path, is_there=is_there).state.step == start + 1  # the same samples: it goes on
    assert not caplog.text


def test_best_weights_that_are_lost_give_way_to_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = _training(tmp_path)
    training.run()
    weights = _weights(training)
    shutil.rmtree(tmp_path / "best")
    best = _training(tmp_path)
    at = best.progress.finish()
    assert (at.best_step, at.lost_best) == (training.steps, True)
    assert at.best == at.validation[-1]["acceptance_length"]
    assert all(torch.equal(one, weights[name]) for name, one in _weights(best).items())
    assert "take their place" in caplog.text


def test_a_turn_ends_only_with_a_checkpoint_and_best_weights_that_can_be_read_back(tmp_path: Path) -> None:
    training = _training(tmp_path)
    training.run()
    digest = training.progress.secure()
    assert _training(tmp_path).progress.secure() == digest
    (tmp_path / "best" / "weights.safetensors").write_bytes(b"")
    training.progress.secure()
    assert Checkpoints(tmp_path, "f" * 64).verify_best().best_step == training.steps
    assert _training(tmp_path).state.lost_best
    (tmp_path / f"step-{training.steps:08d}" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFile, match="No states were deleted: start it again"):
        training.progress.secure()


def test_safetensors_words_become_the_number_of_an_error(tmp_path: Path) -> None:
    if not (pid := os.fork()):  # the bound on a file's size stays in the child
        status = 0
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_tensors({"one": torch.zeros(10_000)}, tmp_path / "file")
        except OSError as error:
            status = error.errno or 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EFBIG


def test_a_checkpoint_of_another_plan_is_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _training(tmp_path, checkpoint_every_s=0).run(stop=3)
    assert _training(tmp_path, fingerprint="0" * 64).state.step == 0
    assert "of another training plan" in caplog.text
    assert _training(tmp_path).state.step == 2  # they are left as they were


def test_a_loss_that_is_no_number_stops_the_run_with_sample_and_step(tmp_path: Path) -> None:
    source = memory(_SIZES)
    source.samples[split(source).training[2]]["hidden_states"][3, 1, 0] = torch.nan
    name = source.name(split(source).training[2])
    with pytest.raises(QualityError, match=rf"loss nan at step \d+ .*not finite in {name}"):
        _training(tmp_path, source=source).run()


def test_the_weights_before_a_loss_that_is_no_number_are_kept(
    tmp_path: Path, whole: tuple[dict[str, torch.Tensor], int]
) -> None:
    source = memory(_SIZES)
    schedule = _training(tmp_path / "planned")._schedule
    bad = schedule.epochs[0][2][0][0]  # of the third step
    source.samples[bad]["hidden_states"][3, 1, 0] = torch.nan
    straight = _training(tmp_path / "straight")
    straight.run(stop=2)
    folder = tmp_path / "kept"
    for _ in range(2):  # started again it ends there again, with the same checkpoint
        with pytest.raises(QualityError, match=r"at step 3 .*of step 2; .*shard again: .*trains anew"):
            _training(folder, source=source).run()
        assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    kept = _training(folder)
    assert kept.state.batch == 2
    assert all(torch.equal(one, _weights(straight)[name]) for name, one in _weights(kept).items())
    kept.run()  # mended, it goes on
    assert all(torch.equal(one, whole[0][name]) for name, one in _weights(kept).items())


def test_a_first_step_whose_loss_is_no_number_leaves_the_start(tmp_path: Path) -> None:
    source = memory(_SIZES)
    for one in source.samples:
        one["hidden_states"][3, 1, 0] = torch.nan
    with pytest.raises(QualityError, match=r"at step 1 .*of step 0"):
        _training(tmp_path, source=source).run()
    again = _training(tmp_path)
    again.run(stop=1)
    assert again.state.step == 1


@pytest.mark.parametrize("base_draft", [None, "the-draft"])
def test_a_judgement_that_is_no_number_ends_the_run_with_the_samples(
    tmp_path: Path, base_draft: str | None
) -> None:
    source = memory(_SIZES)
    judge = split(source).validation[-1]
    source.samples[judge]["hidden_states"][3, 1, 0] = torch.nan
    name = source.name(judge)
    events: list[dict[str, Any]] = []
    training = _training(tmp_path, events, source, base_draft=base_draft)
    with pytest.raises(
        QualityError,
        match=rf"loss nan of the held-out samples .*not finite in {name}. Make their shard again",
    ):
        training.run()
    assert not training.state.validation
    assert [event["event"] for event in events] == (["start"] if base_draft else ["start", "step"])


def test_a_turn_without_batches_is_judged_and_ends(tmp_path: Path) -> None:
    source = memory(_SIZES)
    training = _training(tmp_path, is_there=split(source).validation.__contains__)
    sizes = planned_sizes(source, training._schedule)
    assert require_memory(draft(), plan(tmp_path), sizes, torch.device("cpu")) is None
    training.run()
    assert training.is_done
    assert len(training.state.validation) == 2


def test_the_best_epoch_is_what_is_finished_with_not_the_last(tmp_path: Path) -> None:
    training = _with_lengths(_training(tmp_path, epochs=3), 1.2, 1.5, 1.1)
    training.run()
    best = training.progress.finish()
    assert (best.best, best.step) == (1.5, training.steps // 3 * 2)
    assert best.validation[-1]["acceptance_length"] == 1.5


def _with_lengths(training: Any, *lengths: float) -> Any:
    """Let its judgements find these acceptance lengths."""
    judge, given = training._validate, iter(lengths)
    training._validate = lambda: replace(judge(), acceptance_length=next(given))
    return training


def test_patience_ends_the_training_when_so_many_epochs_brought_no_better_one(tmp_path: Path) -> None:
    training = _with_lengths(_training(tmp_path, epochs=9, patience=2), 1.2, 1.5, 1.4, 1.6, 1.6, 1.5)
    per_epoch = training.steps // 9
    at = training.run()
    assert (at.stopped, training.is_done, at.epoch, at.step) == (True, True, 6, 6 * per_epoch)
    again = _training(tmp_path, epochs=9, patience=2)
    assert again.run().step == at.step  # it is not taken up again
    assert again.progress.finish().best_step == 4 * per_epoch


def test_a_stop_that_is_asked_for_amid_a_validation_leaves_the_epoch_to_be_judged(
    tmp_path: Path, whole: tuple[dict[str, torch.Tensor], int]
) -> None:
    training = _training(tmp_path)
    judge, asked = training._validate, iter([True])

    def validate() -> Any:
        training._is_stopping = lambda: next(asked, False)
        return judge()

    training._validate = validate
    at = training.run()
    assert (training.is_done, at.validation, at.epoch) == (False, [], 0)
    again = _training(tmp_path)
    assert (again.state.epoch, again.state.batch) == (0, training.steps // 2)
    again.run()
    assert len(again.state.validation) == 2
    assert all(torch.equal(one, whole[0][name]) for name, one in _weights(again).items())


def test_events_tell_steps_losses_and_the_held_out_judgement(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    training = _training(tmp_path, events)
    training.run()
    assert [event["event"] for event in events] == ["start", "step", "epoch", "step", "epoch"]
    assert events[3]["step"] == events[3]["steps"] == training.steps
    assert len(events[2]["accuracy_by_position"]) == 3
    assert events[4]["acceptance_length"] == 1 + sum(events[4]["acceptance_by_position"])


def test_training_lowers_the_loss_and_learns_a_rule(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    _training(tmp_path, events, epochs=8).run()
    losses = [event["loss"] for event in events if event["event"] == "step"]
    first = next(event["loss"] for event in events if event["event"] == "epoch")
    assert losses[-1] < 0.8 * first


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine_to_zero() -> None:
    shares = [rate_share(step, 100, 0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert shares[55] == pytest.approx(0.5, abs=0.02)
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert 0 < shares[-1] < 0.001
