"""Turns over passes and waves: which one is next, which shards are due, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline import waves
from eagle3_pipeline.errors import DamagedFile, MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.shards.consumption import consumption, mark_consumed
from eagle3_pipeline.waves import Turn, due, finish_turn, finished_turn, next_turn, turns
from tests.recipes import finish_prompts, tiny_recipe

A, B, C, D = (f"p8-s{number:03}" for number in range(4))


def _finish(place: Place, facts: dict[str, Any] | None = None) -> None:
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / "content").write_text(place.fingerprint)
    place.finish([place.folder / "content"], facts or {})


def _lineage(tmp_path: Path, waves: Any = 2, passes: int = 1) -> Lineage:
    """Four shards in the waves A B, C D; samples and vocabulary are there, states are not."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    extraction = {"waves": waves, "passes": passes}
    path = tiny_recipe(tmp_path, model, prompts={"count": 32}, extraction=extraction)
    lineage = Lineage(load_recipe(str(path), tmp_path), tmp_path / "storage")
    _finish(lineage.target_model(), {"model_fingerprint": "m" * 64})
    finish_prompts(lineage)
    for shard in lineage.recipe.shards:
        _finish(lineage.synthetic_samples(shard))
    plan = [[A, B, C, D]] if waves == 1 else [[A, B], [C, D]]
    _finish(lineage.sample_audit(), {"waves": plan, "passes": passes})
    _finish(lineage.vocabulary_map())
    return lineage


def _extract(lineage: Lineage, *shards: str) -> None:
    for shard in shards:
        _finish(lineage.hidden_state_shards(shard))


def _train(lineage: Lineage) -> Turn:
    """End the next turn, as train_draft does."""
    turn = next_turn(lineage)
    assert turn is not None
    lineage.draft_checkpoint().folder.mkdir(parents=True, exist_ok=True)
    consumed = {shard: lineage.hidden_state_shards(shard).require().digest for shard in turn.shards}
    finish_turn(lineage, turn, f"checkpoint {turn.number}", consumed, {})
    return turn


def test_turns_go_through_the_waves_once_per_pass(tmp_path: Path) -> None:
    found = turns(_lineage(tmp_path, passes=2))
    assert [(one.number, one.pass_, one.wave, one.shards) for one in found] == [
        (0, 0, 0, (A, B)),
        (1, 0, 1, (C, D)),
        (2, 1, 0, (A, B)),
        (3, 1, 1, (C, D)),
    ]
    assert found[1].name == "wave 2 of 2, pass 1 of 2"
    assert [one.is_last for one in found] == [False, False, False, True]


@pytest.mark.parametrize("setting", [1, "auto"])
def test_one_wave_is_one_turn_whose_place_follows_the_states(tmp_path: Path, setting: Any) -> None:
    lineage = _lineage(tmp_path, setting, passes=2)
    _finish_audit_in_one_wave(lineage)
    assert [one.shards for one in turns(lineage)] == [(A, B, C, D)]
    assert next_turn(lineage) == turns(lineage)[0]  # also without states
    assert due(lineage, [A, C]) == [A, C]
    _extract(lineage, A, B, C, D)
    place = lineage.draft_checkpoint()
    assert "waves" not in place.inputs
    _finish(place)
    assert next_turn(lineage) is None


def _finish_audit_in_one_wave(lineage: Lineage) -> None:
    _finish(lineage.sample_audit(), {"waves": [[A, B, C, D]], "passes": 2})


