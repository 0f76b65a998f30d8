"""Plans of waves that earlier audits made of the same samples and settings of the extraction.

An audit is made again when one of its bounds is edited. That changes no state, so a training that is under
way goes on by the plan that it began with: another cut would begin another training.
"""

from collections.abc import Iterator

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest
from eagle3_pipeline.waves import records

Waves = tuple[list[list[str]], int]
"""The shards of each wave, and the number of passes."""


def decided_waves(lineage: Lineage) -> Iterator[Waves]:
    """Each plan, that of the recipe's own audit included; raises MissingInput without samples."""
    place = lineage.sample_audit()
    for path in sorted(place.folder.parent.glob(f"*/{MANIFEST_NAME}")):
        manifest = read_manifest(path)
        if all(manifest.inputs.get(name) == place.inputs[name] for name in ("samples", "extraction")):
            yield manifest.facts["waves"], manifest.facts["passes"]


def waves_under_way(lineage: Lineage) -> Waves | None:
    """The plan of which a turn is done, None where there is none."""
    plans = (waves for waves in decided_waves(lineage) if len(waves[0]) > 1)
    try:
        return next((one for one in plans if records(lineage.draft_checkpoint(one).folder)), None)
    except MissingInput:  # no vocabulary, so nothing is trained
        return None
