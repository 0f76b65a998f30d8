"""What fits, and that every choice offered really does."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.samples import fitting
from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from eagle3_pipeline.samples.fitting import Fit, require_room
from eagle3_pipeline.samples.state_room import StateRoom, state_room
from eagle3_pipeline.shards.format import ShardLayout
from tests.generation.world import make_lineage

GIB = 2**30
# 10 shards of 1,000 samples, 200 prompt and 800 completion tokens each: 10 million tokens of 4 x 4096. Half
# of the first shard judges: 15 GiB.
PLAN = BytePlan(
    [
        ShardLengths(f"s{number}", [(200, 1000)] * 1000, is_extracted=False, judging=0 if number else 500)
        for number in range(10)
    ],
    longest=4096,
    layout=ShardLayout((1, 2, 3, 4), 4096, "m"),
)


def fit_of(gib: float, waves: int | str = 1, plan: BytePlan = PLAN) -> Fit:
    return Fit(plan, waves, StateRoom(int(gib * GIB), f"{gib} GiB are free"))


def test_each_form_has_its_bytes() -> None:
    tokens, completion = 10_000_000, 8_000_000
    rows = {"all": tokens * 4, "trained": tokens * 3 + completion}
    assert PLAN.forms() == {
        "bf16": rows["all"] * 8192,
        "bf16 trained": rows["trained"] * 8192,
        "fp8": rows["all"] * 4100,
        "fp8 trained": rows["trained"] * 4100,
    }


def test_what_fits_is_not_refused() -> None:
    assert require_room(fit_of(306)).waves == [[f"s{number}" for number in range(10)]]


def test_states_on_their_way_take_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = StateRoom(100 * GIB, "100 GiB are free")
    monkeypatch.setattr(fitting, "state_room", lambda lineage: room)
    lineage = make_lineage(tmp_path, [1], 1, extraction={"layers": [1, 2, 3, 4], "staging_gib": 30})
    found = Fit.of(lineage, PLAN).room
    assert found.bytes == 70 * GIB
    assert found.why == "100 GiB are free, and 30 GiB are for states on their way (extraction.staging_gib)"
    small = replace(PLAN, shards=PLAN.shards[:1], longest=201)
    assert Fit.of(lineage, small).room.bytes == 100 * GIB - small.bytes


def test_what_does_not_fit_is_refused_with_the_choices_that_would_and_no_others() -> None:
    with pytest.raises(NotEnoughRoom) as refusal:
        require_room(fit_of(200))
    said = str(refusal.value)
    assert said.startswith(
        "the hidden states of 10000000 tokens (bf16) still take 305 GiB, but 200 GiB are free. Choices: "
    )
    assert "Choices: extraction.precision" in said  # with kept: trained alone it would be 290 GiB
    for choice in (
        "extraction.precision: fp8 (153 GiB in all)",
        "extraction.precision: fp8 with extraction.kept: trained (145 GiB in all)",
        "extraction.waves: auto (2 waves",
        "run.shards: 6 of 10",
        "extraction.max_sample_tokens: 655 (is 4096)",
        "2 extraction.layers (are 4)",
        "free space or point EAGLE3_STORAGE to a larger disk",
    ):
        assert choice in said
    two, three = (replace(PLAN, layout=replace(PLAN.layout, layer_ids=(1, 2, 3)[:n])) for n in (2, 3))
    first = (replace(PLAN, shards=PLAN.shards[:6]), replace(PLAN, longest=655))
    for plan in (PLAN.in_form("fp8", "all"), *first, two):
        require_room(fit_of(200, plan=plan))
    for plan in (replace(PLAN, shards=PLAN.shards[:7]), replace(PLAN, longest=656), three):
        with pytest.raises(NotEnoughRoom):
            require_room(fit_of(200, plan=plan))


def test_waves_that_are_too_large_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(NotEnoughRoom, match=r"in 2 waves, the largest .* 168 GiB.* auto \(4 waves"):
        require_room(fit_of(120, waves=2))


def test_where_not_even_one_shard_fits_more_waves_are_no_choice() -> None:
    with pytest.raises(NotEnoughRoom, match=r"in 10 waves, the largest .* 46 GiB") as refusal:
        require_room(fit_of(40, waves="auto"))
    assert "extraction.waves" not in str(refusal.value)
    assert "extraction.precision: fp8" in str(refusal.value)


def test_a_disk_without_any_room_leaves_a_larger_disk_as_the_only_choice() -> None:
    with pytest.raises(NotEnoughRoom, match="Choices: free space or point EAGLE3_STORAGE"):
        require_room(fit_of(-1))


def test_a_cut_that_leaves_less_than_half_of_the_samples_is_no_choice() -> None:
    lengths = [(2000, 3000)] * 600 + [(10, 500)] * 400
    plan = replace(PLAN, shards=[ShardLengths("s0", lengths, is_extracted=False)])
    fits_at_500 = fit_of(7, plan=plan)
    assert replace(fits_at_500, plan=replace(plan, longest=500)).fits
    assert not any("max_sample_tokens" in choice for choice in fits_at_500.choices())
    assert any("max_sample_tokens" in choice for choice in fit_of(60, plan=plan).choices())


# As PLAN, but the states come with the replies.
CAPTURED = replace(PLAN, while_generating=True)
SHARD = PLAN.sizes[0]


def test_files_that_wait_for_their_shards_and_the_largest_shard_must_fit_together() -> None:
    assert CAPTURED.at_once == 11 * SHARD
    assert CAPTURED.in_form("fp8", "all").at_once == 10 * SHARD + 10**6 * 4 * 4100  # files stay bfloat16
    assert replace(CAPTURED, longest=500).at_once == 10 * SHARD + SHARD // 2  # and whole


def test_files_that_are_there_already_ask_for_one_more_shard_only() -> None:
    there = replace(CAPTURED, shards=[replace(one, captured=SHARD) for one in CAPTURED.shards])
    assert there.at_once == SHARD
    made = replace(there, shards=[replace(one, is_extracted=True) for one in there.shards])
    assert made.at_once == 0


def test_where_states_come_with_the_replies_waves_are_no_choice_and_a_second_server_is_one() -> None:
    said = "; ".join(fit_of(310, plan=CAPTURED).choices())
    assert "waves" not in said
    assert "extraction.while_generating: false" in said
    assert "while_generating" not in "; ".join(fit_of(200, plan=CAPTURED).choices())


def test_the_layers_of_a_base_draft_are_no_choice() -> None:
    free = fit_of(200)
    assert any("extraction.layers" in choice for choice in free.choices())
    fixed = replace(free, layers_are_fixed=True)
    assert not any("extraction.layers" in choice for choice in fixed.choices())


def test_a_disk_that_is_too_full_for_all_else_does_for_states_that_are_there() -> None:
    made = [replace(one, is_extracted=True) for one in PLAN.shards]
    require_room(fit_of(-1, plan=replace(PLAN, shards=made)))


def test_checkpoints_of_the_draft_have_room_of_their_own_and_what_is_there_of_them_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=100 * GIB))
    lineage = make_lineage(
        tmp_path, [1], 1, extraction={"layers": [2, 18, 33, 36]}, vocabulary={"draft_tokens": 32000}
    )
    (lineage.target_model().folder / "manifest.json").unlink()
    # Qwen3-8B: a draft of 400 million trained numbers.
    lineage.target_model().finish([], {"model_fingerprint": "q", "hidden_size": 4096})
    checkpoints = 4 * 12 * (16 * 4096**2 + 32000 * 4096)
    assert checkpoint_bytes(lineage) == checkpoints == pytest.approx(18e9, rel=0.1)
    found = state_room(lineage)
    assert found.bytes == 100 * GIB - checkpoints
    assert "of which about 18 GiB are for checkpoints of the draft" in found.why
    place = Place(lineage.folder / "draft_checkpoint" / "f", "draft_checkpoint", "f", {})
    monkeypatch.setattr(Lineage, "draft_checkpoint", lambda self: place)
    (place.folder / "checkpoints").mkdir(parents=True)
    (place.folder / "checkpoints" / "weights.safetensors").write_bytes(bytes(1000))
    assert checkpoint_bytes(lineage) == checkpoints - 1000
    place.finish([], {})
    assert state_room(lineage).bytes == 99 * GIB
