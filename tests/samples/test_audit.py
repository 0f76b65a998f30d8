import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import DamagedFile, MissingInput, NotEnoughRoom, QualityError, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.settings import StorageBudget
from eagle3_pipeline.samples import Sample, write_samples
from eagle3_pipeline.samples.audit import audit_samples, shards_of_audit
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from eagle3_pipeline.samples.drift import Drift, Retokenizer
from eagle3_pipeline.samples.sample import VERDICTS
from eagle3_pipeline.shards.consumption import mark_consumed
from tests.generation.world import make_lineage
from tests.recipes import NOTHING_ON_ITS_WAY
from tests.samples.tokenizer import make_tokenizer

# One sample in the states: 4 layers x 8 hidden x 2 bytes for each of its 10 tokens.
BYTES_PER_TOKEN = 4 * 8 * 2


def make_samples(
    lineage: Lineage,
    shard: str,
    verdicts: list[str],
    tokens: tuple[int, int] = (4, 6),
    lengths: list[int] | None = None,
) -> None:
    """Samples of `tokens` (prompt, completion) each; `lengths` are completions of their own."""
    lengths = lengths or [tokens[1]] * len(verdicts)
    place = lineage.synthetic_samples(shard)
    samples = [
        Sample(
            sample_id=f"{shard}-{number}-t0",
            prompt_id=f"p{int(shard[-3:]) * len(verdicts) + number}",
            turn=0,
            prompt_token_ids=[1] * tokens[0],
            completion_token_ids=[] if verdict == "refused" else [5] * length,
            finish_reason="stop",
            content="text",
            reasoning="",
            usage={},
            sampling={},
            server="s",
            verdict=verdict,  # type: ignore[arg-type]
        )
        for number, (verdict, length) in enumerate(zip(verdicts, lengths, strict=True))
    ]
    path = place.folder / "samples.parquet"
    write_samples(path, samples)
    counts = {name: verdicts.count(name) for name in VERDICTS}
    totals = {
        "prompt_tokens": tokens[0] * len(samples),
        "completion_tokens": sum(len(one.completion_token_ids) for one in samples),
    }
    place.finish([path], {"samples": len(samples), **counts, **totals})


def make_run(tmp_path: Path, *shards: list[str], **sections: Any) -> Lineage:
    lineage = make_lineage(tmp_path, [1] * 10 * len(shards), 10, **sections)
    for shard, verdicts in zip(lineage.recipe.shards, shards, strict=True):
        make_samples(lineage, shard, verdicts)
    return lineage


def test_good_samples_pass_and_the_audit_has_totals_shards_and_the_byte_plan(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 9 + ["empty"], ["good"] * 8 + ["truncated"] * 2)
    manifest = audit_samples(lineage)
    audit = json.loads((lineage.sample_audit().folder / "audit.json").read_text())
    assert audit["totals"]["good"] == 17
    assert audit["totals"]["truncated_share"] == 0.1
    assert audit["totals"]["rejected_share"] == 0.05
    assert audit["totals"]["degenerate_share"] == 0
    assert audit["shards"]["p10-s000"]["rejected_share"] == 0.1
    expected = {
        "trained_samples": 19,
        "cut_samples": 0,
        "trained_tokens": 190,
        "bytes_per_token": BYTES_PER_TOKEN,
        "bytes_of_states": 190 * BYTES_PER_TOKEN,
        "bytes_by_form": {
            "bf16": 190 * 4 * 16,
            "bf16 trained": (190 * 3 + 19 * 6) * 16,
            "fp8": 190 * 4 * (8 + 4),
            "fp8 trained": (190 * 3 + 19 * 6) * (8 + 4),
        },
        "waves": [["p10-s000", "p10-s001"]],
        "passes": 1,
    }
    assert audit["extraction"] == expected | {"free_bytes": audit["extraction"]["free_bytes"]}
    assert manifest.facts["verdict"] == "passed"
    assert manifest.facts | expected == manifest.facts
    assert audit_samples(lineage) == manifest


def test_every_shard_of_the_run_must_be_there_and_the_missing_ones_are_named(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 30, 10)
    make_samples(lineage, "p10-s001", ["good"] * 10)
    with pytest.raises(MissingInput, match=r"2 of 3 shards .* not made: p10-s000, p10-s002"):
        audit_samples(lineage)


def test_a_pilot_is_audited_on_its_own_shards(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 30, 10, run={"shards": 1})
    make_samples(lineage, "p10-s000", ["good"] * 10)
    assert audit_samples(lineage).facts["shards"] == 1


def test_a_shard_that_was_changed_afterwards_is_found(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 10)
    path = lineage.synthetic_samples("p10-s000").folder / "samples.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DamagedFile, match=r"samples\.parquet"):
        audit_samples(lineage)


