"""The code location: the assets, jobs and schedule of every loaded recipe, and what they share.

EAGLE3_RECIPES (names separated by commas, default smollm2-cpu) says which recipes are loaded;
EAGLE3_STORAGE (default ./data) is the storage root.
"""

import os
import warnings
from pathlib import Path

import dagster as dg

from assets import assets_of
from assets.pipeline import pipeline_job, shard_jobs, wave_jobs
from eagle3_pipeline.recipe import Recipe, load_recipes
from resources import GpuPartitions, Storage, VllmServers
from resources.console import news_logger
from sensors import (
    automation_sensor,
    disk_sensor,
    failures_sensor,
    lost_runs_sensor,
    new_prompts_sensor,
    nightly_schedule,
    servers_sensor,
    waves_sensor,
)

_HERE = Path(__file__).parent

# Backfill policies carry a beta mark in this Dagster; each asset would say so on every load.
warnings.filterwarnings("ignore", category=dg.BetaWarning)


def _of(recipe: Recipe) -> dg.Definitions:
    assets = assets_of(recipe)
    job, of_shards = pipeline_job(recipe, assets), shard_jobs(recipe)
    flow = [new_prompts_sensor(recipe, job), automation_sensor(recipe)]
    if recipe.extraction.waves == 1:
        return dg.Definitions(
            assets=assets, jobs=[job, *of_shards], schedules=[nightly_schedule(recipe, job)], sensors=flow
        )
    in_waves = wave_jobs(recipe, assets)
    return dg.Definitions(
        assets=assets,
        jobs=[job, *of_shards, *in_waves],
        schedules=[nightly_schedule(recipe, in_waves[0])],  # what follows is the sensor's
        sensors=[*flow, waves_sensor(recipe, in_waves)],
    )


_recipes = load_recipes(_HERE / "recipes")

defs = dg.Definitions.merge(
    dg.Definitions(
        resources={
            "storage": Storage(root=os.environ.get("EAGLE3_STORAGE", str(_HERE / "data"))),
            "servers": VllmServers(),
            "gpus": GpuPartitions(),
        },
        loggers={"console": news_logger},
        sensors=[servers_sensor, lost_runs_sensor, disk_sensor(_recipes), failures_sensor()],
    ),
    *(_of(recipe) for recipe in _recipes),
)
