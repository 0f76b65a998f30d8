import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_pipeline.errors import Busy, DamagedFile, MissingInput, NotEnoughRoom, QualityError, ServerDied
from eagle3_pipeline.evaluation import evaluation, phase
from eagle3_pipeline.evaluation.evaluation import KEPT_NAME, evaluate_draft
from eagle3_pipeline.evaluation.grid import Cell
from eagle3_pipeline.evaluation.kept import Kept
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.evaluation.page import report_page
from eagle3_pipeline.evaluation.phase import Bench, Phase, measure_phase
from eagle3_pipeline.evaluation.progress import Progress
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.progress_file import latest_calls
from tests.evaluation.counting_server import CountingServer, counting_server
from tests.evaluation.judges import judging
from tests.release.made import made_lineage, make_checkpoint

PROMPTS, REPEATS = 3, 2
OF_DRAFT, OF_TARGET = REPEATS, REPEATS + 1
"""Measurements of one set on each server; the target alone has one more, at another batch size."""


class Servers:
    """Opens a counting server with the draft and without it, and remembers which and what it was asked."""

    def __init__(self, likeliest: Any = None, **with_draft: Any) -> None:
        self.opened: list[tuple[str | None, int | None]] = []
        self.asked: list[list[dict[str, Any]]] = []
        self.fail_alone = False
        self._likeliest = likeliest
        self._with_draft = with_draft

    @contextmanager
    def __call__(self, draft: Path | None, speculative_tokens: int | None = None) -> Iterator[CountingServer]:
        self.opened.append((draft and draft.name, speculative_tokens))
        if draft is None and self.fail_alone:
            raise ServerDied("killed")
        if draft is None:
            knobs: dict[str, Any] = {"drafts": False, "likeliest": self._likeliest}
        else:
            knobs = {"speculative_tokens": speculative_tokens, **self._with_draft}
        with counting_server(**knobs) as server:
            self.asked.append(server.requests)
            yield server


def evaluate(lineage: Lineage, servers: Servers | None = None) -> Manifest:
    return evaluate_draft(lineage, servers or Servers())  # type: ignore[arg-type]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """The evaluation of `made_lineage` in `folder`, with changes."""
    sets = [{"name": "everyday", "path": str(folder / "recipe" / "held-out.jsonl"), "column": "prompt"}]
    return {"sets": sets, "max_completion_tokens": 16, "repeats": REPEATS, **changes}


def make(folder: Path, *judges: Any, **sections: Any) -> Lineage:
    lineage = made_lineage(folder, judges, **{"evaluation": settings(folder), **sections})
    make_checkpoint(lineage, weights=False)
    return lineage


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(evaluation, "report_page", lambda report: "<html></html>")


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return make(tmp_path)


@pytest.fixture
def judged(tmp_path: Path) -> Lineage:
    """A lineage with two conversations that judged."""
    return make(tmp_path, judging("a", 1), judging("b", 2))


def chats(requests: list[dict[str, Any]]) -> int:
    """Measurements among the requests: all prompts, after a warm-up of as many."""
    return sum("messages" in body for body in requests) // (2 * PROMPTS)


def test_each_set_is_measured_with_the_draft_and_then_without_it(lineage: Lineage) -> None:
    servers = Servers()
    facts = evaluate(lineage, servers).facts
    assert servers.opened == [("draft", 3), (None, 0)]
    assert [chats(asked) for asked in servers.asked] == [OF_DRAFT, OF_TARGET]
    assert set(facts["sets"]) == {"everyday"}
    assert facts["acceptance_length"] == pytest.approx(1 + facts["accepted_tokens"] / facts["drafts"])
    assert facts["acceptance_length"] == pytest.approx(1 + sum(facts["acceptance_by_position"]))
    speeds = facts["tokens_per_second_with"] / facts["tokens_per_second_without"]
    assert facts["speedup"] == pytest.approx(speeds)
    assert facts["speedup_least"] <= facts["speedup"] <= facts["speedup_most"]
    assert (facts["prompts"], facts["repeats"], facts["identical_share"]) == (PROMPTS, REPEATS, 1.0)
    assert (facts["greedy"]["compared"], facts["greedy"]["differ_with_draft"]) == (PROMPTS, 0)
    assert facts["base"] is None
    assert len(facts["grid"]) == 1
    assert facts["simulated_acceptance_length"] == 1.6
    assert facts["simulation"] is None
    assert facts["measured"]["draft"]