def test_too_many_truncated_samples_fail_with_the_numbers_and_the_way_out(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 4 + ["truncated"] * 6)
    with pytest.raises(
        QualityError,
        match=r"60.0% of 10 samples ran .* = 64, generation.max_truncated_share is 50.0% .*: raise",
    ):
        audit_samples(lineage)
    assert lineage.sample_audit().manifest() is None


def test_too_many_rejected_samples_fail_with_their_reasons(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 7 + ["empty", "degenerate", "refused"])
    with pytest.raises(
        QualityError,
        match=r"30.0% of 10 .* \(1 empty, 1 degenerate, 1 refused\), generation.max_rejected_share is 10",
    ):
        audit_samples(lineage)


def test_loops_have_a_bound_of_their_own(tmp_path: Path) -> None:
    bounds = {"max_rejected_share": 1.0, "max_degenerate_share": 0.05}
    lineage = make_run(tmp_path, ["good"] * 9 + ["degenerate"], generation=bounds)
    with pytest.raises(
        QualityError, match=r"10.0% of 10 samples end in a loop, .*max_degenerate_share is 5.0%"
    ):
        audit_samples(lineage)


def test_a_share_just_over_its_bound_fails_and_one_at_it_passes(tmp_path: Path) -> None:
    shards = [["empty"] + ["good"] * 9, ["good"] * 10]
    over = make_run(tmp_path / "over", *shards, generation={"max_rejected_share": 0.04999})
    with pytest.raises(QualityError, match=r"5.0% of 20 samples are rejected"):
        audit_samples(over)
    at = make_run(tmp_path / "at", *shards, generation={"max_rejected_share": 0.05})
    assert audit_samples(at).facts["rejected_share"] == 0.05


def test_a_failure_names_the_three_worst_shards_and_all_that_is_wrong(tmp_path: Path) -> None:
    bounds = {"max_rejected_share": 0.1, "max_truncated_share": 0.1, "completion_lengths": {"p50": [10, 20]}}
    lineage = make_run(
        tmp_path,
        ["good"] * 10,
        ["truncated"] * 4 + ["good"] * 6,
        ["truncated"] * 2 + ["empty"] * 8,
        ["truncated"] + ["good"] * 9,
        generation=bounds,
    )
    with pytest.raises(QualityError) as failure:
        audit_samples(lineage)
    message = str(failure.value)
    assert "17.5% of 40 samples ran into" in message
    assert "(worst: p10-s001 40.0%, p10-s002 20.0%, p10-s003 10.0%)" in message
    assert "20.0% of 40 samples are rejected" in message
    assert "(worst: p10-s002 80.0%)" in message
    assert "the p50 of the completion lengths is 6 tokens" in message


LENGTHS = [*range(1, 10), 100]  # p10 is 1, p50 is 5, p90 is 9


def test_lengths_are_reported_whether_they_have_bounds_or_not(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 20, 10)
    make_samples(lineage, "p10-s000", ["good"] * 10, lengths=LENGTHS)
    make_samples(lineage, "p10-s001", ["good"] * 9 + ["refused"], lengths=[300] * 10)
    facts = audit_samples(lineage).facts
    names = ("completion_p10", "completion_p50", "completion_p90", "completion_mean", "completion_longest")
    assert [facts[name] for name in names] == [2, 100, 300, 149.7, 300]
    assert sum(facts["completion_lengths"]["counts"]) == 19  # the refused one has no length
    audit = json.loads((lineage.sample_audit().folder / "audit.json").read_text())
    assert [audit["shards"]["p10-s000"][name] for name in names] == [1, 5, 9, 14.5, 100]


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        (
            {"p10": [2, 9]},
            "the p10 of the completion lengths is 1 tokens, .*p10 is 2 to 9 .shortest: p10-s000 1",
        ),
        (
            {"p50": [1, 4]},
            "the p50 of the completion lengths is 5 tokens, .*p50 is 1 to 4 .longest: p10-s000 5",
        ),
        ({"p90": [20, 99]}, "the p90 of the completion lengths is 9 tokens, .*shortest"),
        ({"p10": [1, 1], "p50": [5, 5], "p90": [9, 9]}, None),
        ({}, None),
    ],
)
def test_lengths_outside_their_bounds_fail_with_the_percentile_and_the_furthest_shard(
    tmp_path: Path, bounds: dict[str, Any], found: str | None
) -> None:
    lineage = make_lineage(tmp_path, [1] * 10, 10, generation={"completion_lengths": bounds})
    make_samples(lineage, "p10-s000", ["good"] * 10, lengths=LENGTHS)
    if found is None:
        assert audit_samples(lineage).facts["verdict"] == "passed"
        return
    with pytest.raises(QualityError, match=found):
        audit_samples(lineage)


