"""The gate: each measured number against its bound in the recipe."""

import math
from typing import Any

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.recipe.release import Release

# Fact of the report, its bound in the recipe, and what helps when it is missed.
_BOUNDS = (
    (
        "acceptance_length",
        "min_acceptance_length",
        "train on more or broader prompts, or longer (prompts.count, training.epochs)",
    ),
    (
        "speedup",
        "min_speedup",
        "a longer acceptance, fewer speculative tokens or fewer requests in flight make it larger",
    ),
)


def check_gate(release: Release, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`{number: {measured, bound, passed}}` of all bounds; raises QualityError listing each missed one.

    A number that is absent or not finite is missed as well.
    """
    gate: dict[str, dict[str, Any]] = {}
    missed = []
    for fact, setting, way_out in _BOUNDS:
        measured, bound = report.get(fact), getattr(release, setting)
        is_number = isinstance(measured, int | float) and math.isfinite(measured)
        passed = is_number and measured >= bound
        gate[fact] = {"measured": measured if is_number else None, "bound": bound, "passed": passed}
        if not passed:
            found = f"{measured:.3f}" if is_number else f"not measured ({measured})"
            missed.append(f"{fact} is {found}, release.{setting} is {bound:g}: {way_out}")
    if missed:
        raise QualityError("the draft is not released:\n" + "\n".join(f"  {line}" for line in missed))
    return gate
