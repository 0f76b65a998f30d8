"""The fixed ports of a recipe: free, ours, or held by somebody."""

from collections.abc import Iterator

from eagle3_pipeline.doctor.finding import Finding, ok, problem
from eagle3_pipeline.doctor.records import records
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.server import PHASES
from eagle3_pipeline.serving.starting import holder_of_port


def ports(lineage: Lineage) -> Iterator[Finding]:
    """A line per fixed port; a recipe without any gets free ones."""
    phases: dict[int, list[str]] = {}
    for phase in PHASES:
        port = lineage.recipe.server.phase(phase).port
        if port is not None:
            phases.setdefault(port, []).append(phase)
    if not phases:
        yield ok("ports: the recipe fixes none, so each server takes a free one")
    for port, users in phases.items():
        yield _port(port, ", ".join(users))


def _port(port: int, users: str) -> Finding:
    holder = holder_of_port(port)
    if holder is None:
        return ok(f"port {port} for {users}: free")
    for record in records():
        if record.port == port and record.state() != "failed":
            return ok(f"port {port} for {users}: held by {record}, which the next step uses or stops")
    return problem(
        f"port {port} for {users} is held by {holder}",
        "End that, choose another server.common.port, or leave the port out to get a free one.",
    )