def test_the_drift_is_that_of_the_targets_tokenizer_on_samples_spread_over_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(tmp_path / "model")
    lineage = make_lineage(tmp_path, [1] * 500, 250)
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 250)
    checked: list[list[Sample]] = []
    drift = Retokenizer.drift

    def watched(self: Retokenizer, samples: list[Sample]) -> Drift:
        checked.append(samples)
        return drift(self, samples)

    monkeypatch.setattr(Retokenizer, "drift", watched)
    facts = audit_samples(lineage).facts
    assert [one.sample_id for one in checked[1]] == [f"p250-s001-{number}-t0" for number in range(0, 250, 3)]
    assert (facts["drift_samples"], facts["drift_share"]) == (168, 0)
    shard = shards_of_audit(lineage)["p250-s000"]
    assert (shard["drift_samples"], shard["drift_share"]) == (84, 0)


def test_without_a_tokenizer_no_drift_is_reported(tmp_path: Path) -> None:
    assert not [name for name in audit_samples(make_run(tmp_path, ["good"] * 10)).facts if "drift" in name]


def test_a_run_without_any_sample_to_train_on_fails(tmp_path: Path) -> None:
    bounds = {"max_truncated_share": 1.0, "train_truncated": False}
    lineage = make_run(tmp_path, ["truncated"] * 10, generation=bounds)
    with pytest.raises(QualityError, match="none of 10 samples can be trained on"):
        audit_samples(lineage)


def test_verdicts_of_greedy_replies_of_judges_are_counted_apart_and_have_no_bounds(tmp_path: Path) -> None:
    judges = ["degenerate"] * 3 + ["truncated", "good"]
    lineage = make_run(tmp_path, judges + ["good"] * 5, ["good"] * 9 + ["empty"], judges=5)
    facts = audit_samples(lineage).facts
    assert (facts["samples"], facts["good"], facts["empty"], facts["degenerate_share"]) == (15, 14, 1, 0)
    assert facts["completion_tokens"] == 15 * 6
    expected = {"samples": 5, "good": 1, "truncated": 1, "empty": 0, "degenerate": 3, "refused": 0}
    assert facts["judges"] == expected
    audit = json.loads((lineage.sample_audit().folder / "audit.json").read_text())
    assert audit["judges"] == expected
    assert audit["shards"]["p10-s000"]["samples"] == 5


def test_bounds_are_not_diluted_by_the_judges(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 5 + ["good"] * 4 + ["empty"], judges=5)
    with pytest.raises(QualityError, match=r"20.0% of 5 samples are rejected"):
        audit_samples(lineage)


@pytest.mark.parametrize(
    ("judges", "found"),
    [
        (["degenerate"] * 4 + ["truncated"], "4 degenerate|1 truncated"),
        (["truncated"] * 5, "5 truncated"),
    ],
)
def test_a_run_without_any_sample_that_judges_fails_with_their_verdicts(
    tmp_path: Path, judges: list[str], found: str
) -> None:
    lineage = make_run(
        tmp_path, judges + ["good"] * 5, judges=5, generation={"train_truncated": False, "temperature": 0.7}
    )
    with pytest.raises(QualityError, match=r"none of 5 replies to validation prompts can judge") as failure:
        audit_samples(lineage)
    said = str(failure.value)
    assert all(part in said for part in found.split("|"))
    assert "generation.train_truncated is False): a model that loops when it is greedy" in said
    assert lineage.sample_audit().manifest() is None


def test_replies_of_judges_that_are_cut_away_judge_nothing_and_the_message_counts_them(
    tmp_path: Path,
) -> None:
    lineage = make_lineage(
        tmp_path, [1] * 20, 10, judges=5, extraction={"layers": [1, 2, 3, 4], "max_sample_tokens": 8}
    )
    make_samples(lineage, "p10-s000", ["good"] * 10, tokens=(7, 6))
    make_samples(lineage, "p10-s001", ["good"] * 10)
    with pytest.raises(
        QualityError, match=r"\(5 good, 5 of them with less than two tokens of the reply in the first 8"
    ):
        audit_samples(lineage)


def test_a_run_of_which_all_prompts_judge_has_nothing_to_train_on(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1], 1, judges=1)
    make_samples(lineage, "p1-s000", ["good"])
    with pytest.raises(QualityError, match="none of 0 samples can be trained on"):
        audit_samples(lineage)


