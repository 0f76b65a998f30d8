"""All checks of the doctor, one after the other."""

from collections.abc import Callable, Iterable, Iterator

from eagle3_pipeline.doctor.architecture import architecture
from eagle3_pipeline.doctor.disks import disks, privacy, storage
from eagle3_pipeline.doctor.finding import Finding, note, problem
from eagle3_pipeline.doctor.gpus import gpus
from eagle3_pipeline.doctor.leases import leases
from eagle3_pipeline.doctor.leftovers import leftovers
from eagle3_pipeline.doctor.limits import limits
from eagle3_pipeline.doctor.partitions import partitions
from eagle3_pipeline.doctor.ports import ports
from eagle3_pipeline.doctor.server_python import server_python
from eagle3_pipeline.errors import Eagle3Error, MissingInput
from eagle3_pipeline.lineage import Lineage

OF_MACHINE: tuple[Callable[[], Iterable[Finding]], ...] = (gpus, disks, leases, leftovers)
# The last one takes seconds.
OF_RECIPE: tuple[Callable[[Lineage], Iterable[Finding]], ...] = (
    *(partitions, storage, privacy, limits, ports, server_python, architecture),
)


def examine(find_lineage: Callable[[], Lineage]) -> Iterator[Finding]:
    """The findings of all checks, as they come; those of the machine also where the recipe is refused."""
    for check in OF_MACHINE:
        yield from _findings(check)
    try:
        lineage = find_lineage()
    except Eagle3Error as error:
        yield problem(str(error), "Correct the recipe; what concerns it was not looked at.")
        return
    for of_recipe in OF_RECIPE:
        yield from _findings(of_recipe, lineage)


def _findings(check: Callable[..., Iterable[Finding]], *of: Lineage) -> Iterator[Finding]:
    """What a check finds; where it cannot look, that is a finding too."""
    name = check.__name__.replace("_", " ")
    try:
        yield from check(*of)
    except MissingInput as error:
        yield note(f"{name}: {error}")
    except Eagle3Error as error:
        yield problem(f"{name}: {error}")
    except Exception as error:
        yield problem(
            f"{name}: this check failed itself with {type(error).__name__}: {error}",
            "Look at it by hand; the other checks hold.",
        )
