"""Where a finished release goes: it gets its number, is copied to a folder, and put on the Hub.

    <storage root>/<recipe slug>/released/<name>/v1  v2  latest     links, always: see versions.py
    <release.folder>/<name>/v1  v2  latest                          copies: see folder_copy.py
    release.publish.hub_id                                          a tag per version: see hub_upload.py

The same content has the same number in all three. What is there already is left alone, so whatever was
interrupted is made up for by the next call.
"""

from pathlib import Path

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.release.folder_copy import copy_version, plan_of_copy
from eagle3_pipeline.release.hub_upload import plan_of_upload, upload_version
from eagle3_pipeline.release.names import release_name
from eagle3_pipeline.release.versions import find_version, number_release


def publish(lineage: Lineage) -> dict[str, str]:
    """Publish the release as the recipe says: `version`, `released`, and where given `copy` and `hub`.

    Raises MissingInput (no release yet), DamagedFile (the release was changed, or something else is in the
    place of its versions), BadInput (a version of other content; the Hub), NotEnoughRoom, Busy (another
    process publishes there) and SourceUnreachable (the Hub).
    """
    place, settings, home = lineage.released_draft(), lineage.recipe.release, home_of(lineage)
    version = number_release(home, home.name, place.folder, place.verify().files)
    where = {"version": version.tag, "released": str(home / version.tag)}
    if settings.folder is not None:
        where["copy"] = str(copy_version(version, home, settings.folder))
    if settings.publish is not None:
        where["hub"] = upload_version(version, home, settings.publish)
    return where


def plan_of_publishing(lineage: Lineage) -> list[str]:
    """What `publish` would do, a line for each thing, and for each file on the Hub; nothing is changed.

    Raises what `publish` would, but for NotEnoughRoom.
    """
    place, settings, home = lineage.released_draft(), lineage.recipe.release, home_of(lineage)
    version, is_there = find_version(home, home.name, place.folder, place.require().files)
    lines = [f"{home / version.tag}: {'is there' if is_there else 'a new version'}"]
    if settings.folder is not None:
        lines.append(plan_of_copy(version, home, settings.folder))
    if settings.publish is not None:
        lines += plan_of_upload(version, home, settings.publish)
    return lines


def home_of(lineage: Lineage) -> Path:
    """The folder of all versions of the recipe's release; raises RecipeError for a name that is none."""
    return lineage.folder / "released" / release_name(lineage.recipe)
