"""The vLLM servers of the three phases: started when first needed, shared, found again by later runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import dagster as dg

from eagle3_pipeline.generation.canary import guarded
from eagle3_pipeline.generation.captured_states import capture_staging
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.serving.gpus import overlap, physical_gpus
from eagle3_pipeline.serving.server import RunningServer, open_server, stop_servers
from eagle3_pipeline.serving.specification import evaluation_server, extraction_server, generation_server


class VllmServers(dg.ConfigurableResource):
    """Owns the life of the servers.

    Each method gives a context manager that does nothing until it is entered: a step whose shards
    are all made never starts a server. Entering leases the partition, stops idle servers of ours
    that overlap it, attaches to the right server or starts it, and waits until it is ready. Leaving
    frees the lease; the server stays for the next step, until it is idle for too long or another
    phase wants its GPUs. Only that of an evaluation is stopped, also after a failure. Nothing is
    started in set-up or stopped in tear-down: those run for every step process and every retry.
    """

    @contextmanager
    def generation(self, lineage: Lineage) -> Iterator[RunningServer]:
        """The server that answers prompts; one that captures their states has a canary (canary.py)."""
        staging = capture_staging(lineage)
        opened = partial(open_server, generation_server(lineage, capturing=staging), lineage.logs)
        if staging is None:
            with opened() as server:
                yield server
            return
        plain = generation_server(lineage)
        canary = lineage.folder / "canary" / f"{plain.fingerprint}.json"
        with guarded(canary, staging, partial(open_server, plain, lineage.logs), opened) as server:
            yield server

    @contextmanager
    def extraction(self, lineage: Lineage) -> Iterator[RunningServer]:
        """The server that captures hidden states."""
        with open_server(extraction_server(lineage, lineage.staging), lineage.logs) as server:
            yield server

    @contextmanager
    def evaluation(
        self, lineage: Lineage, draft: Path | None, speculative_tokens: int | None = None
    ) -> Iterator[RunningServer]:
        """The server that is measured: the target alone, or with `draft`. Leaving it stops it."""
        spec = evaluation_server(lineage, draft, speculative_tokens)
        with open_server(spec, lineage.logs, stop=True) as server:
            yield server

    def release_generation(self, lineage: Lineage) -> list[str]:
        """Stop this recipe's idle generation server if extraction wants its GPUs; its name, once it is gone.

        No other: an idle server on the same GPUs may be the extraction server of an interrupted run.
        """
        spec = generation_server(lineage, capturing=capture_staging(lineage))
        if not overlap(physical_gpus(spec.partition), physical_gpus(lineage.recipe.partitions.extraction)):
            return []
        return stop_servers(spec.partition, only=spec.fingerprint)
