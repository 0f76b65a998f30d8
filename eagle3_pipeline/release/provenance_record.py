"""provenance.json: every setting, and the fingerprint and digest of all that the draft was made from."""

from typing import Any

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.provenance import fingerprint, git_commit, versions
from eagle3_pipeline.release.names import target_name, without_secrets_and_paths


def provenance_record(lineage: Lineage) -> dict[str, Any]:
    """JSON values that name no folder of this machine and hold no secret; raises MissingInput.

    They follow from what the release is made of, not from when it is made or where it is published.
    """
    recipe = lineage.recipe
    # Who owns the assets is nobody's business where the draft is published.
    settings = recipe.model_dump(mode="json", exclude={"owner": True, "release": {"folder", "publish"}})
    single = [lineage.target_model(), lineage.prompts(), lineage.sample_audit()]
    single += [chosen(lineage).vocabulary_map()]
    single += [lineage.base_draft()] if recipe.base_draft is not None else []
    single += [lineage.draft_checkpoint(), lineage.acceptance_report()]
    made = {place.asset: _entry(place.require()) for place in single}
    for place_of in (lineage.synthetic_samples, lineage.hidden_state_shards):
        places = [place_of(shard) for shard in recipe.shards]
        made[places[0].asset] = _range_entry(places)
    return {
        "format": 1,
        "target": target_name(recipe.target),
        "recipe": without_secrets_and_paths(settings),
        "alternative": lineage.draft_checkpoint().require().facts.get("alternative"),
        "lineage": dict(sorted(made.items())),
        "versions": versions(),
        "commit": git_commit(),
    }


def _entry(manifest: Manifest) -> dict[str, Any]:
    return {
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest,
        "made_at": manifest.made_at,
        "made_by": manifest.made_by,
    }


def _range_entry(places: list[Place]) -> dict[str, Any]:
    manifests = [place.require() for place in places]
    return {
        "fingerprint": fingerprint([one.fingerprint for one in manifests]),
        "digest": fingerprint([one.digest for one in manifests]),
        "shards": {str(one.shard): _entry(one) for one in manifests},
    }
