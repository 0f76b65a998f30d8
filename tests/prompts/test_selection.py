"""make_prompts: one fixed order, screened until enough are kept; fewer are a prefix of more."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts import selection
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.selection import make_prompts, order_rows, read_prompts
from eagle3_pipeline.prompts.sources import Row
from eagle3_pipeline.recipe import Recipe, load_recipe
from eagle3_pipeline.recipe.settings import PromptSource
from tests.recipes import distinct_prompts, tiny_recipe


def _lineage(tmp_path: Path, model_folder: Path, rows: list[Any] | None = None, **prompts: Any) -> Lineage:
    """A recipe with a target that is made; `rows` replace its 40 distinct prompts."""
    prompts = {"count": 16, **prompts}
    recipe = load_recipe(str(tiny_recipe(tmp_path, model_folder, prompts=prompts)), tmp_path)
    rows = (
        [{"prompt": text, "kind": "tiny"} for text in distinct_prompts(40, seed=1)] if rows is None else rows
    )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lineage = Lineage(recipe, tmp_path / "storage")
    place = lineage.target_model()
    if place.manifest() is None:
        place.folder.mkdir(parents=True)
        place.finish([], {"model_path": str(model_folder), "model_fingerprint": "m" * 64})
    return lineage


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_written_with_what_was_rejected_and_why(tmp_path: Path, tiny_llama: Path) -> None:
    texts = distinct_prompts(20, seed=1)
    rows = [{"prompt": text, "kind": kind} for text in texts[:10] for kind in ("first", "again")]
    rows += [{"prompt": text} for text in texts[10:]] + [{"prompt": "harbour " * 300}, {"ask": "x"}]
    manifest = make_prompts(_lineage(tmp_path, tiny_llama, rows, count=16, per_shard=8))
    facts = manifest.facts
    assert (facts["count"], facts["kept"]) == (16, 16)
    assert facts["rows_in"] == facts["kept"] + sum(facts["rejected"].values())
    assert set(facts["rejected"]) <= {"duplicate", "too_long", "malformed"}
    assert sum(facts["kinds"].values()) <= 16
    place = _lineage(tmp_path, tiny_llama, rows, count=16, per_shard=8).prompts()
    assert [entry.path for entry in manifest.files] == ["prompts.jsonl", "rejected.jsonl"]
    rejected = _lines(place.folder / "rejected.jsonl")
    assert Counter(one["reason"] for one in rejected) == facts["rejected"]
    assert all(one["where"].startswith("train.jsonl:") for one in rejected)
    prompts = [Prompt.from_json(line) for line in _lines(place.folder / "prompts.jsonl")]
    assert len({prompt.prompt_id for prompt in prompts}) == 16
    assert {prompt.turns[0] for prompt in prompts} <= set(texts)


def test_a_smaller_count_is_a_prefix_of_a_larger_one(tmp_path: Path, tiny_llama: Path) -> None:
    rows = [{"prompt": text} for text in distinct_prompts(40, seed=1)] * 2 + [{"prompt": None}] * 5
    made = {}
    for count in (8, 24, 40):
        lineage = _lineage(tmp_path, tiny_llama, rows, count=count)
        make_prompts(lineage)
        made[count] = (lineage.prompts().folder / "prompts.jsonl").read_text()
    assert made[40].startswith(made[24])
    assert made[24].startswith(made[8])


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_another_order(
    tmp_path: Path, tiny_llama: Path
) -> None:
    one = make_prompts(_lineage(tmp_path / "one", tiny_llama))
    same = make_prompts(_lineage(tmp_path / "same", tiny_llama))
    other = make_prompts(_lineage(tmp_path / "other", tiny_llama, seed=1))
    assert one.digest == same.digest
    assert one.files[0].sha256 != other.files[0].sha256


def test_prompts_that_are_made_are_not_made_again(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
    manifest = make_prompts(lineage)

    def fail(*_: Any) -> Iterator[Row]:
        raise AssertionError("the sources were read again")

    monkeypatch.setattr(selection, "order_rows", fail)
    assert make_prompts(lineage) == manifest


def test_what_a_killed_run_left_is_written_over(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
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
    lineage = _lineage(tmp_path, tiny_llama, rows)
    message = (
        rf"too few prompts for prompts\.count 16: {good} kept of {good + 4} rows; rejected: 3 empty, "
        rf"1 malformed \(each with its place in (.*)\)\. {way_out}"
    )
    with pytest.raises(BadInput, match=message):
        make_prompts(lineage)
    assert len(_lines(lineage.prompts().folder / "rejected.jsonl")) == 4
    assert lineage.prompts().manifest() is None


def test_shards_are_read_as_consecutive_runs_of_the_order(tmp_path: Path, tiny_llama: Path) -> None:
    lineage = _lineage(tmp_path, tiny_llama)
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
    lineage = _lineage(tmp_path, tiny_llama, rows)
    one_set = lineage.recipe.evaluation.sets[0].model_copy(update={"count": 1})
    evaluation = lineage.recipe.evaluation.model_copy(update={"sets": (one_set,)})
    lineage = Lineage(lineage.recipe.model_copy(update={"evaluation": evaluation}), lineage.storage_root)
    make_prompts(lineage)
    read = read_prompts(lineage.prompts(), 0, 16)
    assert not {prompt.turns[0] for prompt in read} & set(held)


def _recipe(tmp_path: Path, sources: list[dict[str, str]], seed: int = 0) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "order",
            "target": {"path": str(tmp_path)},
            "prompts": {"sources": sources, "count": 1, "per_shard": 1, "seed": seed},
            "extraction": {"layers": [1, 2]},
            "evaluation": {"sets": [{"name": "held_out", "path": "x"}]},
        }
    )


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3), seed=st.integers(0, 5))
def test_the_order_holds_every_row_once_and_depends_on_seed_and_sources_only(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    sources = []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{index} {row}"}) + "\n" for row in range(size)))
        sources.append({"path": str(path)})
    order = [row.value["prompt"] for row in order_rows(_recipe(folder, sources, seed), {})]
    assert order == [row.value["prompt"] for row in order_rows(_recipe(folder, sources, seed), {})]
    assert sorted(order) == sorted(
        f"{index} {row}" for index, size in enumerate(sizes) for row in range(size)
    )


def _stream(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[str]]) -> list[tuple[str, str, int]]:
    asked = []

    def stream(source: PromptSource, revision: str, seed: int) -> Iterator[Row]:
        asked.append((str(source.dataset), revision, seed))
        for number, text in enumerate(rows[str(source.dataset)], start=1):
            yield Row(str(source.dataset), number, {"prompt": text})

    monkeypatch.setattr(selection, "stream_dataset", stream)
    return asked


def test_local_rows_and_each_dataset_take_turns_until_all_are_at_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"local {row}"}) + "\n" for row in range(3)))
    asked = _stream(monkeypatch, {"one/a": ["a0"], "two/b": ["b0", "b1", "b2", "b3"]})
    sources = [{"dataset": "one/a"}, {"path": str(path)}, {"dataset": "two/b"}]
    revisions = {"one/a": "r1", "two/b": "r2"}
    order = [row.value["prompt"] for row in order_rows(_recipe(tmp_path, sources, 7), revisions)]
    assert ["local" if text.startswith("local") else text for text in order] == [
        *("local", "a0", "b0"),
        *("local", "b1"),
        *("local", "b2"),
        "b3",
    ]
    assert asked == [("one/a", "r1", 7), ("two/b", "r2", 7)]


def test_each_shard_has_the_digest_of_its_prompts_whatever_their_source_is_called(
    tmp_path: Path, tiny_llama: Path
) -> None:
    small = make_prompts(_lineage(tmp_path, tiny_llama, count=8)).facts["shards"]
    large = make_prompts(_lineage(tmp_path, tiny_llama, count=24)).facts["shards"]
    assert list(large) == ["p8-s000", "p8-s001", "p8-s002"]
    assert len(set(large.values())) == 3
    assert large["p8-s000"] == small["p8-s000"]
    plan = _lineage(tmp_path, tiny_llama, count=8).recipe.prompts
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
    monkeypatch.setattr(selection, "resolve_revision", lambda _: next(commits))
    lineage = _lineage(tmp_path, tiny_llama, count=8, sources=[{"dataset": "some/prompts"}])
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
    monkeypatch.setattr(selection, "resolve_revision", lambda _: next(commits))
    sources = [{"dataset": "some/prompts"}]
    small = make_prompts(_lineage(tmp_path, tiny_llama, count=8, sources=sources))
    large = make_prompts(_lineage(tmp_path, tiny_llama, count=24, sources=sources))
    assert small.facts["revisions"] == large.facts["revisions"] == {"some/prompts": "first"}
    assert [revision for _, revision, _ in asked] == ["first", "first"]
