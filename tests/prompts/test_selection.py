"""make_prompts: one fixed order, screened until enough are kept; fewer are a prefix of more."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts import mixture, revisions, selection
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.selection import make_prompts, read_prompts
from eagle3_pipeline.prompts.sources import Row
from eagle3_pipeline.recipe.prompts import PromptSource
from tests.prompts.world import make_lineage
from tests.recipes import distinct_prompts


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_written_with_what_was_rejected_and_why(tmp_path: Path, tiny_llama: Path) -> None:
    texts = distinct_prompts(20, seed=1)
    rows = [{"prompt": text, "kind": kind} for text in texts[:10] for kind in ("first", "again")]
    rows += [{"prompt": text} for text in texts[10:]] + [{"prompt": "harbour " * 300}, {"ask": "x"}]
    manifest = make_prompts(make_lineage(tmp_path, tiny_llama, rows, count=16, per_shard=8))
    facts = manifest.facts
    assert (facts["count"], facts["kept"]) == (16, 16)
    assert facts["rows_in"] == facts["kept"] + sum(facts["rejected"].values())
    assert set(facts["rejected"]) <= {"duplicate", "too_long", "malformed"}
    lines = facts["screening"]
    assert {line["reason"]: line["rows"] for line in lines} == {"kept": 16, **facts["rejected"]}
    assert sum(line["rows"] for line in lines) == facts["rows_in"]
    assert sum(line["share"] for line in lines) == pytest.approx(1, abs=1e-3)
    assert facts["sources"] == [{"source": "train.jsonl", "weight": 1, "rows": facts["rows_in"], "kept": 16}]
    assert sum(facts["kinds"].values()) <= 16
    place = make_lineage(tmp_path, tiny_llama, rows, count=16, per_shard=8).prompts()
    assert [entry.path for entry in manifest.files] == ["prompts.jsonl", "rejected.jsonl"]
    rejected = _lines(place.folder / "rejected.jsonl")
    assert Counter(one["reason"] for one in rejected) == facts["rejected"]
    assert all(one["where"].startswith("train.jsonl:") for one in rejected)
    for line in lines[1:]:
        example = next(one for one in rejected if one["reason"] == line["reason"])
        assert (line["example"], line["detail"]) == (example["where"], example["detail"])
    prompts = [Prompt.from_json(line) for line in _lines(place.folder / "prompts.jsonl")]
    assert len({prompt.prompt_id for prompt in prompts}) == 16
    assert {prompt.turns[0] for prompt in prompts} <= set(texts)


def test_a_smaller_count_is_a_prefix_of_a_larger_one(tmp_path: Path, tiny_llama: Path) -> None:
    rows = [{"prompt": text} for text in distinct_prompts(40, seed=1)] * 2 + [{"prompt": None}] * 5
    made = {}
    for count in (8, 24, 40):
        lineage = make_lineage(tmp_path, tiny_llama, rows, count=count)
        make_prompts(lineage)
        made[count] = (lineage.prompts().folder / "prompts.jsonl").read_text()
    assert made[40].startswith(made[24])
    assert made[24].startswith(made[8])


def test_the_first_prompts_judge_whatever_the_count_and_none_that_is_near_comes_later(
    tmp_path: Path, tiny_llama: Path
) -> None:
    texts = distinct_prompts(40, seed=1)
    near = [f"Please be so kind and think of this before you reply: {text} Thank you!" for text in texts]
    rows = [{"prompt": text} for pair in zip(texts, near, strict=True) for text in pair]
    made = {}
    for count in (8, 32):
        changes = {"count": count, "per_shard": 8, "validation": 6, "near_duplicate_similarity": 1.0}
        lineage = make_lineage(tmp_path, tiny_llama, rows, **changes)
        manifest = make_prompts(lineage)
        made[count] = [Prompt.from_json(line) for line in _lines(lineage.prompts().folder / "prompts.jsonl")]
        assert manifest.facts["validation"] == [prompt.prompt_id for prompt in made[count][:4]]
    assert manifest.facts["rejected"]["near_validation"] > 0
    assert made[32][:8] == made[8]
    judged = [prompt.turns[0] for prompt in made[32][:4]]
    plain = {text: one for one, pair in enumerate(zip(texts, near, strict=True)) for text in pair}
    numbers = [plain[prompt.turns[0]] for prompt in made[32]]
    assert not {plain[text] for text in judged} & set(numbers[4:])
    assert len(set(numbers[4:])) < len(numbers[4:]), "others may repeat, as the recipe allows"


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_another_order(
    tmp_path: Path, tiny_llama: Path
) -> None:
    one = make_prompts(make_lineage(tmp_path / "one", tiny_llama))
    same = make_prompts(make_lineage(tmp_path / "same", tiny_llama))
    other = make_prompts(make_lineage(tmp_path / "other", tiny_llama, seed=1))
    assert one.digest == same.digest
    assert one.files[0].sha256 != other.files[0].sha256


def test_prompts_that_are_made_are_not_made_again(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    manifest = make_prompts(lineage)

    def fail(*_: Any) -> Iterator[Row]:
        raise AssertionError("the sources were read again")

    monkeypatch.setattr(selection, "mix_sources", fail)
    assert make_prompts(lineage) == manifest


def test_what_a_killed_run_left_is_written_over(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    folder = lineage.prompts().folder
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").write_text('{"prompt_id": "half')
    make_prompts(lineage)
    lineage.prompts().verify()
    assert len(_lines(folder / "prompts.jsonl")) == 16


@pytest.mark.parametrize(
    ("good", "way_out"),
    [
        (13, r"Set prompts\.count to 8, the largest multiple of per_shard 8 that fits, or add sources\.$"),
        (5, r"Lower prompts\.per_shard \(it is 8\) and prompts\.count to at most 5, or add sources\.$"),
    ],
)
def test_too_few_prompts_are_told_with_the_count_that_fits(
    tmp_path: Path, tiny_llama: Path, good: int, way_out: str
) -> None:
    rows = [{"prompt": text} for text in distinct_prompts(good, seed=1)] + [{"prompt": ""}] * 3 + [None]
    lineage = make_lineage(tmp_path, tiny_llama, rows)
    message = (
        rf"too few prompts for prompts\.count 16: {good} kept of {good + 4} rows; rejected: 3 empty, "
        rf"1 malformed \(each with its place in (.*)\)\. {way_out}"
    )
    with pytest.raises(BadInput, match=message):
        make_prompts(lineage)
    assert len(_lines(lineage.prompts().folder / "rejected.jsonl")) == 4
    assert lineage.prompts().manifest() is None


def test_shards_are_read_as_consecutive_runs_of_the_order(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = make_lineage(tmp_path, tiny_llama)
    with pytest.raises(MissingInput, match="prompts is not made yet"):
        read_prompts(lineage.prompts(), 0, 8)
    make_prompts(lineage)
    place = lineage.prompts()
    read = read_prompts(place, 0, 8) + read_prompts(place, 1, 8)
    assert [prompt.to_json() for prompt in read] == _lines(place.folder / "prompts.jsonl")
    with pytest.raises(
        MissingInput, match=r"shard 2 of 8 prompts ends at prompt 24, but .* holds 16\. Materialise"
    ):
        read_prompts(place, 2, 8)
    whole = (place.folder / "prompts.jsonl").read_text()
    (place.folder / "prompts.jsonl").write_text(whole[: whole.rindex("{")])
    with pytest.raises(DamagedFile, match=r"has fewer than the 16 prompts of its manifest\. Delete"):
        read_prompts(place, 1, 8)


def test_prompts_near_any_row_of_an_evaluation_set_are_left_out_whatever_its_count(
    tmp_path: Path, tiny_llama: Path
) -> None:
    held = distinct_prompts(8, seed=2)
    rows = [{"prompt": text} for text in [*held, *distinct_prompts(16, seed=1)]]
    lineage = make_lineage(tmp_path, tiny_llama, rows)
    one_set = lineage.recipe.evaluation.sets[0].model_copy(update={"count": 1})
    evaluation = lineage.recipe.evaluation.model_copy(update={"sets": (one_set,)})
    lineage = Lineage(lineage.recipe.model_copy(update={"evaluation": evaluation}), lineage.storage_root)
    make_prompts(lineage)
    read = read_prompts(lineage.prompts(), 0, 16)
    assert not {prompt.turns[0] for prompt in read} & set(held)


def _stream(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[str]]) -> list[tuple[str, str, int]]:
    asked = []

    def stream(source: PromptSource, revision: str, seed: int) -> Iterator[Row]:
        asked.append((str(source.dataset), revision, seed))
        for number, text in enumerate(rows[str(source.dataset)], start=1):
            yield Row(str(source.dataset), number, {"prompt": text})

    monkeypatch.setattr(mixture, "stream_dataset", stream)
    return asked


def test_each_shard_has_the_digest_of_its_prompts_whatever_their_source_is_called(
    tmp_path: Path, tiny_llama: Path
) -> None:
    small = make_prompts(make_lineage(tmp_path, tiny_llama, count=8)).facts["shards"]
    large = make_prompts(make_lineage(tmp_path, tiny_llama, count=24)).facts["shards"]
    assert list(large) == ["p8-s000", "p8-s001", "p8-s002"]
    assert len(set(large.values())) == 3
    assert large["p8-s000"] == small["p8-s000"]
    plan = make_lineage(tmp_path, tiny_llama, count=8).recipe.prompts
    prompts = [Prompt.create((str(number),), system=None, source="a") for number in range(8)]
    renamed = [Prompt.create((str(number),), system=None, source="b") for number in range(8)]
    system = [Prompt.create((str(number),), system="x", source="a") for number in range(8)]
    digest = selection.digests_of_shards(prompts, plan)
    assert digest == selection.digests_of_shards(renamed, plan)
    assert digest != selection.digests_of_shards(system, plan)


def test_another_evaluation_set_keeps_the_commit_and_the_shards(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stream(monkeypatch, {"some/prompts": distinct_prompts(40, seed=1)})
    commits = iter(["first", "second"])
    monkeypatch.setattr(revisions, "resolve_revision", lambda _: next(commits))
    lineage = make_lineage(tmp_path, tiny_llama, count=8, sources=[{"dataset": "some/prompts"}])
    before = make_prompts(lineage)
    (tmp_path / "evaluation.jsonl").write_text('{"prompt": "What else is held out?"}\n')
    after = make_prompts(lineage)
    assert before.fingerprint != after.fingerprint
    assert before.facts["revisions"] == after.facts["revisions"]
    assert before.facts["shards"] == after.facts["shards"]


def test_a_larger_count_takes_the_commit_of_the_smaller_one_although_main_moved(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _stream(monkeypatch, {"some/prompts": distinct_prompts(40, seed=1)})
    commits = iter(["first", "second"])
    monkeypatch.setattr(revisions, "resolve_revision", lambda _: next(commits))
    sources = [{"dataset": "some/prompts"}]
    small = make_prompts(make_lineage(tmp_path, tiny_llama, count=8, sources=sources))
    large = make_prompts(make_lineage(tmp_path, tiny_llama, count=24, sources=sources))
    assert small.facts["revisions"] == large.facts["revisions"] == {"some/prompts@main": "first"}
    assert [revision for _, revision, _ in asked] == ["first", "first"]


def test_another_mix_keeps_the_commits_and_each_revision_of_a_dataset_has_its_own(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _stream(monkeypatch, {"some/prompts": distinct_prompts(40, seed=1)})
    moved = iter(["first", "tagged", "second"])
    monkeypatch.setattr(revisions, "resolve_revision", lambda _: next(moved))
    main, tag = {"dataset": "some/prompts"}, {"dataset": "some/prompts", "revision": "v1"}
    make_prompts(make_lineage(tmp_path, tiny_llama, count=8, sources=[main]))
    mixed = make_prompts(make_lineage(tmp_path, tiny_llama, count=8, sources=[{**main, "weight": 3}, tag]))
    assert mixed.facts["revisions"] == {"some/prompts@main": "first", "some/prompts@v1": "tagged"}
    assert [revision for _, revision, _ in asked] == ["first", "first", "tagged"]


def test_kept_prompts_have_the_weights_of_their_sources(tmp_path: Path, tiny_llama: Path) -> None:
    texts = distinct_prompts(60, seed=3)
    for name, rows in {"a": [*texts[:30], *[""] * 30], "b": texts[30:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    sources = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}]
    facts = make_prompts(make_lineage(tmp_path, tiny_llama, count=32, sources=sources)).facts
    assert [(one["source"], one["kept"]) for one in facts["sources"]] == [("a.jsonl", 24), ("b.jsonl", 8)]
    assert sum(one["rows"] for one in facts["sources"]) == facts["rows_in"]