def test_the_report_is_on_disk_for_people_and_programs(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "report_page", report_page)
    manifest = evaluate(lineage)
    folder = lineage.acceptance_report().folder
    assert json.loads((folder / "report.json").read_text()) == manifest.facts
    assert "| all | 3 |" in (folder / "report.md").read_text()
    assert "<html" in (folder / "report.html").read_text()
    assert {entry.path for entry in manifest.files} == {
        *("report.json", "report.md", "report.html", "measurements.jsonl")
    }
    lineage.acceptance_report().verify()


def test_a_server_is_started_for_each_number_of_tokens_and_measured_in_each_cell(tmp_path: Path) -> None:
    grid = {"speculative_tokens": [2], "temperature": [0.7], "concurrency": [2]}
    lineage, servers = make(tmp_path, evaluation=settings(tmp_path, grid=grid)), Servers()
    facts = evaluate(lineage, servers).facts
    assert servers.opened == [("draft", 3), ("draft", 2), (None, 0)]
    assert [chats(asked) for asked in servers.asked] == [OF_DRAFT + 3, 4, OF_TARGET + 3]
    cells = [(cell["speculative_tokens"], cell["temperature"], cell["in_flight"]) for cell in facts["grid"]]
    assert cells[0] == (3, 0.0, 1)
    assert set(cells) == {(k, t, c) for k in (3, 2) for t in (0.0, 0.7) for c in (1, 2)}
    assert [cell["repeats"] for cell in facts["grid"]] == [REPEATS, *[1] * 7]
    assert {len(cell["acceptance_by_position"]) for cell in facts["grid"][:4]} == {3}
    assert [cell["identical_share"] is None for cell in facts["grid"]] == [t > 0 for _, t, _ in cells]


def test_the_base_draft_is_measured_at_the_headline_only_and_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def export(_: Lineage, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        made.append(folder)

    # The real one imports speculators; tests/training/test_base_export.py has it.
    name = "eagle3_pipeline.training.base_export"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(export_base=export))
    grid = {"speculative_tokens": [2]}
    changes = {"evaluation": settings(tmp_path, grid=grid), "base_draft": {"path": str(tmp_path / "base")}}
    lineage, servers = make(tmp_path, **changes), Servers()
    facts = evaluate(lineage, servers).facts
    assert servers.opened == [("draft", 3), ("draft", 2), ("base-draft", 3), (None, 0)]
    assert chats(servers.asked[2]) == REPEATS
    assert facts["base"]["drafts"] == facts["drafts"]
    assert set(facts["base"]["sets"]) == {"everyday"}
    assert len(made) == 1
    made[0].mkdir()  # as a kill after the manifest leaves it
    evaluate(lineage)
    assert not made[0].exists()


def test_the_conversations_that_judged_are_served_once_at_the_headline(judged: Lineage) -> None:
    servers = Servers()
    facts = evaluate(judged, servers).facts
    with_draft, alone = servers.asked
    assert not any("prompt" in body for body in alone)
    replayed = [body["prompt"] for body in with_draft if "prompt" in body]
    assert sorted(replayed) == [[1, 5, 6], [2, 5, 6]]  # both are in flight at once
    assert facts["simulation"]["served"] == facts["simulation"]["judges"] == 2
    assert facts["simulation_ratio"] == facts["simulation"]["served_length"] / 1.6


