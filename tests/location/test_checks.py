"""The checks of the assets: what warns, what is an error, and that each is evaluated by its own step."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import checks, sample_audit
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import Recipe, load_recipe
from resources import Storage, VllmServers
from tests.location.conftest import ROOT
from tests.samples.test_audit import make_run

RECIPE: Recipe = load_recipe("smollm2-cpu", ROOT / "recipes")
KIMI: Recipe = load_recipe("kimi-k2.5-8gpu", ROOT / "recipes")
WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


def _made(asset: str, shard: str | None = None, **facts: Any) -> Manifest:
    return Manifest(asset, "f" * 64, (), facts=facts, shard=shard)


def _samples(shard: str, **verdicts: int) -> Manifest:
    counts = dict.fromkeys(("good", "truncated", "empty", "degenerate", "refused"), 0) | verdicts
    return _made("synthetic_samples", shard, samples=sum(counts.values()), **counts)


def _states(shard: str, samples: int, agreed: float = 0.7, **quarantined: int) -> Manifest:
    seen = {"states": 128, "agreed_share": agreed, "expected_share": 0.71, "bound": 0.12}
    facts = {"samples": samples, "quarantined": quarantined, "meaning": {"sampled": seen}}
    return _made("hidden_state_shards", shard, **facts)


def _by_name(results: list[dg.AssetCheckResult]) -> dict[str | None, dg.AssetCheckResult]:
    assert {one.severity for one in results} == {WARN}
    return {one.check_name: one for one in results}


@pytest.mark.parametrize("recipe", [RECIPE, KIMI], ids=["without a base draft", "with one"])
def test_every_judgement_has_a_description_and_stops_nothing(recipe: Recipe, load: Any) -> None:
    graph = load(recipe.name).resolve_asset_graph()
    found = {}
    for key in graph.asset_check_keys:
        spec = graph.get_check_spec(key)
        assert spec.description
        assert not spec.blocking
        found.setdefault(key.asset_key.path[-1], set()).add(key.name)
    assert found == {
        "synthetic_samples": {"truncated_share", "rejected_share", "degenerate_share"},
        "sample_audit": {"quality"},
        "hidden_state_shards": {"quarantined_share", "meaning"},
        "vocabulary_map": {"coverage"},
        "draft_checkpoint": {"above_chance"} | ({"above_base"} if recipe.base_draft else set()),
        "acceptance_report": {"faster", "simulation_agrees"},
    }


# --- samples


def test_samples_within_the_bounds_pass_with_their_shares() -> None:
    found = _by_name(checks.check_samples(RECIPE, [_samples("s0", good=9, truncated=1)]))
    assert all(one.passed for one in found.values())
    shown = found["truncated_share"].metadata
    assert shown["share"] == dg.MetadataValue.float(0.1)
    assert shown["allowed"] == dg.MetadataValue.float(RECIPE.generation.max_truncated_share)


def test_too_many_cut_replies_warn_with_the_worst_shard_and_the_way_out() -> None:
    made = [_samples("s0", good=10), _samples("s1", truncated=90)]
    found = _by_name(checks.check_samples(RECIPE, made))
    assert not found["truncated_share"].passed
    assert found["rejected_share"].passed
    text = found["truncated_share"].description or ""
    assert text.startswith("90.0% of 100 replies are truncated, generation.max_truncated_share is ")
    assert "Worst: s1 90. If the other shards are no better, sample_audit fails: raise " in text


def test_rejected_replies_are_loops_and_empty_and_refused_ones() -> None:
    found = _by_name(checks.check_samples(RECIPE, [_samples("s0", good=1, empty=1, degenerate=1, refused=1)]))
    assert found["rejected_share"].metadata["share"] == dg.MetadataValue.float(0.75)
    assert found["degenerate_share"].metadata["share"] == dg.MetadataValue.float(0.25)


def _audited(lineage: Any) -> tuple[bool, dg.AssetCheckEvaluation]:
    """Whether the step went well, and its check as the instance has it, which is what the UI shows."""
    resources = {"storage": Storage(root=str(lineage.storage_root)), "servers": VllmServers()}
    with dg.DagsterInstance.ephemeral() as instance:
        asset = sample_audit.build(lineage.recipe)
        result = dg.materialize([asset], resources=resources, instance=instance, raise_on_error=False)
        (logged,) = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    return result.success, logged.get_dagster_event().asset_check_evaluation_data


def test_an_audit_that_passes_says_so_and_one_that_fails_is_an_error_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmServers, "release_generation", lambda *_: [])
    success, check = _audited(make_run(tmp_path / "good", ["good"] * 10))
    assert (success, check.check_name, check.passed) == (True, "quality", True)
    success, check = _audited(make_run(tmp_path / "bad", ["good"] * 5 + ["empty"] * 5))
    assert (success, check.check_name, check.passed) == (False, "quality", False)
    assert check.severity == ERROR
    assert "50.0% of 10 samples are rejected" in (check.description or "")


# --- states, vocabulary, draft


def test_states_that_are_all_there_and_mean_what_was_recorded_pass() -> None:
    found = _by_name(checks.check_states(RECIPE, [_states("s0", 100), _states("s1", 100)]))
    assert all(one.passed for one in found.values())
    assert found["quarantined_share"].metadata["share"] == dg.MetadataValue.float(0.0)


def test_quarantined_samples_warn_from_half_of_what_fails_the_step() -> None:
    found = _by_name(checks.check_states(RECIPE, [_states("s0", 99, not_finite=1), _states("s1", 100)]))
    assert found["quarantined_share"].passed  # a half of 1 % of 200
    found = _by_name(checks.check_states(RECIPE, [_states("s0", 99, not_finite=1)]))
    assert not found["quarantined_share"].passed
    assert "of 1 of 100 samples are unusable, 1.0% fail the step. Worst: s0 1." in (
        found["quarantined_share"].description or ""
    )


def test_a_shard_that_was_let_through_by_its_other_states_is_named() -> None:
    found = _by_name(checks.check_states(RECIPE, [_states("s0", 100), _states("s1", 100, agreed=0.5)]))
    assert not found["meaning"].passed
    assert (found["meaning"].description or "").startswith(
        "s1: the recorded token is the likeliest one after 50.0% of the states of sampled replies, expected "
        "71.0% within 12.0%"
    )


@pytest.mark.parametrize(
    ("facts", "passed", "words"),
    [
        ({"coverage": 0.99}, True, "99.00% of the replies"),
        ({"coverage": 0.99, "held_out_coverage": 0.9}, False, "90.00% of held-out replies"),
        ({"coverage": 0.9}, False, "Raise vocabulary.draft_tokens"),
        ({"coverage": 0.9, "from_base_draft": True}, False, "take another one, or none"),
    ],
    ids=["covered", "held out", "few tokens", "of a base draft"],
)
def test_a_vocabulary_warns_where_it_leaves_out_too_much(
    facts: dict[str, Any], passed: bool, words: str
) -> None:
    made = _made("vocabulary_map", **{"draft_tokens": 4096, "from_base_draft": False, **facts})
    result = checks.check_vocabulary(made)
    assert (result.passed, result.severity) == (passed, WARN)
    assert words in (result.description or "")


JUDGED = {
    "accuracy_by_position": [0.4, 0.3],
    "chance": 0.06,
    "best_step": 8,
    "simulated_acceptance_length": 1.6,
}


def test_a_draft_that_learned_something_passes() -> None:
    (result,) = checks.check_draft(RECIPE, JUDGED)
    assert result.passed
    assert "right for 40.0% of the held-out tokens; always the most frequent one would be for 6.0%" in (
        result.description or ""
    )
    assert all(one.passed for one in checks.check_draft(KIMI, JUDGED))


def test_a_draft_at_chance_or_no_better_than_its_base_warns() -> None:
    found = _by_name(checks.check_draft(KIMI, {**JUDGED, "chance": 0.4, "best_step": 0}))
    assert not found["above_chance"].passed
    assert not found["above_base"].passed
    assert "(1.600), which is what is kept. Lower training.learning_rate" in (
        found["above_base"].description or ""
    )


def test_a_draft_of_which_no_chance_is_noted_is_not_judged() -> None:
    found = _by_name(checks.check_draft(KIMI, {"steps": 3}))
    assert set(found) == {"above_chance", "above_base"}
    assert all(one.passed and "nothing is compared" in (one.description or "") for one in found.values())
