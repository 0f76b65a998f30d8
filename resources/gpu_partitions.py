"""GPU partitions for phases without a server: training."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.serving.lease import hold_partition


class GpuPartitions(dg.ConfigurableResource):
    """Leases on the GPUs that the recipe gives each phase: operating system locks, freed by death."""

    @contextmanager
    def training(self, recipe: Recipe) -> Iterator[None]:
        """Hold the GPUs of training alone, after stopping idle servers of ours on them."""
        with hold_partition(recipe.partitions.training, f"training of {recipe.name}"):
            yield
