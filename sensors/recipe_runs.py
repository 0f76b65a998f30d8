"""The runs of one recipe: where they work, and whether one is active."""

from pathlib import Path

import dagster as dg

from eagle3_pipeline.at_work import is_at_work

RECIPE_TAG = "eagle3/pipeline"
"""Tag of the runs of all jobs of a recipe, with its slug (assets/pipeline.py)."""

_OVER = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
# All others, those included that Dagster adds (1.13 brought SUSPENDED): one run too few does no harm.
_ACTIVE = [status for status in dg.DagsterRunStatus if status not in _OVER]


def folders_of(run: dg.DagsterRun, root: Path) -> list[Path]:
    """The folders below the storage root where a run works: those of its tag, and of the assets it is of."""
    slugs = {key.path[0] for key in run.asset_selection or ()}
    if RECIPE_TAG in run.tags:
        slugs.add(run.tags[RECIPE_TAG])
    return [root / slug for slug in sorted(slugs)]


def why_busy(instance: dg.DagsterInstance, root: Path, slug: str) -> str | None:
    """Why no run of a recipe should be started now, in words; None where nothing works on it.

    That is a run that Dagster does not call over, once the lost ones are told (lost_runs.py), or a step of
    anybody that holds the lock of the recipe (eagle3_pipeline/at_work.py).
    """
    of_recipe = dg.RunsFilter(tags={RECIPE_TAG: slug}, statuses=_ACTIVE)
    if active := instance.get_runs(of_recipe, limit=1):
        return f"run {active[0].run_id[:8]} of {active[0].job_name} is {active[0].status.value}"
    if is_at_work(root / slug):
        return f"a step works on {slug}, of a run of single assets or from outside this Dagster instance"
    return None
