"""Rows of a Hugging Face dataset, streamed at one commit."""

from collections.abc import Iterator
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.parsing import COMPANION_COLUMNS
from eagle3_pipeline.prompts.sources import Row
from eagle3_pipeline.recipe.settings import PromptSource

_SHUFFLE_BUFFER_ROWS = 10_000  # about 50 MB of conversations


def name_of(source: PromptSource) -> str:
    """What rows of a source are called: the file's name, or the dataset with its subset."""
    if source.path is not None:
        return source.path.name
    return f"{source.dataset}/{source.subset}" if source.subset else str(source.dataset)


def pin(source: PromptSource) -> str:
    """What a recipe says of the version of a dataset; a commit belongs to it."""
    return f"{source.dataset}@{source.revision}"


def resolve_revision(source: PromptSource) -> str:
    """The commit that a dataset's revision stands for now; raises BadInput."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(str(source.dataset), revision=source.revision).sha
    except Exception as error:  # of the hub, its transport and its cache: some twenty classes
        raise _unreadable(source, error) from error
    return commit or source.revision


def stream_dataset(source: PromptSource, commit: str, seed: int) -> Iterator[Row]:
    """Rows of a dataset at a commit, shuffled by `seed` in a buffer while they stream.

    Raises BadInput, also in the middle: for a row that does not fit the columns, or when the network is lost.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(
            source.dataset, source.subset, revision=commit, split=source.split, streaming=True
        )
        if dataset.features is not None:
            dataset = _project(dataset, source)
        shuffled = dataset.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER_ROWS)
        for number, value in enumerate(shuffled, start=1):
            yield Row(name_of(source), number, value, source.column)
    except BadInput:
        raise
    except Exception as error:
        raise _unreadable(source, error) from error


def _project(dataset: Any, source: PromptSource) -> Any:
    """Where a column is named, that one and those that count beside it; raises BadInput if there is none."""
    names = list(dataset.features)
    if source.column is None:
        return _undecoded(dataset)
    if source.column not in names:
        raise BadInput(
            f"dataset {name_of(source)} has no column {source.column!r}, there are: {', '.join(names)}. "
            "Name one of them as the source's column."
        )
    wanted = [name for name in names if name == source.column or name in COMPANION_COLUMNS]
    return _undecoded(dataset.select_columns(wanted))


def _undecoded(dataset: Any) -> Any:
    """Images, audio and video as they are stored: a row is only asked whether it has any."""
    import datasets

    features = dataset.features.copy()
    for feature in features.values():
        element = getattr(feature, "feature", feature)  # of a list
        if isinstance(element, datasets.Image | datasets.Audio | datasets.Video):
            element.decode = False
    return dataset.cast(features)


def _unreadable(source: PromptSource, error: Exception) -> BadInput:
    subset = f", subset {source.subset}" if source.subset else ""
    return BadInput(
        f"dataset {source.dataset}{subset}, revision {source.revision}, split {source.split} cannot be read: "
        f"{type(error).__name__}: {error}. Check the names, the network and HF_TOKEN, or download it and "
        "give its path."
    )
