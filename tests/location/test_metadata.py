"""What a run leaves behind for a person: metadata, pictures, green partitions, failures in plain words.

Manifests are invented; nothing of the pipeline runs.
"""

import base64
import os
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import acceptance_report, draft_checkpoint, synthetic_samples
from assets.identity import asset_key, identity, partition_key, shard_partitions, shards_of
from assets.outcome import announce, metadata, observe, outcome, range_outcome
from assets.step import step
from eagle3_pipeline import errors
from eagle3_pipeline.errors import DamagedFile, Eagle3Error, QualityError, ServerDied
from eagle3_pipeline.generation.lengths import Bounds
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import FileEntry, Manifest, Place
from eagle3_pipeline.recipe import Recipe, load_recipe
from resources.console import news_logger
from tests.evaluation import invented
from tests.location.conftest import ROOT
from tests.release.made import REPORT

PNG = b"\x89PNG\r\n\x1a\n"
OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Eagle3Error)]
RECIPE: Recipe = load_recipe("smollm2-cpu", ROOT / "recipes")
SAMPLES = asset_key(RECIPE, "synthetic_samples")


def _manifest(asset: str, shard: str | None = None, **facts: Any) -> Manifest:
    files = (FileEntry("a.bin", 1000, "a" * 64), FileEntry("b.bin", 24, f"{shard}"))
    return Manifest(asset, "f" * 64, files, facts=facts, made_by={"commit": "0123abc"}, shard=shard)


def _place(folder: Path, asset: str) -> Place:
    return Place(folder, asset, "f" * 64, {})


