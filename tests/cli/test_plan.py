"""`eagle3 plan`: what is known, what is expected, and what does not fit."""

import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from eagle3_pipeline.cli import main
from eagle3_pipeline.cli.checkout import lineage_of
from eagle3_pipeline.forecast import forecast
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.target import make_target
from tests.recipes import NOTHING_ON_ITS_WAY, finish_prompts, tiny_recipe
from tests.samples.test_audit import make_samples

HIDDEN = 64
TOKEN = 4 * HIDDEN * 2


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path) -> Path:
    return tiny_recipe(tmp_path, tiny_llama, extraction={"waves": "auto", "passes": 2, **NOTHING_ON_ITS_WAY})


@pytest.fixture
def lineage(recipe: Path) -> Lineage:
    """Three shards of eight prompts: target and prompts are made."""
    made = lineage_of(str(recipe))
    make_target(made)
    finish_prompts(made)
    return made


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many bytes may be written."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=count + 2**30))


def plan(recipe: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The rows that are printed, by their names."""
    assert main(["plan", "--recipe", str(recipe)]) == 0
    rows = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    return dict(rows)


def finish(place: Place, tokens: int, seconds: float, **facts: int) -> None:
    place.folder.mkdir(parents=True, exist_ok=True)
    place.finish([], {"tokens": tokens, "seconds": seconds, **facts})


def test_before_the_target_is_made_it_says_what_to_make(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--recipe", str(recipe)]) == 2
    assert "target_model is not made yet" in capsys.readouterr().err


def test_without_samples_tokens_are_guessed_and_nothing_is_measured(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan(recipe, capsys)
    assert rows["samples"] == "0 of 3 shards are made"
    assert rows["tokens"].startswith(f"{3 * 8 * 64:,} to extract (guessed: no samples yet")
    assert rows["time of generation"] == f"not measured yet; {3 * 8 * 64:,} tokens are left"
    assert rows["time of extraction"].startswith("not measured yet")
    assert rows["waves"] == "1: all states at once"
    assert rows["this recipe"] == "bf16, kept: all; fits"


def test_with_some_samples_the_others_are_expected_to_be_like_them(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_samples(lineage, "p8-s000", ["good"] * 7 + ["empty"], tokens=(4, 6))
    rows = plan(recipe, capsys)
    assert rows["tokens"] == "210 to extract (estimated from the 1 of 3 shards made)"
    assert "; 84 tokens are left" in rows["time of generation"]


def test_with_all_samples_tokens_are_counted_and_each_form_has_its_bytes(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 8)
    found = forecast(lineage)
    assert found.source == "counted in all samples"
    assert found.fit.plan.forms()["bf16"] == 240 * TOKEN
    monkeypatch.setattr("eagle3_pipeline.samples.state_room.gib", lambda count: f"{count} B")
    rows = plan(recipe, capsys)
    assert rows["states, bf16"] == f"{240 * TOKEN} B"
    assert rows["states, bf16 trained"] == f"{(240 * 3 + 144) * HIDDEN * 2} B"
    assert rows["states, fp8"] == f"{240 * 4 * (HIDDEN + 4)} B"
    assert rows["time of generation"] == "done"


def test_waves_are_shown_with_the_hours_of_extracting_again(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 8)
    free(monkeypatch, 80 * TOKEN + 24 * TOKEN)
    rows = plan(recipe, capsys)
    assert rows["waves"] == "3 (as it looks now; sample_audit decides), of 1 + 1 + 1 shards"
    assert rows["passes"] == "2"
    assert rows["time of extraction"] == "not measured yet; 480 tokens are left"
    assert rows["of this, again"].startswith(
        "not measured yet; 240 tokens are left: each pass after the first"
    )
    audit_samples(lineage)
    free(monkeypatch, 1 << 40)
    rows = plan(recipe, capsys)
    assert rows["waves"] == "3 (decided by sample_audit), of 1 + 1 + 1 shards"


def test_what_does_not_fit_is_said_with_the_choices(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 8)
    free(monkeypatch, 70 * TOKEN)
    rows = plan(recipe, capsys)
    assert rows["this recipe"].startswith("bf16, kept: all; does not fit. Choices: extraction.precision: fp8")


def test_speeds_are_those_that_were_measured_whatever_the_settings_and_side_by_side(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 8)
    # Two shards that were completed in the same 1,000 seconds; most of their tokens were there before.
    for shard in lineage.recipe.shards[:2]:
        finish(lineage.hidden_state_shards(shard), 900_000, 1000.0, captured_tokens=50_000)
    # One of an earlier version, which does not say what was captured.
    old = Place(
        lineage.folder / "hidden_state_shards" / "0123456789ab" / "s", "hidden_state_shards", "0" * 16, {}
    )
    finish(old, 900_000, 1.0)
    other = lineage.folder / "draft_checkpoint" / "0123456789ab"
    finish(Place(other, "draft_checkpoint", "0123456789abcdef", {}), 80, 0.1)
    phases = {phase.name: phase for phase in forecast(lineage).phases}
    assert phases["extraction"].tokens_per_second == pytest.approx(100, rel=0.01)
    assert phases["training"].tokens_per_second == pytest.approx(800)
    assert phases["generation"].tokens_per_second is None
    rows = plan(recipe, capsys)
    assert rows["time of extraction"] == "1 s: 80 tokens are left, 100 a second so far"
    assert rows["time of training"].endswith("480 tokens are left, 800 a second so far")


def test_once_the_waves_are_decided_only_the_one_to_come_is_judged(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 8)
    free(monkeypatch, 80 * TOKEN + 24 * TOKEN)
    audit_samples(lineage)
    free(monkeypatch, 0)
    said = plan(recipe, capsys)["this recipe"]
    assert "does not fit. The hidden states of p8-s000 still take" in said
    vocabulary = lineage.vocabulary_map()
    vocabulary.folder.mkdir(parents=True)
    vocabulary.finish([], {})
    # The present wave is on the disk, with the validation samples: the two to come get its room.
    finish(lineage.hidden_state_shards("p8-s000"), 80, 1.0, captured_tokens=80)
    copy = lineage.draft_checkpoint().folder / "validation" / "part-00000.safetensors"
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert plan(recipe, capsys)["this recipe"] == "bf16, kept: all; fits"
