"""A draft's rows say which prompts, target, servers and shards it was made from, and which code made them."""

from pathlib import Path

import pytest

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.made_from import draft_made_from, release_made_from
from tests.release.made import made_lineage, make_checkpoint, make_report

SERVER = {
    "common": {"max_model_len": 4096, "extra_args": ["--download-dir", "/mnt/cache"]},
    "generation": {"extra_env": {"VLLM_LOGGING_PREFIX": "of-this-machine"}},
}


def test_the_draft_says_what_it_was_made_from(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    rows = {row["thing"]: row for row in draft_made_from(lineage)}
    assert {name: row["what it is"] for name, row in rows.items()} == {
        "target": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "prompts": "4 of held-out.jsonl; 0 of them judge",
        "generation server": "--dtype bfloat16",
        "samples": "4 in 2 shards, p2-s000 to p2-s001, temperature 0.7, top-p 1, top-k -1, at most 512 "
        "tokens",
        "extraction server": "--dtype bfloat16",
        "hidden states": "2 shards, p2-s000 to p2-s001, layers 2, 3, 4, 6, bf16",
        "vocabulary": f"{lineage.recipe.vocabulary.draft_tokens:,} tokens",
    }
    prompts = lineage.prompts().require()
    assert rows["prompts"]["content"] == prompts.digest[:12]
    assert rows["prompts"]["code"] == prompts.made_by["commit"]
    assert rows["samples"]["made at"]


def test_flags_name_no_folder_and_no_value_of_the_environment(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path, server=SERVER, base_draft={"hub_id": "someone/a-draft"})
    make_checkpoint(lineage, weights=False)
    rows = {row["thing"]: row["what it is"] for row in draft_made_from(lineage)}
    assert rows["base draft"] == "someone/a-draft"
    assert rows["extraction server"] == "--max-model-len 4096 --dtype bfloat16 --download-dir cache"
    assert rows["generation server"].startswith(f"{rows['extraction server']} (extra_env ")
    assert "of-this-machine" not in str(rows)
    assert str(tmp_path) not in str(rows)


def test_a_release_names_its_draft_and_its_report_as_well(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    with pytest.raises(MissingInput, match="acceptance_report is not made yet"):
        release_made_from(lineage)
    make_report(lineage)
    *rest, draft, report = release_made_from(lineage)
    assert rest == draft_made_from(lineage)
    assert draft["what it is"] == "the weights of step 8"
    assert report["what it is"] == "acceptance length 1.500, speed-up 1.20"
    assert report["content"] == lineage.acceptance_report().require().digest[:12]
