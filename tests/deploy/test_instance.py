"""The instances that are shipped: Dagster takes each of them, and they differ where they say so."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ONE_MACHINE, TEAM = ROOT / "dagster.yaml", ROOT / "deploy" / "dagster-team.yaml"


def _read(path: Path) -> dict[str, Any]:
    settings = yaml.safe_load(path.read_text())
    assert isinstance(settings, dict)
    return settings


@pytest.mark.parametrize("path", [ONE_MACHINE, TEAM], ids=lambda path: path.stem)
def test_dagster_takes_its_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAGSTER_HOME", "DAGSTER_PG_URL", "EAGLE3_COMPUTE_LOGS"):
        monkeypatch.setenv(name, "/somewhere")
    from dagster._config import process_config
    from dagster._core.instance.config import dagster_instance_config_schema

    found = process_config(dagster_instance_config_schema(), _read(path))
    assert found.success, found.errors


def test_both_start_nothing_again_unasked_and_leave_it_to_a_tag_of_the_run() -> None:
    for path in (ONE_MACHINE, TEAM):
        retries = _read(path)["run_retries"]
        assert retries == {"enabled": True, "max_retries": 0, "retry_on_asset_or_op_failure": False}


def test_the_password_of_the_database_comes_from_the_environment() -> None:
    assert _read(TEAM)["storage"] == {"postgres": {"postgres_url": {"env": "DAGSTER_PG_URL"}}}


def test_the_teams_instance_differs_in_where_records_lie_and_in_what_many_people_need() -> None:
    one, team = _read(ONE_MACHINE), _read(TEAM)
    assert one.keys() ^ team.keys() == {"compute_logs"}
    assert {name for name in one if one[name] != team[name]} == {"storage", "concurrency", "retention"}
