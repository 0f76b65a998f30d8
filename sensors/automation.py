"""What lets new prompts flow through a recipe by themselves: a sensor on its sources, one on its conditions.

`<slug>_new_prompts` has the prompts made again when what the recipe names as sources has changed on the disk;
`<slug>_automation` has everything made that follows from something made anew (assets/automation.py). Both are
off until somebody switches them on: what they start takes the GPUs for hours.
"""

from typing import TYPE_CHECKING

import dagster as dg

from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME
from eagle3_pipeline.prompts.revisions import moved
from eagle3_pipeline.recipe import Recipe
from resources import Storage
from sensors.recipe_runs import RECIPE_TAG, why_busy

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition


def automation_sensor(recipe: Recipe) -> dg.AutomationConditionSensorDefinition:
    """Sensor `<slug>_automation` over the conditions of the recipe's assets."""
    return dg.AutomationConditionSensorDefinition(
        f"{recipe.slug}_automation",
        target=dg.AssetSelection.groups(recipe.slug),
        default_status=dg.DefaultSensorStatus.STOPPED,
        minimum_interval_seconds=60,
        run_tags={RECIPE_TAG: recipe.slug},
        description="Makes what follows from something that was made anew: samples from prompts, states once "
        "all samples are there and judged, and so on to the release.",
    )


def new_prompts_sensor(recipe: Recipe, job: "UnresolvedAssetJobDefinition") -> dg.SensorDefinition:
    """Sensor `<slug>_new_prompts`: asks for the prompts of `job`, once for each content of their sources."""
    prompts = dg.AssetKey([recipe.slug, "prompts"])

    @dg.sensor(
        name=f"{recipe.slug}_new_prompts",
        job=job,
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Makes the prompts again when a file that the recipe names has changed, and says where "
        f"the branch of a dataset has moved on. With {recipe.slug}_automation on, all that follows is made.",
    )
    def new_prompts(context: dg.SensorEvaluationContext, storage: Storage) -> dg.RunRequest | dg.SkipReason:
        lineage = storage.lineage(recipe)
        try:
            place = lineage.prompts()
            if place.manifest() is not None:
                return dg.SkipReason(_moved(lineage) or "the prompts are those of their sources")
            if not list(place.folder.parent.glob(f"*/{MANIFEST_NAME}")):
                return dg.SkipReason("no prompts were made yet: make them once, and changes are noticed")
        except Eagle3Error as error:
            return dg.SkipReason(f"{type(error).__name__}: {error}")
        if busy := why_busy(context.instance, storage.path, recipe.slug):
            return dg.SkipReason(f"the sources of the prompts have changed, but {busy}")
        return dg.RunRequest(
            run_key=place.fingerprint, asset_selection=[prompts], tags={RECIPE_TAG: recipe.slug}
        )

    return new_prompts


def _moved(lineage: Lineage) -> str:
    """Datasets that have moved on since the prompts were made; it is for a person to take the new commit."""
    return "; ".join(
        f"{one.dataset} is at {one.now} on {one.revision}, the prompts are of {one.made_from}: name the "
        "commit as the revision of this source to take it"
        for one in moved(lineage)
    )
