import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import DamagedFile, MissingInput, NotEnoughRoom, QualityError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.settings import StorageBudget
from eagle3_pipeline.samples import Sample, write_samples
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.samples.sample import VERDICTS
from tests.generation.world import make_lineage

# One sample in the states: 4 layers x 8 hidden x 2 bytes for each of its 10 tokens.
BYTES_PER_TOKEN = 4 * 8 * 2


def make_samples(lineage: Lineage, shard: str, verdicts: list[str], tokens: tuple[int, int] = (4, 6)) -> None:
    place = lineage.synthetic_samples(shard)
    samples = [
        Sample(
            sample_id=f"{shard}-{number}-t0",
            prompt_id=f"{shard}-{number}",
            turn=0,
            prompt_token_ids=[1] * tokens[0],
            completion_token_ids=[5] * tokens[1],
            finish_reason="stop",
            content="text",
            reasoning="",
            usage={},
            sampling={},
            server="s",
            verdict=verdict,  # type: ignore[arg-type]
        )
        for number, verdict in enumerate(verdicts)
    ]
    path = place.folder / "samples.parquet"
    write_samples(path, samples)
    counts = {name: verdicts.count(name) for name in VERDICTS}
    lengths = {
        "prompt_tokens": tokens[0] * len(samples),
        "completion_tokens": tokens[1] * len(samples),
    }
    place.finish([path], {"samples": len(samples), **counts, **lengths})


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
    assert audit["shares"] == {"truncated_share": 0.1, "rejected_share": 0.05}
    assert audit["shards"]["p10-s000"]["rejected_share"] == 0.1
    expected = {
        "trained_samples": 19,
        "cut_samples": 0,
        "trained_tokens": 190,
        "bytes_per_token": BYTES_PER_TOKEN,
        "bytes_of_states": 190 * BYTES_PER_TOKEN,
    }
    assert audit["extraction"] == expected
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
        QualityError, match=r"6 of 10 samples \(60.0%\) .* 64, allowed are 50.0%: raise generation"
    ):
        audit_samples(lineage)
    assert lineage.sample_audit().manifest() is None


def test_too_many_rejected_samples_fail_with_their_reasons(tmp_path: Path) -> None:
    lineage = make_run(tmp_path, ["good"] * 7 + ["empty", "degenerate", "refused"])
    with pytest.raises(
        QualityError, match=r"30.0% of 10 .* \(1 empty, 1 degenerate, 1 refused\), allowed are 10"
    ):
        audit_samples(lineage)


def test_a_run_without_any_sample_to_train_on_fails(tmp_path: Path) -> None:
    bounds = {"max_truncated_share": 1.0, "train_truncated": False}
    lineage = make_run(tmp_path, ["truncated"] * 10, generation=bounds)
    with pytest.raises(QualityError, match="none of 10 samples can be trained on"):
        audit_samples(lineage)


def test_samples_are_counted_as_the_extraction_cuts_them(tmp_path: Path) -> None:
    lineage = make_lineage(
        tmp_path, [1] * 20, 10, extraction={"layers": [1, 2, 3, 4], "max_sample_tokens": 8}
    )
    make_samples(lineage, "p10-s000", ["good"] * 10)
    make_samples(lineage, "p10-s001", ["good"] * 10, tokens=(8, 2))  # nothing of the reply would be left
    facts = audit_samples(lineage).facts
    assert (facts["trained_samples"], facts["cut_samples"], facts["trained_tokens"]) == (10, 20, 80)


def test_states_over_the_budget_are_refused_with_choices_that_fit(tmp_path: Path) -> None:
    # 200 tokens take 12,800 bytes.
    lineage = make_run(tmp_path, ["good"] * 10, ["good"] * 10)
    used = sum(path.stat().st_size for path in lineage.folder.rglob("*") if path.is_file())
    budget = {"max_gib": (used + 10_000) / 2**30}
    recipe = lineage.recipe.model_copy(update={"storage": StorageBudget.model_validate(budget)})
    tight = Lineage(recipe, lineage.storage_root)
    with pytest.raises(NotEnoughRoom, match="200 tokens") as refusal:
        audit_samples(tight)
    assert "run.shards: 1 of 2; extraction.max_sample_tokens: 7 (is 4096)" in str(refusal.value)
    assert "storage.max_gib" in str(refusal.value)


def test_states_that_are_there_already_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = make_run(tmp_path, ["good"] * 10, ["good"] * 10)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free=100 * BYTES_PER_TOKEN))
    with pytest.raises(NotEnoughRoom, match="are free on the disk"):
        audit_samples(lineage)
    states = lineage.hidden_state_shards("p10-s000")
    states.folder.mkdir(parents=True)
    states.finish([], {})
    assert audit_samples(lineage).facts["trained_tokens"] == 200
