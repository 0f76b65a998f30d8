"""The everyday prompts that this project owns: enough, mixed, alive, and clean of the evaluation set."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.prompts.near_duplicates import NearDuplicates, shingles

FOLDER = Path(__file__).parents[2] / "recipes" / "everyday"
_LONGEST_SHARED_RUN = 7  # words


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


TRAIN, EVALUATION = _rows("train.jsonl"), _rows("evaluation.jsonl")


def _runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    size = _LONGEST_SHARED_RUN + 1
    return {" ".join(words[start : start + size]) for start in range(len(words) - size + 1)}


@pytest.mark.parametrize("rows", [TRAIN, EVALUATION], ids=["train", "evaluation"])
def test_every_row_has_a_kind_a_subject_and_a_prompt(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert list(row) == ["kind", "subject", "prompt"]
        assert all(isinstance(value, str) and value == value.strip() != "" for value in row.values())
        assert len(row["prompt"].split()) >= 4
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_the_corpus_is_large_and_broad() -> None:
    assert len(TRAIN) >= 2000
    assert len(EVALUATION) == 80
    assert len({row["kind"] for row in TRAIN}) >= 12
    assert len({row["subject"] for row in TRAIN}) >= 60
    assert max(Counter(row["kind"] for row in TRAIN).values()) < len(TRAIN) / 12
    subjects = {row["subject"] for row in TRAIN}
    assert len({subject.lower() for subject in subjects}) == len(subjects)


@pytest.mark.parametrize("rows", [TRAIN, EVALUATION], ids=["train", "evaluation"])
def test_any_prefix_is_mixed(rows: list[dict[str, Any]]) -> None:
    kinds = {row["kind"] for row in rows}
    for start in range(0, min(len(rows), 2000), len(kinds)):
        assert {row["kind"] for row in rows[start : start + len(kinds)]} == kinds
    assert len({row["subject"] for row in rows[:40]}) >= 15


def test_training_prompts_are_no_near_duplicates_of_each_other() -> None:
    index = NearDuplicates(0.7)
    similar = []
    for row in TRAIN:
        elements = shingles(row["prompt"])
        if index.find(elements) is not None:
            similar.append(row["prompt"])
        index.add(row["prompt"], elements)
    assert len(similar) < 0.02 * len(TRAIN)
    assert similar == []


def test_training_and_evaluation_share_neither_a_subject_nor_a_phrase() -> None:
    assert not {row["subject"] for row in TRAIN} & {row["subject"] for row in EVALUATION}
    trained = set().union(*(_runs(row["prompt"]) for row in TRAIN))
    assert [row["prompt"] for row in EVALUATION if _runs(row["prompt"]) & trained] == []


def test_no_prompt_starts_as_a_series_does() -> None:
    starts = Counter(" ".join(row["prompt"].lower().split()[:3]) for row in TRAIN)
    assert max(starts.values()) < 0.02 * len(TRAIN)


def test_the_readme_tells_the_counts() -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert f"| `train.jsonl` | {len(TRAIN):,} | 16 | 80 |" in readme
    assert f"| `evaluation.jsonl` | {len(EVALUATION)} | 16 | 16 |" in readme
    held = Counter(row["kind"] for row in EVALUATION)
    for kind, count in Counter(row["kind"] for row in TRAIN).items():
        assert re.search(rf"^\| {kind} \| .* \| {count} \| {held[kind]} \|$", readme, re.MULTILINE)
    for subject in {row["subject"] for row in TRAIN + EVALUATION}:
        assert subject in readme