def test_sets_are_measured_the_same_with_and_without_conversations(judged: Lineage, tmp_path: Path) -> None:
    without = make(tmp_path / "without")
    names = ("drafts", "accepted_tokens", "acceptance_by_position", "prompts", "output_tokens_with")
    found = [evaluate(lineage).facts for lineage in (judged, without)]
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


def test_a_disagreement_is_a_warning_and_no_failure(
    judged: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    facts = evaluate(judged).facts
    assert facts["simulation_agrees"] is False  # the stand-in accepts 1.5 tokens a draft, not 0.6
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "DISAGREE" in said.getMessage()


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def kill_at(lineage: Lineage, module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the report killed where it calls `name`."""
    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(lineage)
    assert lineage.acceptance_report().manifest() is None


@pytest.mark.parametrize("done", range(OF_DRAFT + OF_TARGET))
def test_a_kill_costs_the_measurement_that_it_falls_into_and_no_other(
    lineage: Lineage, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = phase.measure, iter(range(100))

    def measure_until_killed(*values: Any, **options: Any) -> Measurement:
        if next(calls) == done:
            raise KeyboardInterrupt
        return measure(*values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(phase, "measure", measure_until_killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(lineage)
    servers = Servers()
    facts = evaluate(lineage, servers).facts
    assert sum(map(chats, servers.asked)) == OF_DRAFT + OF_TARGET - done
    assert [draft is None for draft, _ in servers.opened] == ([True] if done >= OF_DRAFT else [False, True])
    assert facts["output_tokens_with"] == REPEATS * PROMPTS * 16


def test_a_torn_last_record_is_measured_again(lineage: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(lineage, evaluation, "summarise", monkeypatch)
    kept = lineage.acceptance_report().folder / KEPT_NAME
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # the last is the comparison of greedy replies
    servers = Servers()
    evaluate(lineage, servers)
    assert [draft for draft, _ in servers.opened] == [None]
    assert sum(map(chats, servers.asked)) == 1


def test_when_all_is_measured_no_server_is_opened(judged: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(judged, evaluation, "summarise", monkeypatch)
    servers = Servers()
    manifest = evaluate(judged, servers)
    assert manifest.facts["simulation"]["served"] == 2
    assert manifest.facts["greedy"]["compared"] == PROMPTS
    assert servers.opened == []


@pytest.mark.parametrize(("question", "servers_left"), [("replay", 2), ("greedy_agreement", 1)])
def test_a_question_that_is_killed_is_asked_again_without_measuring_again(
    judged: Lineage, question: str, servers_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(judged, evaluation, question, monkeypatch)
    servers = Servers()
    assert evaluate(judged, servers).facts["simulation"]["served"] == 2
    assert len(servers.opened) == servers_left
    assert chats(servers.asked[0]) == 0


def test_what_was_measured_on_another_machine_is_measured_again(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    servers.fail_alone = True
    with pytest.raises(ServerDied):
        evaluate(lineage, servers)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    again = Servers()
    evaluate(lineage, again)
    assert again.opened == servers.opened == [("draft", 3), (None, 0)]


def test_a_damaged_measurement_is_told_and_not_guessed_at(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(lineage, evaluation, "summarise", monkeypatch)
    kept = lineage.acceptance_report().folder / KEPT_NAME
    kept.write_text(kept.read_text().replace('"wall_seconds"', '"wall"'))
    with pytest.raises(DamagedFile, match="something else than a measurement"):
        evaluate(lineage)


def test_two_processes_never_measure_the_same_report_at_once(lineage: Lineage) -> None:
    place, servers = lineage.acceptance_report(), Servers()
    with (
        Kept(place.folder / KEPT_NAME, place.fingerprint),
        pytest.raises(Busy, match="another process"),
    ):
        evaluate(lineage, servers)
    assert servers.opened == []


def test_a_full_disk_ends_it_with_what_to_do_and_what_was_measured_stays(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "write_json", full)
        with pytest.raises(NotEnoughRoom, match="what was measured is kept"):
            evaluate(lineage)
    servers = Servers()
    evaluate(lineage, servers)
    assert servers.opened == []


def test_replies_that_part_at_near_ties_are_counted(lineage: Lineage) -> None:
    servers = Servers(salt="other", likeliest=lambda prompt: {1: -0.5, 2: -0.6})
    facts = evaluate(lineage, servers).facts
    assert facts["identical_share"] == 0.0
    assert facts["greedy"]["differ_with_draft"] == PROMPTS
    assert facts["greedy"]["largest_gap"] == pytest.approx(0.1)


def test_a_draft_that_changes_answers_has_no_report_and_what_was_measured_stays(lineage: Lineage) -> None:
    changed = {"salt": "other", "likeliest": lambda prompt: {1: -0.1, 2: -5.0}}
    with pytest.raises(QualityError, match="the draft changes answers"):
        evaluate(lineage, Servers(**changed))
    assert lineage.acceptance_report().manifest() is None
    (call,) = latest_calls(lineage.progress)
    assert call.state == "failed"
    servers = Servers(**changed)
    with pytest.raises(QualityError, match="the draft changes answers"):
        evaluate(lineage, servers)
    assert servers.opened == [(None, 0)]
    assert not any("messages" in body for body in servers.asked[0])


def test_with_sampling_nothing_is_said_about_identical_replies(tmp_path: Path) -> None:
    lineage = make(tmp_path, evaluation=settings(tmp_path, temperature=0.7))
    servers = Servers(salt="other")
    facts = evaluate(lineage, servers).facts
    assert facts["identical_share"] is None
    assert facts["greedy"] is None
    assert [chats(asked) for asked in servers.asked] == [REPEATS, REPEATS]


def test_a_greedy_cell_of_the_grid_is_compared_where_the_headline_samples(tmp_path: Path) -> None:
    evaluation = settings(tmp_path, temperature=0.7, grid={"temperature": [0]})
    facts = evaluate(make(tmp_path, evaluation=evaluation)).facts
    assert facts["temperature"] == 0.7
    assert facts["greedy"]["compared"] == PROMPTS


@pytest.mark.parametrize(("gpus", "seeds"), [("cpu", [None, None]), ([0], [0, 1])])
def test_repeats_are_seeded_but_not_on_the_cpu_whose_server_dies_of_a_seed(
    tmp_path: Path, gpus: Any, seeds: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int | None] = []

    def measure(*_: object, seed: int | None, **__: object) -> Measurement:
        found.append(seed)
        return Measurement({}, {}, 1, (), 1, 1.0, 1.0, None)

    monkeypatch.setattr(phase, "measure", measure)
    monkeypatch.setattr(phase, "evaluation_server", lambda *_: SimpleNamespace(fingerprint="f"))
    lineage = made_lineage(tmp_path, partitions={"evaluation": gpus})
    with Kept(tmp_path / KEPT_NAME, "r") as kept:
        bench = Bench(lineage, lambda *_: nullcontext(), {"everyday": []}, kept, Progress(2))  # type: ignore[arg-type]
        measure_phase(bench, Phase("without the draft", None, 0, {Cell(0, 0.7, 1): 2}))
    assert found == seeds


def test_status_shows_how_far_it_is(lineage: Lineage) -> None:
    evaluate(lineage)
    (call,) = latest_calls(lineage.progress)
    total = OF_DRAFT + OF_TARGET
    assert (call.step, call.state) == ("acceptance_report", "done")
    assert call.line.startswith(f"{total}/{total} measurements")


def test_a_report_that_is_there_opens_no_server(lineage: Lineage) -> None:
    first = evaluate(lineage)
    servers = Servers()
    assert evaluate(lineage, servers) == first
    assert servers.opened == []


def test_a_draft_that_is_not_trained_yet_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="draft_checkpoint"):
        evaluate(made_lineage(tmp_path))
