"""The sensor that watches the disk of the storage root: states fill it, and runs stop before it is full."""

import shutil
from pathlib import Path

import dagster as dg

from eagle3_pipeline.recipe import Recipe
from resources import Storage
from sensors.messages import is_configured, send

_GIB = 2**30
_ENOUGH, _LOW = "enough", "low"


def disk_sensor(recipes: list[Recipe]) -> dg.SensorDefinition:
    """Sensor `disk`: low is what is less than the largest storage.keep_free_gib of the recipes."""

    @dg.sensor(
        name="disk",
        minimum_interval_seconds=120,
        # It only looks, so it needs nobody to switch it on.
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Shows how much is free where the recipes' things lie, and sends one message each time "
        "that it falls below storage.keep_free_gib, at which a step ends. It starts and deletes nothing.",
    )
    def disk(context: dg.SensorEvaluationContext, storage: Storage) -> dg.SensorResult:
        kept = max(recipe.storage.keep_free_gib for recipe in recipes)
        usage = shutil.disk_usage(_existing(storage.path))
        free = usage.free / _GIB
        said = f"{free:,.1f} of {usage.total / _GIB:,.0f} GiB are free at {storage.path}"
        if free >= kept:
            return dg.SensorResult(skip_reason=dg.SkipReason(said), cursor=_ENOUGH)
        said += (
            f", expected {kept:,.1f} (storage.keep_free_gib): steps that write end with NotEnoughRoom, and "
            "what is finished is kept. Free some space, or take fp8 states, fewer samples or waves."
        )
        if context.cursor != _LOW and is_configured():
            send("the disk is nearly full", said)
        return dg.SensorResult(skip_reason=dg.SkipReason(said), cursor=_LOW)

    return disk


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is made already."""
    return next(one for one in (path, *path.parents) if one.exists())
