"""Runs that are cancelled while states are extracted or a draft is measured: what is made stays made.

Those of generation and of training are in test_orchestration_faults.py.
"""

from pathlib import Path

import psutil

from eagle3_pipeline.journal import read_journal
from eagle3_pipeline.serving.lease import holders
from eagle3_pipeline.serving.process import find_family
from eagle3_pipeline.serving.record import all_records
from tests.fakes.faults import write_control
from tests.fakes.log import read_log
from tests.location.runs import SHARDS, lineage_of, run_assets
from tests.location.web_ui import terminate_at
from tests.recipes import tiny_recipe

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UP_TO_AUDIT = ("target_model", "prompts", "synthetic_samples", "sample_audit")
UP_TO_DRAFT = (*UP_TO_AUDIT, "hidden_state_shards", "vocabulary_map", "draft_checkpoint")


def _stamps(folder: Path) -> dict[str, int]:
    """The finished parts of a shard, and when each was written, in ns."""
    return {part.name: part.stat().st_mtime_ns for part in folder.glob("part-*.safetensors")}


def test_a_cancelled_extraction_keeps_its_finished_parts_and_its_server_for_the_next_run(
    load, instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    """The first shard was made before; a part holds one sample, and one is asked for at a time."""
    extraction = {"part_gib": 1e-6, "concurrency": 1}
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, extraction=extraction)
    definitions, lineage = load(recipe), lineage_of(recipe)
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    assert run_assets(definitions, instance, *UP_TO_AUDIT).success
    assert run_assets(definitions, instance, "hidden_state_shards", shards=(SHARDS[0], SHARDS[0])).success
    first, second, _ = map(lineage.hidden_state_shards, lineage.recipe.shards)
    digest = first.require().digest
    starts = len(read_log(tmp_path / "requests.jsonl", "start"))

    write_control(control, first_token_seconds=0.5)
    tree = terminate_at(instance, recipe, "hidden_state_shards", lambda: len(_stamps(second.folder)) >= 2)
    write_control(control)
    spared = {
        one.pid
        for server in all_records()
        for one in [*find_family(server.process, server.marker), server.watcher]
    }
    assert not [one for one in psutil.wait_procs(tree, timeout=5)[1] if one.pid not in spared]
    assert not holders(())
    kept, sent = _stamps(second.folder), requests_sent(COMPLETIONS)
    assert second.manifest() is None
    assert len(kept) >= 2

    assert run_assets(definitions, instance, "hidden_state_shards").success
    assert kept.items() <= _stamps(second.folder).items()
    assert first.require().digest == digest
    assert requests_sent(COMPLETIONS) > sent
    assert len(read_log(tmp_path / "requests.jsonl", "start")) == starts
    made = [lineage.hidden_state_shards(shard).verify() for shard in lineage.recipe.shards]
    assert sum(one.facts["samples"] + sum(one.facts["skipped"].values()) for one in made) == 24


def test_a_cancelled_evaluation_stops_its_server_and_the_next_run_measures_only_what_is_missing(
    load, instance, tmp_path, tiny_llama, requests_sent, monkeypatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_llama, fake=True, run={"shards": 1})
    definitions, lineage = load(recipe), lineage_of(recipe)
    control = tmp_path / "control.json"
    monkeypatch.setenv("FAKE_CONTROL", str(control))
    only = (SHARDS[0], SHARDS[0])
    assert run_assets(definitions, instance, *UP_TO_DRAFT, shards=only).success
    journal = lineage.acceptance_report().folder / "measurements.jsonl"

    write_control(control, seconds_per_token=0.02)
    tree = terminate_at(
        instance,
        recipe,
        "acceptance_report",
        lambda: journal.exists() and len(list(read_journal(journal))) >= 1,
    )
    write_control(control)
    assert not psutil.wait_procs(tree, timeout=5)[1]
    assert not holders(())
    assert lineage.acceptance_report().manifest() is None
    text, kept = journal.read_text(), len(list(read_journal(journal)))
    assert 1 <= kept < 3

    sent = requests_sent(CHAT)
    assert run_assets(definitions, instance, "acceptance_report", shards=only).success
    # Three times with the draft and without it, once in a larger batch; each after a warm-up.
    assert requests_sent(CHAT) - sent == (3 + 3 - kept) * (3 + 8) + (4 + 8)
    assert journal.read_text().startswith(text)
    assert lineage.acceptance_report().require().facts["repeats"] == 3
