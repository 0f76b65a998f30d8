import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import Busy, DamagedFile, MissingInput, ServerDied
from eagle3_pipeline.evaluation import evaluation, phase
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from tests.evaluation.counting_server import CountingServer, counting_server
from tests.evaluation.judges import judging
from tests.release.made import made_lineage, make_checkpoint


class Servers:
    """Opens a counting server without the draft and with it, and remembers which."""

    def __init__(self, **with_draft: Any) -> None:
        self.opened: list[Path | None] = []
        self.asked: dict[bool, list[dict[str, Any]]] = {}
        self.fail_with_draft = False
        self._with_draft = with_draft

    @contextmanager
    def __call__(self, draft: Path | None) -> Iterator[CountingServer]:
        self.opened.append(draft)
        if draft is not None and self.fail_with_draft:
            raise ServerDied("killed")
        knobs = self._with_draft if draft else {}
        with counting_server(drafts=draft is not None, **knobs) as server:
            yield server
            self.asked[draft is not None] = server.requests


def evaluate(lineage: Lineage, servers: Servers) -> Manifest:
    return evaluate_draft(lineage, servers)  # type: ignore[arg-type]


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    made = made_lineage(tmp_path)
    make_checkpoint(made, weights=False)
    return made


def test_each_set_is_measured_without_the_draft_and_then_with_it(lineage: Lineage) -> None:
    servers = Servers()
    manifest = evaluate(lineage, servers)
    assert servers.opened == [None, lineage.draft_checkpoint().folder / "draft"]
    facts = manifest.facts
    assert set(facts["sets"]) == {"everyday"}
    assert facts["acceptance_length"] == pytest.approx(1 + facts["accepted_tokens"] / facts["drafts"])
    assert facts["acceptance_length"] == pytest.approx(1 + sum(facts["acceptance_by_position"]))
    assert facts["speedup"] == pytest.approx(
        facts["tokens_per_second_with"] / facts["tokens_per_second_without"]
    )
    assert facts["identical_share"] == 1.0
    assert facts["simulated_acceptance_length"] == 1.6
    assert facts["simulation"] is None
    assert facts["prompts"] == 3


def test_the_report_is_on_disk_for_people_and_programs(lineage: Lineage) -> None:
    manifest = evaluate(lineage, Servers())
    folder = lineage.acceptance_report().folder
    assert json.loads((folder / "report.json").read_text()) == manifest.facts
    assert "| all | 3 |" in (folder / "report.md").read_text()
    lineage.acceptance_report().verify()


@pytest.fixture
def judged(tmp_path: Path) -> Lineage:
    """A lineage with two conversations that judged."""
    made = made_lineage(tmp_path, [judging("a", 1), judging("b", 2)])
    make_checkpoint(made, weights=False)
    return made


def test_the_conversations_that_judged_are_served_with_the_draft_only(judged: Lineage) -> None:
    servers = Servers()
    facts = evaluate(judged, servers).facts
    assert not any("prompt" in body for body in servers.asked[False])
    replayed = [body["prompt"] for body in servers.asked[True] if "prompt" in body]
    assert sorted(replayed) == [[1, 5, 6], [2, 5, 6]]  # both are in flight at once
    assert facts["simulation"]["served"] == facts["simulation"]["judges"] == 2
    assert facts["simulation_ratio"] == facts["simulation"]["served_length"] / 1.6


def test_sets_are_measured_the_same_with_and_without_conversations(judged: Lineage, tmp_path: Path) -> None:
    without = made_lineage(tmp_path / "without")
    make_checkpoint(without, weights=False)
    names = ("drafts", "accepted_tokens", "acceptance_by_position", "prompts", "output_tokens_with")
    found = [evaluate(lineage, Servers()).facts for lineage in (judged, without)]
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


