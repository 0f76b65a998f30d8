"""`eagle3 plan`: what is known, what is expected, and what does not fit."""

import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

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


def finish(place: Place, tokens: int, seconds: float, **facts: Any) -> None:
    place.folder.mkdir(parents=True, exist_ok=True)
    place.finish([], {"tokens": tokens, "seconds": seconds, **facts})


def report(lineage: Lineage, **facts: float) -> Place:
    """Where an earlier report of this recipe lies, made with other settings."""
    place = Place(lineage.folder / "acceptance_report" / "0123456789ab", "acceptance_report", "0" * 16, {})
    place.folder.mkdir(parents=True)
    place.finish([], facts)
    return place


def server_came_up(lineage: Lineage) -> None:
    """The log of an evaluation server that loaded for 22 minutes."""
    lineage.logs.mkdir(parents=True, exist_ok=True)
    line = "(APIServer pid=1) INFO 11-30 10:22:00 [entry.py:140] Starting vLLM server on http://127.0.0.1:1\n"
    (lineage.logs / "evaluation-20261130T100000-abcdef.log").write_text(line)


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


def test_before_anything_is_measured_the_report_has_its_servers_and_replies(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan(recipe, capsys)
    # A set of 8 prompts, on both servers as often as it is repeated, and once at the other batch size; two
    # conversations that judge. Half of 64 and of 128 tokens each.
    replies = 8 * (2 * lineage.recipe.evaluation.repeats + 1) + 2
    assert rows["time of report"] == (
        "not measured yet; 2 server starts (the draft with speculative_tokens 3, the target alone), "
        f"{replies} replies, {(replies - 2) * 32 + 2 * 64:,} tokens"
    )
    assert rows["time of release"] == (
        "not measured yet; 1 server start (the released folder), 8 replies, 256 tokens"
    )


def test_before_the_first_report_its_time_is_at_most_that_at_the_pace_of_generation(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server_came_up(lineage)
    make_samples(lineage, "p8-s000", ["good"] * 8, lengths=[40] * 4 + [100] * 4)
    other = Place(
        lineage.folder / "synthetic_samples" / "0123456789ab" / "s", "synthetic_samples", "0", {}, "s"
    )
    finish(other, 0, 1.0, server_history={"running": [4.0, 4.0], "tokens_per_second": [12.0, 4.0]})
    found = forecast(lineage).report
    assert found.report is not None
    assert found.release is not None
    repeats = lineage.recipe.evaluation.repeats
    # A reply of the report has at most 64 tokens, one that judges is as long as it was.
    assert found.report.tokens == pytest.approx(8 * (2 * repeats + 1) * (40 + 64) / 2 + 2 * 70)
    # Two tokens a second each: one at a time but for the other batch size (4) and the two that judge.
    seconds = (8 * 2 * repeats + 8 / 4) * 52 / 2 + 70 / 2
    assert found.seconds(found.report) == pytest.approx(2 * 22 * 60 + seconds)
    rows = plan(recipe, capsys)
    assert rows["time of report"].startswith("at most ")
    assert "(the draft with speculative_tokens 3, the target alone) of 22 min, " in rows["time of report"]
    assert rows["time of report"].endswith(" at 2 a second each, as in generation, with 4 at a time")


def test_after_a_report_the_next_one_is_expected_at_its_pace(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server_came_up(lineage)
    report(lineage, seconds_per_output_token_with=0.05, seconds_per_output_token_without=0.1)
    said = plan(recipe, capsys)["time of release"]
    # 256 tokens, one reply at a time.
    assert said == (
        "about 22 min: 1 server start (the released folder) of 22 min, 8 replies, 256 tokens at 10 a second "
        "each, as in the last report"
    )


def test_what_is_made_takes_no_more_time(
    lineage: Lineage, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = report(lineage, seconds_per_output_token_with=0.05, seconds_per_output_token_without=0.1)
    monkeypatch.setattr(Lineage, "acceptance_report", lambda _: made)
    rows = plan(recipe, capsys)
    assert rows["time of report"] == "done"
    assert rows["time of release"] != "done"
    monkeypatch.setattr(Lineage, "released_draft", lambda _: made)
    assert plan(recipe, capsys)["time of release"] == "done"
