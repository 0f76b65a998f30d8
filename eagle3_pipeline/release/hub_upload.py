"""A version of a release on the Hugging Face Hub.

    main          the newest version, and what people added to it by hand
    v1  v2  ...   tags: set when all files of a version were looked at on the Hub, and never moved

A version is one commit, so nobody ever sees half of one (upload_folder may split it), and it is refused where
somebody else's came in between. What was uploaded before a kill is not sent again: the Hub knows large files
by their hash; the small ones go with the commit.

The token comes from HF_TOKEN and goes into requests only: no message, and no cause of an error, has it.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.errors import BadInput, Busy, Eagle3Error, SourceUnreachable
from eagle3_pipeline.hub import TOKEN_VARIABLE, is_passing
from eagle3_pipeline.manifest import FileEntry
from eagle3_pipeline.recipe.release import Publish
from eagle3_pipeline.release.versions import SUMS_NAME, Version, numbers, other_content

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

logger = logging.getLogger(__name__)

_OF_RELEASES = {SUMS_NAME, "provenance.json"}
_OF_NEW_REPOSITORIES = {".gitattributes", "README.md", "LICENSE"}  # those made in the browser
_REFUSED, _CONFLICTS = (401, 403), (409, 412)


@dataclass(frozen=True)
class _Standing:
    """What the Hub has of a version, and what it lacks."""

    is_there: bool
    """The tag stands, on this content."""
    head: str | None
    """The commit of `main`; None where there is no repository."""
    send: tuple[FileEntry, ...] = ()
    delete: tuple[str, ...] = ()
    """Files of the version before that this one has no more."""


def upload_version(version: Version, home: Path, settings: Publish) -> str:
    """Put a version, numbered in `home`, on the Hub; returns its address, at once where it is there.

    Raises BadInput (no token, or one that may not write; other content has its number; a repository of
    something else), Busy (another commit came in between) and SourceUnreachable.
    """
    hub_id = settings.hub_id
    with _hub(hub_id) as api:
        address = f"{api.endpoint}/{hub_id}/tree/{version.tag}"
        standing = _look(api, version, home, hub_id)
        if standing.is_there:
            return address
        if standing.head is None:
            api.create_repo(hub_id, private=settings.private, exist_ok=True)
            standing = _look(api, version, home, hub_id)
        commit = _commit(api, version, hub_id, standing)
        if lacking := _differences(_files(api, hub_id, commit), version):
            raise BadInput(
                f"{hub_id} did not take {', '.join(entry.path for entry in lacking)} (commit {commit[:12]}). "
                "Does it have a .gitignore? Remove it there, then publish again."
            )
        api.create_tag(hub_id, tag=version.tag, revision=commit, tag_message=f"{version.name} {version.tag}")
    logger.info("%s %s is on the Hub: %s", version.name, version.tag, address)
    return address


def plan_of_upload(version: Version, home: Path, settings: Publish) -> list[str]:
    """What `upload_version` would do, a line for each file; raises as it does, as far as it can be known."""
    with _hub(settings.hub_id) as api:
        standing = _look(api, version, home, settings.hub_id)
    where = f"{settings.hub_id} {version.tag}"
    if standing.is_there:
        return [f"{where}: is there"]
    made = (
        f"a new {'private' if settings.private else 'public'} repository, " if standing.head is None else ""
    )
    size = sum(entry.bytes for entry in standing.send)
    return [
        f"{where}: {made}{len(standing.send)} files to send, {size / 1e6:.1f} MB",
        *(f"  send    {entry.path}  {entry.bytes:,} bytes" for entry in standing.send),
        *(f"  delete  {name}" for name in standing.delete),
    ]


def _look(api: "HfApi", version: Version, home: Path, hub_id: str) -> _Standing:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = api.list_repo_refs(hub_id)
    except RepositoryNotFoundError:
        return _Standing(is_there=False, head=None, send=version.files)
    taken = numbers(one.name for one in refs.tags)
    head = next(one.target_commit for one in refs.branches if one.name == "main")
    if version.number in taken:
        if _differences(_files(api, hub_id, version.tag), version):
            raise other_content(version, home, f"the tag {version.tag} of {hub_id} is another release", taken)
        return _Standing(is_there=True, head=head)
    if taken and taken[-1] > version.number:
        raise other_content(version, home, f"{hub_id} has v{taken[-1]} already", taken)
    files = _files(api, hub_id, head)
    delete = _of_version_before(api, hub_id, head, files) - {entry.path for entry in version.files}
    return _Standing(False, head, _differences(files, version), tuple(sorted(delete)))


def _commit(api: "HfApi", version: Version, hub_id: str, standing: _Standing) -> str:
    """The commit with the version's files: `main` itself where a kill came before the tag."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    assert standing.head is not None, "a repository that was just made has a first commit"
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(entry.path, version.folder / entry.path) for entry in standing.send),
        *(CommitOperationDelete(name) for name in standing.delete),
    ]
    name, size = f"{version.name} {version.tag}", sum(entry.bytes for entry in standing.send) / 1e6
    logger.info("sending %s to %s: %d files, %.1f MB", name, hub_id, len(standing.send), size)
    made = api.create_commit(hub_id, operations, commit_message=name, parent_commit=standing.head)
    return made.oid