def test_a_disagreement_is_a_warning_and_no_failure(
    judged: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    facts = evaluate(judged, Servers()).facts
    assert facts["simulation_agrees"] is False  # the stand-in accepts 1.5 tokens a draft, not 0.6
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "DISAGREE" in said.getMessage()


def test_what_the_conversations_gave_is_kept(judged: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "summarise", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(judged, Servers())
    servers = Servers()
    manifest = evaluate(judged, servers)
    assert manifest.facts["simulation"]["served"] == 2
    assert servers.opened == []
    assert "replay-with-draft.json" in {entry.path for entry in manifest.files}


def test_a_replay_that_is_killed_is_made_up_for_without_measuring_again(
    judged: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(phase, "replay", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(judged, Servers())
    kept = judged.acceptance_report().folder / "measurement-with-draft.json"
    measured = kept.read_bytes()
    servers = Servers()
    assert evaluate(judged, servers).facts["simulation"]["served"] == 2
    assert servers.opened == [judged.draft_checkpoint().folder / "draft"]
    assert all("prompt" in body for body in servers.asked[True])  # no chat: nothing of the sets
    assert kept.read_bytes() == measured


def test_a_damaged_replay_is_told_and_not_guessed_at(judged: Lineage) -> None:
    folder = judged.acceptance_report().folder
    folder.mkdir(parents=True)
    (folder / "replay-with-draft.json").write_text("{}")
    with pytest.raises(DamagedFile, match=r"replay-with-draft\.json is no measurement"):
        evaluate(judged, Servers())


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_replies_that_differ_with_the_draft_are_counted(lineage: Lineage) -> None:
    assert evaluate(lineage, Servers(salt="other")).facts["identical_share"] == 0.0


def test_with_sampling_nothing_is_said_about_identical_replies(tmp_path: Path) -> None:
    sets = [{"name": "everyday", "path": str(tmp_path / "recipe" / "held-out.jsonl"), "column": "prompt"}]
    evaluation = {"sets": sets, "max_completion_tokens": 16, "temperature": 0.7}
    lineage = made_lineage(tmp_path, evaluation=evaluation)
    make_checkpoint(lineage, weights=False)
    assert evaluate(lineage, Servers()).facts["identical_share"] is None


def test_a_report_that_is_there_opens_no_server(lineage: Lineage) -> None:
    first = evaluate(lineage, Servers())
    servers = Servers()
    assert evaluate(lineage, servers) == first
    assert servers.opened == []


def test_a_failure_of_the_second_server_redoes_only_its_phase(lineage: Lineage) -> None:
    servers = Servers()
    servers.fail_with_draft = True
    with pytest.raises(ServerDied):
        evaluate(lineage, servers)
    assert lineage.acceptance_report().manifest() is None
    servers.fail_with_draft = False
    servers.opened.clear()
    evaluate(lineage, servers)
    assert servers.opened == [lineage.draft_checkpoint().folder / "draft"]


def test_a_phase_of_another_machine_is_measured_again(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    servers.fail_with_draft = True
    with pytest.raises(ServerDied):
        evaluate(lineage, servers)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    servers.fail_with_draft = False
    servers.opened.clear()
    evaluate(lineage, servers)
    assert servers.opened[0] is None


def test_a_damaged_phase_is_told_and_not_guessed_at(lineage: Lineage) -> None:
    folder = lineage.acceptance_report().folder
    folder.mkdir(parents=True)
    (folder / "measurement-without-draft.json").write_text("{}")
    with pytest.raises(DamagedFile, match="Delete it"):
        evaluate(lineage, Servers())


def test_two_processes_never_measure_the_same_report_at_once(lineage: Lineage) -> None:
    folder = lineage.acceptance_report().folder
    folder.mkdir(parents=True)
    servers = Servers()
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="another process"):
            evaluate(lineage, servers)
    assert servers.opened == []


def test_a_draft_that_is_not_trained_yet_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="draft_checkpoint"):
        evaluate(made_lineage(tmp_path), Servers())
