"""What fits, and that every choice offered really does."""

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.samples import fitting
from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths
from eagle3_pipeline.samples.fitting import Fit, require_room
from eagle3_pipeline.samples.state_room import StateRoom
from eagle3_pipeline.shards.format import ShardLayout
from tests.generation.world import make_lineage

GIB = 2**30
# 10 shards of 1,000 samples, 200 prompt and 800 completion tokens each: 10 million tokens of 4 x 4096.
PLAN = BytePlan(
    [ShardLengths(f"s{number}", [(200, 1000)] * 1000, is_extracted=False) for number in range(10)],
    longest=4096,
    layout=ShardLayout((1, 2, 3, 4), 4096, "m"),
)


def fit_of(gib: float, waves: int | str = 1, plan: BytePlan = PLAN) -> Fit:
    return Fit(plan, waves, 0.05, StateRoom(int(gib * GIB), f"{gib} GiB are free"))


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