def _files(api: "HfApi", hub_id: str, revision: str) -> dict[str, "RepoFile"]:
    from huggingface_hub.hf_api import RepoFile

    found = api.list_repo_tree(hub_id, revision=revision, recursive=True)
    return {one.path: one for one in found if isinstance(one, RepoFile)}


def _differences(files: Mapping[str, "RepoFile"], version: Version) -> tuple[FileEntry, ...]:
    """The version's files that are not on the Hub as they are here."""
    return tuple(
        entry for entry in version.files if not _is_same(files.get(entry.path), version.folder, entry)
    )


def _is_same(file: "RepoFile | None", folder: Path, entry: FileEntry) -> bool:
    if file is None or file.size != entry.bytes:
        return False
    if file.lfs is not None:
        return bool(file.lfs.sha256 == entry.sha256)
    content = (folder / entry.path).read_bytes()  # at most some MB: larger files have their SHA-256
    return bool(file.blob_id == hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest())


def _of_version_before(api: "HfApi", hub_id: str, head: str, files: Mapping[str, "RepoFile"]) -> set[str]:
    """Those of `main`'s files that are of the version before; raises BadInput where it is something else."""
    if not files.keys() >= _OF_RELEASES:
        if strange := sorted(files.keys() - _OF_NEW_REPOSITORIES):
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            raise BadInput(
                f"{hub_id} holds {', '.join(strange[:3])}{more}, and no release, which wants a repository of "
                "its own. Name another one in release.publish.hub_id."
            )
        return set()
    lines = Path(api.hf_hub_download(hub_id, SUMS_NAME, revision=head)).read_text().splitlines()
    return {line.partition("  ")[2] for line in lines} & files.keys()


@contextmanager
def _hub(hub_id: str) -> Iterator["HfApi"]:
    """The Hub's client with the token; what it raises becomes an error of ours, without the token."""
    from huggingface_hub import HfApi

    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not re.fullmatch("[!-~]+", token):  # in a header, any other sign would be shown in an error
        found = "has blanks or signs that no token has" if token else "is not set"
        raise BadInput(
            f"release.publish is given, but {TOKEN_VARIABLE} {found}. Set it to a token that may write to "
            f"{hub_id}, in the environment of what publishes, then publish again."
        )
    try:
        yield HfApi(token=token)
    except Eagle3Error:
        raise
    except Exception as error:  # of the Hub and its transports: some twenty classes
        # Dagster would show a cause, with all that it knows of its request.
        raise _failure(error, hub_id, token) from None


def _failure(error: Exception, hub_id: str, token: str) -> Eagle3Error:
    said = f"{type(error).__name__}: {error}".replace(token, "...")
    status = _status(error)
    if status in _REFUSED:
        return BadInput(
            f"{hub_id} refuses the token in {TOKEN_VARIABLE} ({said}). Set it to one that may write there, "
            "then publish again."
        )
    if status in _CONFLICTS:
        return Busy(
            f"{hub_id} was changed by somebody else while it was published to ({said}). Publish again: it is "
            "looked at anew."
        )
    if is_passing(error):
        return SourceUnreachable(
            f"{hub_id} cannot be reached, or no further ({said}). Another attempt goes on, without sending "
            "what is there; if none helps, check the network and the proxy."
        )
    return BadInput(
        f"{hub_id} cannot be published to ({said}). Check release.publish.hub_id, and what the token in "
        f"{TOKEN_VARIABLE} may do."
    )


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error; threads of the client wrap it."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__ or error.__context__
    return None
