"""Whether served and simulated acceptance agree, in Dagster: a check that warns and stops nothing."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import acceptance_report
from resources import Storage, VllmServers
from tests.release.made import made_lineage, make_checkpoint, make_report

KEY = dg.AssetKey(["tiny_cpu", "acceptance_report"])


def _checked(tmp_path: Path, **report: Any) -> tuple[dg.AssetCheckEvaluation, dict[str, Any]]:
    """The check and the metadata of a run that finds the report made."""
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    make_report(lineage, **report)
    resources = {"storage": Storage(root=str(lineage.storage_root)), "servers": VllmServers()}
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [acceptance_report.build(lineage.recipe)], resources=resources, instance=instance
        )
    assert result.success
    (check,) = (one for one in result.get_asset_check_evaluations() if one.check_name == "simulation_agrees")
    (event,) = result.asset_materializations_for_node("tiny_cpu__acceptance_report")
    return check, dict(event.metadata)


def test_an_agreement_passes_and_the_numbers_stand_beside_each_other(tmp_path: Path) -> None:
    check, metadata = _checked(tmp_path)
    assert check.asset_key == KEY
    assert check.passed
    table = metadata["simulated_and_served"]
    assert [record.data["length"] for record in table.records] == ["1.600", "1.590", "0.994"]


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"simulation_agrees": False, "simulation_ratio": 0.8}, "DISAGREE"),
        ({"simulation_agrees": None, "simulation_ratio": None, "simulation": None}, "are not compared"),
    ],
    ids=["disagreement", "nothing compared"],
)
def test_anything_else_is_a_warning_that_stops_no_release(
    tmp_path: Path, report: dict[str, Any], words: str
) -> None:
    check, _ = _checked(tmp_path, **report)
    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert not check.blocking
    assert words in (check.description or "")