def _png_of(value: Any) -> bytes:
    """The picture in a Markdown value."""
    assert isinstance(value, dg.MarkdownMetadataValue)
    found = re.fullmatch(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", value.value)
    assert found is not None
    return base64.b64decode(found[1], validate=True)


# --- metadata


def test_metadata_says_where_a_thing_lies_how_large_it_is_and_its_facts(tmp_path: Path) -> None:
    facts = {"samples": 8, "speedup": 1.5, "complete": True, "model": "tiny", "skipped": {"too_long": 2}}
    manifest = _manifest("synthetic_samples", **facts)
    assert metadata(manifest, tmp_path) == {
        "path": dg.MetadataValue.path(str(tmp_path)),
        "bytes": 1024,
        "digest": manifest.digest[:12],
        "fingerprint": "f" * 12,
        "commit": "0123abc",
        "samples": 8,
        "speedup": 1.5,
        "complete": True,
        "model": "tiny",
        "skipped": dg.MetadataValue.json({"too_long": 2}),
    }


def test_an_outcome_has_the_digest_as_its_data_version_and_takes_pictures_along(tmp_path: Path) -> None:
    manifest = _manifest("prompts", count=400)
    picture = dg.MetadataValue.md("![x](data:)")
    result = outcome(_place(tmp_path, "prompts"), manifest, plot=picture)
    assert result.metadata == {**metadata(manifest, tmp_path), "plot": picture}
    assert result.data_version == dg.DataVersion(manifest.digest[:16])


def test_the_version_of_a_range_changes_with_any_of_its_shards() -> None:
    one, two, other = (_manifest("synthetic_samples", shard) for shard in ("s0", "s1", "other"))
    versions = {range_outcome(shards).data_version for shards in ([one, two], [one, other], [one])}
    assert len(versions) == 3
    assert range_outcome([one, two]).data_version in versions


# --- pictures


@pytest.mark.parametrize(
    ("module", "facts", "names"),
    [
        (
            synthetic_samples,
            {"completion_lengths": {"edges": [0, 8, 16], "counts": [3, 5]}},
            "completion_length_plot",
        ),
        (acceptance_report, REPORT, "acceptance_plot speedup_plot"),
    ],
    ids=["synthetic_samples", "acceptance_report"],
)
def test_a_picture_is_markdown_that_carries_a_png(module: Any, facts: dict[str, Any], names: str) -> None:
    pictures = module._pictures(_manifest("any", **facts))
    assert set(pictures) == set(names.split())
    assert all(_png_of(picture).startswith(PNG) for picture in pictures.values())


def test_a_report_shows_its_tables_and_none_of_what_was_not_measured() -> None:
    whole = acceptance_report._tables(_manifest("acceptance_report", **invented.report()))
    assert set(whole) == {
        *("acceptance_by_set", "speed_by_set", "beside_the_base", "by_settings", "simulated_and_served"),
    }
    table = whole["acceptance_by_set"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data["set"] for record in table.records] == ["gsm8k", "mt_bench", "all"]
    nothing = {"base": None, "simulation": None, "simulation_agrees": None, "simulation_ratio": None}
    less = acceptance_report._tables(_manifest("acceptance_report", **invented.report(**nothing)))
    assert set(whole) - set(less) == {"beside_the_base", "simulated_and_served"}


TRAINED = {
    "loss_curve": {"steps": [1, 2, 3], "loss": [9.0, 6.0, 5.0]},
    "validation_curve": {"steps": [2, 3], "epochs": [1, 2], "acceptance_length": [1.2, 1.3]},
    "simulated_acceptance_by_position": [0.2, 0.1],
}
SWEEP = [
    {
        "alternative": name,
        "settings": {"learning_rate": rate},
        "acceptance_length": length,
        "loss": length and 3.5,
        "steps": length and 3,
        "seconds": length and 9.5,
        "validation_curve": TRAINED["validation_curve"] if length else None,
        "failed": None if length else "loss nan at step 7",
        "folder": name * 12,
    }
    for name, rate, length in (("a", 0.5, None), ("b", 1e-4, 1.2), ("c", 1e-3, 1.3))
]


def test_a_draft_shows_how_its_loss_and_its_acceptance_went() -> None:
    pictures = draft_checkpoint._pictures(_manifest("draft_checkpoint", **TRAINED))
    assert set(pictures) == {"loss_plot", "acceptance_plot", "position_plot"}
    assert all(_png_of(picture).startswith(PNG) for picture in pictures.values())


def test_alternatives_are_one_table_the_best_first_and_one_plot(tmp_path: Path) -> None:
    manifest = _manifest("draft_checkpoint", **TRAINED, alternative="c", sweep=SWEEP)
    pictures = draft_checkpoint._pictures(manifest)
    assert _png_of(pictures.pop("sweep_plot")).startswith(PNG)
    shown = outcome(_place(tmp_path, "draft_checkpoint"), manifest, **pictures).metadata
    assert shown["alternative"] == "c"
    table = shown["sweep"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data["alternative"] for record in table.records] == ["c", "b", "a"]
    assert table.records[0].data == {
        "alternative": "c",
        "settings": '{"learning_rate": 0.001}',
        "acceptance_length": 1.3,
        "loss": 3.5,
        "steps": 3,
        "seconds": 9.5,
        "failed": "",
        "folder": "c" * 12,
    }
    assert table.records[2].data["failed"] == "loss nan at step 7"


HISTORY = {
    "seconds": [0.0, 5.0],
    "limit": [64.0, 72.0],
    "running": [60.0, 70.0],
    "waiting": [0.0, 2.0],
    "tokens_per_second": [0.0, 900.0],
    "kv_cache_usage": [0.0, 0.4],
}


@pytest.mark.parametrize(
    "history", [HISTORY, {}, {name: [] for name in HISTORY}], ids=["measured", "none", "no rows"]
)
def test_what_the_server_showed_is_two_pictures_and_no_heap_of_numbers(
    history: dict[str, list[float]], tmp_path: Path
) -> None:
    lengths = {"edges": [0, 8], "counts": [3]}
    manifest = _manifest("synthetic_samples", completion_lengths=lengths, server_history=history)
    pictures = synthetic_samples._pictures(manifest)
    wanted = {"in_flight_plot", "speed_plot"} if history is HISTORY else set()
    assert set(pictures) == {"completion_length_plot"} | wanted
    assert all(_png_of(picture).startswith(PNG) for picture in pictures.values())
    assert "server_history" not in metadata(manifest, tmp_path)


# --- observations


def _vitals(done: int, before: int = 0, total: int = 25_000) -> Vitals:
    return Vitals(
        total=total,
        before=before,
        in_flight=200,
        server_starts=False,
        verdicts={"good": done - before},
        errors={},
        requests_per_second=2.1,
        tokens_per_second=3000.0,
        requests_per_second_mean=2.0,
        tokens_per_second_mean=2900.0,
        mean_length=1402.0,
        corrected_length=Bounds(1655.0, 1655.0),
        seconds_left=Bounds(4000.0, 6000.0),
    )


def test_a_training_is_observed_as_it_goes_and_never_more_than_a_hundred_times() -> None:
    start = {"event": "start", "step": 0, "steps": 5000, "epochs": 3}
    values = {"loss": 3.0, "accuracy": [0.4], "tokens_per_second": 900.0, "seconds_left": 60}

    @dg.asset(**identity(RECIPE, "draft_checkpoint", {"pytorch"}))
    def training(context: dg.AssetExecutionContext) -> None:
        on_event = draft_checkpoint._observe(context, RECIPE)
        on_event(start)
        for number in range(1, 5001):
            on_event({"event": "step", "step": number, "steps": 5000, "epoch": 0, "epochs": 3, **values})

    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize([training], instance=instance).success
        records = instance.fetch_observations(asset_key(RECIPE, "draft_checkpoint"), limit=1000).records
    assert len(records) == 95  # three are left to epochs, two to what comes before and after
    assert records[0].asset_observation is not None
    newest = {name: value.value for name, value in records[0].asset_observation.metadata.items()}
    assert newest.pop("news").startswith("step 5,000/5,000, epoch 1/3: loss 3.000")
    assert newest == {
        "step": 5000.0,
        "loss": 3.0,
        "tokens_per_second": 900.0,
        "seconds_left": 60.0,
        "accuracy_1": 0.4,
    }


def _lineage() -> Lineage:
    return Lineage(RECIPE, Path(os.environ["EAGLE3_STORAGE"]))


def _observations(attempts: list[list[Vitals]]) -> list[dict[str, Any]]:
    """Metadata of what is observed in a run whose attempts hear of these vitals."""
    left = [list(beats) for beats in attempts]

    @dg.asset(
        **identity(RECIPE, "synthetic_samples", {"parquet"}),
        partitions_def=shard_partitions(RECIPE),
        retry_policy=dg.RetryPolicy(max_retries=len(left) - 1),
    )
    def sampling(context: dg.AssetExecutionContext) -> None:
        on_pulse = observe(context, SAMPLES)
        with step(_lineage()):
            for vitals in left.pop(0):
                on_pulse(vitals)
            if left:
                raise ServerDied("once more")

    with dg.DagsterInstance.ephemeral() as instance:
        assert _materialize(sampling, instance)
        records = instance.fetch_observations(SAMPLES, limit=1000).records
    found = []
    for record in records:
        assert record.asset_observation is not None
        found.append({name: value.value for name, value in record.asset_observation.metadata.items()})
    return found[::-1]


def test_a_run_of_25000_beats_is_observed_a_hundred_times_in_numbers_that_can_be_plotted() -> None:
    seen = _observations([[_vitals(done) for done in range(25_001)]])
    assert [one["done"] for one in seen] == [250.0 * percent for percent in range(1, 101)]
    for one in seen:
        assert one.pop("pulse").startswith(f"{one['done']:,.0f}/25,000 replies, 200 in flight, ")
        assert all(type(value) is float for value in one.values())
    assert seen[0]["seconds_left_high"] == 6000


def test_attempts_of_one_run_share_the_hundred() -> None:
    first = [_vitals(done, total=400) for done in range(0, 203)]
    second = [_vitals(done, before=202, total=400) for done in range(202, 401)]
    done = [one["done"] for one in _observations([first, second])]
    assert len(done) == len(set(done)) == 100


# --- partitions


def _sampling(folder: Path, breaks_at: int | None) -> dg.AssetsDefinition:
    """An asset like synthetic_samples that announces two shards and raises before the one of this number."""

    @dg.asset(**identity(RECIPE, "synthetic_samples", {"parquet"}), partitions_def=shard_partitions(RECIPE))
    def sampling(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        on_shard = announce(
            context,
            RECIPE,
            lambda shard: _place(folder / shard, "synthetic_samples"),
            lambda made: {"plot": dg.MetadataValue.md(f"of {made.shard}")},
        )
        made = []
        with step(_lineage()):
            for number, shard in enumerate(shards_of(context, RECIPE)):
                if number == breaks_at:
                    raise QualityError("the next shard is bad")
                made.append(_manifest("synthetic_samples", shard, samples=8 + number))
                on_shard(shard, made[-1])
        return range_outcome(made)

    return sampling


def _materialize(sampling: dg.AssetsDefinition, instance: dg.DagsterInstance) -> bool:
    first, last = (partition_key(RECIPE, shard) for shard in RECIPE.shards[:2])
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    return dg.materialize([sampling], instance=instance, tags=tags, raise_on_error=False).success


def _seen(instance: dg.DagsterInstance, shard: str) -> dict[str, Any]:
    """Metadata of the latest event of a shard's partition."""
    only = dg.AssetRecordsFilter(SAMPLES, asset_partitions=[partition_key(RECIPE, shard)])
    event = instance.fetch_materializations(only, limit=1).records[0].asset_materialization
    assert event is not None
    return dict(event.metadata)


def test_a_shard_that_was_announced_stays_materialized_when_the_step_then_fails(tmp_path: Path) -> None:
    first = RECIPE.shards[0]
    with dg.DagsterInstance.ephemeral() as instance:
        assert not _materialize(_sampling(tmp_path, breaks_at=1), instance)
        assert instance.get_materialized_partitions(SAMPLES) == {partition_key(RECIPE, first)}
        seen = _seen(instance, first)
    assert seen["path"] == dg.MetadataValue.path(str(tmp_path / first))
    assert seen["bytes"] == dg.MetadataValue.int(1024)
    assert seen["samples"] == dg.MetadataValue.int(8)
    assert seen["plot"] == dg.MetadataValue.md(f"of {first}")


def test_after_a_whole_range_each_shard_shows_its_own_numbers(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert _materialize(_sampling(tmp_path, breaks_at=None), instance)
        for number, shard in enumerate(RECIPE.shards[:2]):
            seen = _seen(instance, shard)
            assert seen["path"] == dg.MetadataValue.path(str(tmp_path / shard))
            assert seen["digest"].value == _manifest("synthetic_samples", shard).digest[:12]
            assert seen["samples"] == dg.MetadataValue.int(8 + number)


# --- failures


@pytest.mark.parametrize("kind", OURS)
def test_an_error_of_ours_fails_the_step_in_its_own_words_and_says_whether_to_retry(
    kind: type[Eagle3Error],
) -> None:
    with pytest.raises(dg.Failure) as failure, step(_lineage()):
        raise kind("found this, expected that")
    assert failure.value.description == f"{kind.__name__}: found this, expected that"
    assert failure.value.allow_retries == kind.retryable


def test_another_attempt_is_only_made_where_it_could_help() -> None:
    assert {kind.__name__ for kind in OURS if kind.retryable} == {
        "Busy",
        "ServerDied",
        "ServerStalled",
        "SourceUnreachable",
    }


def test_any_other_exception_is_never_retried() -> None:
    with pytest.raises(dg.Failure, match="ZeroDivisionError: division by zero") as failure, step(_lineage()):
        print(1 / 0)
    assert not failure.value.allow_retries


def _console(capsys: pytest.CaptureFixture[str], *raised: Exception) -> str:
    """What is printed of a run whose step raises these, one in each attempt, and then succeeds."""
    left = list(raised)

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def prompts() -> None:
        with step(_lineage()):
            if left:
                raise left.pop(0)

    definitions = dg.Definitions(
        [prompts], jobs=[dg.define_asset_job("all")], loggers={"console": news_logger}
    )
    with dg.DagsterInstance.ephemeral() as instance:
        job = definitions.resolve_job_def("all")
        job.execute_in_process({"loggers": {"console": {}}}, instance=instance, raise_on_error=False)
    return capsys.readouterr().out


def test_the_console_shows_a_retry_with_the_innermost_message(capsys: pytest.CaptureFixture[str]) -> None:
    said = _console(capsys, ServerDied("the server ended with signal 9"))
    assert "\n\neagle3_pipeline.errors.ServerDied: the server ended with signal 9\n" in said
    assert "dagster._core" not in said
    assert "Traceback" not in said
    assert 'File "' not in said


def test_the_console_shows_a_failure_of_ours_in_its_own_words_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = _console(capsys, DamagedFile("a.bin: 3 bytes, expected 4"))
    assert "\n\nDamagedFile: a.bin: 3 bytes, expected 4\n" in said
    assert "Traceback" not in said
    assert 'File "' not in said


def test_the_console_shows_a_bug_with_its_place_in_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    said = _console(capsys, KeyError("count"))
    assert "KeyError: 'count'" in said
    assert f'File "{__file__}"' in said