def test_without_an_audit_there_is_no_plan_of_waves(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    (lineage.sample_audit().folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="sample_audit is not made yet"):
        turns(lineage)


def test_the_place_of_the_draft_stays_while_states_come_and_go(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    place = lineage.draft_checkpoint()
    _extract(lineage, A, B)
    _train(lineage)
    assert lineage.draft_checkpoint() == place
    assert place.folder != _lineage(tmp_path, passes=2).draft_checkpoint().folder


def test_shards_of_a_later_wave_are_refused_with_the_range_to_take_instead(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    with pytest.raises(
        RecipeError, match=rf"{C} cannot be extracted yet: wave 1 of 2 .*tiny-{A} to tiny-{B}"
    ):
        due(lineage, [B, C])
    assert due(lineage, [B]) == [B]
    _extract(lineage, C)  # states that are there cost nothing
    assert due(lineage, [A, B, C]) == [A, B, C]


def test_what_this_pass_has_consumed_is_not_due_again(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    _extract(lineage, A, B)
    assert _train(lineage).number == 0
    assert due(lineage, [A, B, C, D]) == [C, D]
    assert consumption(lineage.hidden_state_shards(A).folder) is not None
    _extract(lineage, C, D)
    _train(lineage)
    assert next_turn(lineage) is None
    assert due(lineage, [A, B, C, D]) == []


def test_a_new_pass_forgets_what_the_one_before_it_consumed_wave_by_wave(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path, passes=2)
    _extract(lineage, A, B)
    _train(lineage)
    _extract(lineage, C, D)
    _train(lineage)
    assert due(lineage, [A, B]) == [A, B]
    assert lineage.hidden_state_shards(A).manifest() is None
    assert lineage.hidden_state_shards(C).manifest() is not None
    with pytest.raises(RecipeError, match=f"{C}, {D} cannot be extracted yet: wave 1 of 2, pass 2 of 2"):
        due(lineage, [A, C, D])
    _extract(lineage, A, B)
    assert due(lineage, [A, B]) == [A, B]
    assert lineage.hidden_state_shards(A).manifest() is not None


def test_what_the_turn_before_took_is_done_also_when_the_next_pass_has_begun(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path, passes=2)
    assert finished_turn(lineage, [A, B]) is None
    _extract(lineage, A, B)
    _train(lineage)
    first = finished_turn(lineage, [A, B])
    assert first is not None
    assert first.number == 0
    assert finished_turn(lineage, [B]) == first
    assert finished_turn(lineage, [B, C]) is None
    assert finished_turn(lineage, []) is None
    _extract(lineage, C, D)
    _train(lineage)
    assert due(lineage, [C, D]) == []  # such as a run that is executed again after a kill at its very end
    last = finished_turn(lineage, [C, D])
    assert last is not None
    assert last.number == 1
    assert finished_turn(lineage, [A, B]) is None  # it is theirs again
    assert due(lineage, [A, B]) == [A, B]


def test_states_that_another_training_consumed_are_made_again(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    _extract(lineage, A, B)
    mark_consumed(lineage.hidden_state_shards(A).folder, "another", 0)
    assert due(lineage, [A, B]) == [A, B]
    assert lineage.hidden_state_shards(A).manifest() is None
    assert lineage.hidden_state_shards(B).manifest() is not None


def test_without_waves_consumed_states_are_made_again_unless_the_draft_is_there(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path, 1)
    _extract(lineage, A, B, C, D)
    mark_consumed(lineage.hidden_state_shards(A).folder, "another", 0)
    place = lineage.draft_checkpoint()
    _finish(place)
    assert due(lineage, [A, B]) == [B]
    (place.folder / "manifest.json").unlink()
    assert due(lineage, [A, B]) == [A, B]
    assert lineage.hidden_state_shards(A).manifest() is None


def test_a_deletion_that_a_kill_cut_short_is_finished_before_more_is_extracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _lineage(tmp_path)
    _extract(lineage, A, B)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(waves, "mark_consumed", killed)
        with pytest.raises(KeyboardInterrupt):
            _train(lineage)
    content = lineage.hidden_state_shards(A).folder / "content"
    assert content.exists()
    assert due(lineage, [C]) == [C]
    assert not content.exists()


def test_states_that_were_made_anew_since_are_not_taken_for_the_consumed_ones(tmp_path: Path) -> None:
    lineage = _lineage(tmp_path)
    _extract(lineage, A, B)
    _train(lineage)
    place = lineage.hidden_state_shards(A)
    (place.folder / "consumed.json").unlink()
    (place.folder / "content").write_text("other bytes")
    place.finish([place.folder / "content"], {})
    waves.settle(lineage)
    assert consumption(place.folder) is None


def test_a_record_that_is_none_names_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "turn-0000.json"
    path.write_text("{")
    with pytest.raises(DamagedFile, match="is no record of a turn"):
        waves.read_record(path)
