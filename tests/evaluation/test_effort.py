from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.evaluation.effort import Asked, Effort, effort_of_release, effort_of_report
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.recipe import Recipe, load_recipe
from tests.evaluation.counting_server import CountingServer, counting_server
from tests.evaluation.judges import judging
from tests.release.made import made_lineage, make_checkpoint, recipe

RECIPES = Path(__file__).parents[2] / "recipes"

DRAFT, BASE, ALONE = "the draft with speculative_tokens 3", "the base draft", "the target alone"
SETS = {"everyday": 20, "gsm8k": 5}


def settings(folder: Path, base: bool = False, **evaluation: Any) -> Recipe:
    """Two judges; two sets, whose numbers of prompts are those of SETS."""
    values: dict[str, Any] = {
        "sets": [{"name": name, "path": f"{name}.jsonl"} for name in SETS],
        "speculative_tokens": 3,
        "repeats": 2,
        **evaluation,
    }
    base_draft = {"hub_id": "somebody/a-draft"} if base else None
    prompts = {"sources": [{"path": "train.jsonl"}], "count": 8, "per_shard": 4, "validation": 2}
    return recipe(folder, evaluation=values, base_draft=base_draft, prompts=prompts)


def asked_of(effort: Effort) -> dict[str, list[tuple[int, float, int]]]:
    return {
        name: [(one.replies, one.tokens, one.in_flight) for one in asked]
        for name, asked in effort.servers.items()
    }


def test_without_a_grid_the_draft_and_the_target_are_one_server_each(tmp_path: Path) -> None:
    effort = effort_of_report(settings(tmp_path), SETS, reply=100, judged=70)
    assert asked_of(effort) == {
        DRAFT: [(40, 4000, 1), (10, 1000, 1), (2, 140, 2)],
        # The second batch size of the greedy comparison has as many rows in a step as verification.
        ALONE: [(40, 4000, 1), (10, 1000, 1), (20, 2000, 4), (5, 500, 4)],
    }
    assert (effort.replies, effort.tokens) == (127, 12640)


def test_each_number_of_speculative_tokens_is_a_server_and_each_cell_is_measured_once(
    tmp_path: Path,
) -> None:
    grid = {"speculative_tokens": [5], "temperature": [0.7], "concurrency": [8]}
    effort = effort_of_report(settings(tmp_path, base=True, grid=grid), SETS, reply=1, judged=1)
    assert list(effort.servers) == [DRAFT, "the draft with speculative_tokens 5", BASE, ALONE]
    replies = {name: sum(one.replies for one in asked) for name, asked in effort.servers.items()}
    prompts, cells, repeats = sum(SETS.values()), 4, 2
    assert replies == {
        DRAFT: prompts * (cells - 1 + repeats) + 2,
        "the draft with speculative_tokens 5": prompts * cells,
        BASE: prompts * repeats,
        ALONE: prompts * (cells - 1 + repeats) + prompts,
    }
    assert (5, 5, 5) in asked_of(effort)[ALONE]  # eight in flight, of a set of five prompts


def test_a_report_that_only_samples_compares_no_greedy_replies(tmp_path: Path) -> None:
    effort = effort_of_report(settings(tmp_path, temperature=0.7), SETS, reply=1, judged=1)
    assert [one.in_flight for one in effort.servers[ALONE]] == [1, 1]


def test_the_release_is_one_more_server_for_the_first_set_once(tmp_path: Path) -> None:
    effort = effort_of_release(settings(tmp_path), SETS, reply=100)
    assert asked_of(effort) == {"the released folder": [(20, 2000, 1)]}


def test_requests_in_flight_share_the_time() -> None:
    effort = Effort({"one": [Asked(10, 1000, 1)], "other": [Asked(10, 1000, 4)]})
    assert effort.seconds(50) == pytest.approx(20 + 5)


def test_a_report_starts_the_servers_and_asks_the_replies_that_were_expected(tmp_path: Path) -> None:
    held_out = {"name": "everyday", "path": str(tmp_path / "recipe" / "held-out.jsonl"), "column": "prompt"}
    evaluation = {
        "sets": [held_out],
        "max_completion_tokens": 40,  # a warm-up has fewer
        "grid": {"speculative_tokens": [2], "concurrency": [2]},
    }
    lineage = made_lineage(tmp_path, [judging("a", 1)], evaluation=evaluation)
    make_checkpoint(lineage, weights=False)
    asked = []

    @contextmanager
    def server_with(draft: Path | None, speculative_tokens: int | None = None, /) -> Iterator[CountingServer]:
        knobs = {} if draft is None else {"speculative_tokens": speculative_tokens}
        with counting_server(drafts=draft is not None, **knobs) as server:
            yield server
        asked.append(sum("prompt" in body or body["max_tokens"] == 40 for body in server.requests))

    evaluate_draft(lineage, server_with)  # type: ignore[arg-type]
    effort = effort_of_report(lineage.recipe, {"everyday": 3}, reply=40, judged=12)
    assert asked == [sum(one.replies for one in each) for each in effort.servers.values()]


def test_kimis_report_loads_it_three_times_and_its_release_once_more() -> None:
    kimi = load_recipe("kimi-k2.5-8gpu", RECIPES)
    report = effort_of_report(kimi, {"everyday": 80}, reply=1200, judged=2000)
    assert list(report.servers) == [DRAFT, BASE, ALONE]
    assert list(effort_of_release(kimi, {"everyday": 80}, reply=1200).servers) == ["the released folder"]