def test_where_the_first_shard_only_judges_the_first_wave_has_the_next_one_too(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": 3, **NOTHING_ON_ITS_WAY}
    lineage = make_lineage(tmp_path, [1] * 3, 1, judges=1, extraction=extraction)
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"])
    assert audit_samples(lineage).facts["waves"] == [["p1-s000", "p1-s001"], ["p1-s002"]]


def test_samples_are_counted_as_the_extraction_cuts_them(tmp_path: Path) -> None:
    lineage = make_lineage(
        tmp_path, [1] * 20, 10, extraction={"layers": [1, 2, 3, 4], "max_sample_tokens": 8}
    )
    make_samples(lineage, "p10-s000", ["good"] * 10)
    make_samples(lineage, "p10-s001", ["good"] * 10, tokens=(8, 2))  # nothing of the reply would be left
    facts = audit_samples(lineage).facts
    assert (facts["trained_samples"], facts["cut_samples"], facts["trained_tokens"]) == (10, 20, 80)


def budget(lineage: Lineage, bytes_left: int) -> Lineage:
    """The same recipe with a budget that leaves so many bytes for states."""
    used = sum(path.stat().st_size for path in lineage.folder.rglob("*") if path.is_file())
    wanted = used + checkpoint_bytes(lineage) + bytes_left
    storage = StorageBudget.model_validate({"max_gib": wanted / 2**30})
    return Lineage(lineage.recipe.model_copy(update={"storage": storage}), lineage.storage_root)


def test_states_over_the_budget_are_refused_with_choices_that_fit(tmp_path: Path) -> None:
    # 200 tokens take 12,800 bytes.
    lineage = make_run(tmp_path, ["good"] * 10, ["good"] * 10)
    with pytest.raises(NotEnoughRoom, match="200 tokens") as refusal:
        audit_samples(budget(lineage, 10_000))
    said = str(refusal.value)
    assert "run.shards: 1 of 2; extraction.max_sample_tokens: 7 (is 4096)" in said
    assert "extraction.precision: fp8 (0.00 GiB in all)" in said
    assert "extraction.waves: auto (2 waves" in said
    assert "raise storage.max_gib" in said


def test_in_waves_a_set_passes_that_does_not_fit_at_once_and_the_plan_names_each_shard(
    tmp_path: Path,
) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": "auto", "passes": 3, **NOTHING_ON_ITS_WAY}
    lineage = make_run(tmp_path, *[["good"] * 10] * 5, extraction=extraction, judges=5)
    facts = audit_samples(budget(lineage, 3 * 6400)).facts  # two shards, and half of one that judges
    waves = [["p10-s000", "p10-s001"], ["p10-s002", "p10-s003"], ["p10-s004"]]
    assert (facts["waves"], facts["passes"]) == (waves, 3)


def test_alternatives_to_compare_want_room_for_all_states_at_once(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": "auto", **NOTHING_ON_ITS_WAY}
    training = {"sweep": {"low": {"learning_rate": 1e-4}, "high": {}}}
    lineage = make_run(tmp_path, *[["good"] * 10] * 5, extraction=extraction, training=training, judges=5)
    target = lineage.target_model()
    target.finish([], {**target.require().facts, "vocab_size": 100})
    with pytest.raises(RecipeError, match=r"compares 2 trainings on the same states.* made in 3 waves"):
        audit_samples(budget(lineage, 3 * 6400))
    assert audit_samples(lineage).facts["waves"] == [list(lineage.recipe.shards)]


def test_an_early_end_wants_room_for_all_states_at_once(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": "auto", **NOTHING_ON_ITS_WAY}
    training = {"patience": 1}
    lineage = make_run(tmp_path, *[["good"] * 10] * 5, extraction=extraction, training=training, judges=5)
    with pytest.raises(RecipeError, match=r"training.patience is 1, but states are made in 3 waves"):
        audit_samples(budget(lineage, 3 * 6400))
    assert audit_samples(lineage).facts["waves"] == [list(lineage.recipe.shards)]


def test_a_set_that_fits_at_once_is_gone_through_once(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": "auto", "passes": 3, **NOTHING_ON_ITS_WAY}
    lineage = make_run(tmp_path, *[["good"] * 10] * 2, extraction=extraction)
    facts = audit_samples(lineage).facts
    assert (facts["waves"], facts["passes"]) == ([["p10-s000", "p10-s001"]], 1)


def test_states_that_are_there_already_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = make_run(tmp_path, ["good"] * 10, ["good"] * 10)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free=2**30 + 100 * BYTES_PER_TOKEN))
    with pytest.raises(NotEnoughRoom, match=r"are free on the disk .*storage\.keep_free_gib keeps 1 GiB"):
        audit_samples(lineage)
    states = lineage.hidden_state_shards("p10-s000")
    states.folder.mkdir(parents=True)
    states.finish([], {})
    assert audit_samples(lineage).facts["trained_tokens"] == 200


def test_states_that_a_training_consumed_are_planned_to_be_made_again(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 10, ["good"] * 10)
    states = lineage.hidden_state_shards("p10-s000")
    states.folder.mkdir(parents=True)
    states.finish([], {})
    mark_consumed(states.folder, by="checkpoint", turn=0)
    with pytest.raises(NotEnoughRoom):
        audit_samples(budget(lineage, 100 * BYTES_PER_TOKEN))
