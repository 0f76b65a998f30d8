"""What the asset shows of a release: its version, where it is, how it is served."""

from pathlib import Path

import dagster as dg
import pytest

from assets import released_draft
from eagle3_pipeline.lineage import Lineage
from resources import Storage, VllmServers
from tests.release.finished import NAME, finished


def materialized(lineage: Lineage) -> dg.ExecuteInProcessResult:
    resources = {"storage": Storage(root=str(lineage.storage_root)), "servers": VllmServers()}
    with dg.DagsterInstance.ephemeral() as instance:
        return dg.materialize(
            [released_draft.build(lineage.recipe)],
            resources=resources,
            instance=instance,
            raise_on_error=False,
        )


def test_a_release_is_shown_with_its_version_where_it_is_and_how_it_is_served(tmp_path: Path) -> None:
    lineage = finished(tmp_path, folder=str(tmp_path / "shared"))
    result = materialized(lineage)
    (event,) = result.get_asset_materialization_events()
    shown = {name: value.value for name, value in event.materialization.metadata.items()}
    assert shown["path"] == str(lineage.released_draft().folder)
    assert (shown["name"], shown["version"]) == (NAME, "v1")
    assert shown["copy"] == str(tmp_path / "shared" / NAME / "v1")
    assert Path(shown["released"]).is_symlink()
    assert shown["serve"].startswith(f"vllm serve {tmp_path / 'target'} --speculative-config")
    assert shown["released"] in shown["serve"]


def test_a_release_that_cannot_be_published_fails_in_plain_words_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    lineage = finished(tmp_path, publish={"hub_id": "me/a-draft"})
    (failed,) = materialized(lineage).get_step_failure_events()
    said = failed.step_failure_data.user_failure_data
    assert "BadInput: release.publish is given, but HF_TOKEN is not set" in said.description
    assert lineage.released() is not None
