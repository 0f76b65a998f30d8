"""Rows of a Hugging Face dataset, streamed at one commit."""

from collections.abc import Iterator, Sequence
from typing import Any

from eagle3_pipeline.errors import BadInput, Eagle3Error, SourceUnreachable
from eagle3_pipeline.hub import is_passing
from eagle3_pipeline.prompts.parsing import is_some, media_columns, needed_columns
from eagle3_pipeline.prompts.sources import Row
from eagle3_pipeline.recipe.prompts import PromptSource

_SHUFFLE_BUFFER_ROWS = 10_000  # about 50 MB of conversations
_SHUFFLE_INPUT_FILES = 10  # the default of datasets, named because another number is another order
_ROWS_AT_ONCE = 100  # with their images, before those become flags
_NAMES = "Check the names and HF_TOKEN, or download it and give its path."


def name_of(source: PromptSource) -> str:
    """What rows of a source are called: the file's name, or the dataset with its subset."""
    if source.path is not None:
        return source.path.name
    return f"{source.dataset}/{source.subset}" if source.subset else str(source.dataset)


def pin(source: PromptSource) -> str:
    """What a recipe says of the version of a dataset; a commit belongs to it."""
    return f"{source.dataset}@{source.revision}"


def resolve_revision(source: PromptSource) -> str:
    """The commit that a dataset's revision stands for now; raises BadInput and SourceUnreachable."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(str(source.dataset), revision=source.revision).sha
    except Exception as error:  # of the hub, its transport and its cache: some twenty classes
        raise _unreadable(source, error) from error
    return commit or source.revision


def stream_dataset(source: PromptSource, commit: str, seed: int) -> Iterator[Row]:
    """Rows of a dataset at a commit, shuffled by `seed` in a buffer while they stream.

    Of media in columns there is only whether a row has any. Raises BadInput, also in the middle for rows
    that do not fit the first ones, and SourceUnreachable when the network or the hub is lost.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    try:
        dataset = datasets.load_dataset(
            source.dataset, source.subset, revision=commit, split=source.split, streaming=True
        )
        shuffled = _reduce(dataset, source).shuffle(
            seed=seed, buffer_size=_SHUFFLE_BUFFER_ROWS, max_buffer_input_shards=_SHUFFLE_INPUT_FILES
        )
        for number, value in enumerate(shuffled, start=1):
            yield Row(name_of(source), number, value, source.column)
    except Eagle3Error:
        raise
    except (CastError, DatasetGenerationError) as error:
        raise _unreadable(
            source,
            error,
            "Some rows have other columns or types than the first ones, which a stream cannot have. "
            "Download it and give its path: a local file is read row by row.",
        ) from error
    except Exception as error:
        raise _unreadable(source, error) from error


def _reduce(dataset: Any, source: PromptSource) -> Any:
    """The dataset with what prompts can need; raises BadInput if there is no column of the source's name."""
    import datasets

    features = dataset.features
    if features is None:  # a JSON list: its columns and types are known once it is read
        features = datasets.Features.from_arrow_schema(next(iter(dataset.with_format("arrow"))).schema)
    _check_column(list(features), source)
    names = needed_columns(features, source.column)
    features = datasets.Features({name: features[name] for name in names}).copy()
    _leave_undecoded(features)
    dataset = dataset.select_columns(names).cast(features)
    if not media_columns(names, source.column):
        return dataset
    return dataset.map(
        _flag_media, batched=True, batch_size=_ROWS_AT_ONCE, fn_kwargs={"column": source.column}
    )


def _check_column(names: Sequence[str], source: PromptSource) -> None:
    if source.column is not None and source.column not in names:
        raise BadInput(
            f"dataset {name_of(source)} has no column {source.column!r}, there are: {', '.join(names)}. "
            "Name one of them as the source's column."
        )


def _leave_undecoded(feature: Any) -> None:
    """Images, audio and video as they are stored, at any depth."""
    import datasets

    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
        feature.decode = False
    elif isinstance(feature, dict):
        for inner in feature.values():
            _leave_undecoded(inner)
    elif (inner := getattr(feature, "feature", None)) is not None:  # of a list
        _leave_undecoded(inner)


def _flag_media(batch: dict[str, list[Any]], column: str | None) -> dict[str, list[bool]]:
    return {name: [is_some(value) for value in batch[name]] for name in media_columns(batch, column)}


def _unreadable(source: PromptSource, error: Exception, way_out: str = _NAMES) -> Eagle3Error:
    subset = f", subset {source.subset}" if source.subset else ""
    what = (
        f"dataset {source.dataset}{subset}, revision {source.revision}, split {source.split} cannot be read: "
        f"{type(error).__name__}: {error}."
    )
    if is_passing(error):
        return SourceUnreachable(
            f"{what} Another attempt may reach it; if none does, check the network and the proxy, "
            "or download it and give its path."
        )
    return BadInput(f"{what} {way_out}")
