"""What the asset `sample_audit` shows of an audit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import sample_audit
from assets.checks import check_samples, failed_quality, passed_quality
from assets.outcome import metadata
from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.samples.audit import audit_samples, shards_of_audit
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, iter_samples, write_samples
from tests.generation.world import make_lineage
from tests.samples.test_audit import make_samples
from tests.samples.tokenizer import make_tokenizer


def test_the_table_has_a_row_per_shard_and_the_plot_all_lengths(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    lineage = make_lineage(tmp_path, [1] * 20, 10)
    make_samples(lineage, "p10-s000", ["good"] * 9 + ["truncated"])
    make_samples(lineage, "p10-s001", ["good"] * 9 + ["empty"], tokens=(4, 8))
    shown = sample_audit._pictures(lineage.recipe, audit_samples(lineage), shards_of_audit(lineage))
    table = shown["quality_by_shard"]
    assert isinstance(table, dg.TableMetadataValue)
    first, second = (record.data for record in table.records)
    assert first == {
        "shard": "p10-s000",
        "samples": 10,
        "good": 9,
        "truncated share": 0.1,
        "rejected share": 0,
        "degenerate share": 0,
        "median tokens": 6,
        "drift": 0,
    }
    assert (second["rejected share"], second["median tokens"]) == (0.1, 8)
    assert shown["completion_length_plot"].value.startswith("![completion lengths](data:image/png;base64,")


def test_without_a_drift_its_column_is_left_out(tmp_path: Path) -> None:
    lineage = make_lineage(tmp_path, [1] * 10, 10)
    make_samples(lineage, "p10-s000", ["good"] * 10)
    shown = sample_audit._pictures(lineage.recipe, audit_samples(lineage), shards_of_audit(lineage))
    assert "drift" not in shown["quality_by_shard"].records[0].data


def test_the_data_version_has_verdict_layers_form_and_waves_and_nothing_of_the_samples(
    tmp_path: Path,
) -> None:
    def version(folder: str, tokens: int, **extraction: Any) -> str:
        settings = {"layers": [1, 2, 3, 4], **extraction}
        lineage = make_lineage(tmp_path / folder, [1] * 30, 10, extraction=settings)
        for shard in lineage.recipe.shards:
            make_samples(lineage, shard, ["good"] * 10, tokens=(4, tokens))
        return sample_audit._version(lineage.recipe, audit_samples(lineage)).value

    assert version("a", 6) == version("b", 7) == "passed-layers-1-2-3-4-bf16-all-waves-3-passes-1"
    in_waves = version("c", 6, precision="fp8", kept="trained", waves=2, passes=3)
    assert in_waves == "passed-layers-1-2-3-4-fp8-trained-waves-2-1-passes-3"


HOSTILE = "<script>alert('evil')</script> ![evil](http://evil/x.png) [evil](javascript:evil) | `evil`\n# evil"


@pytest.mark.parametrize("verdicts", [["good"] * 9 + ["truncated"], ["degenerate"] * 10])
def test_no_text_of_a_reply_gets_into_metadata_or_a_check(tmp_path: Path, verdicts: list[str]) -> None:
    lineage = make_lineage(tmp_path, [1] * 10, 10)
    make_samples(lineage, "p10-s000", verdicts)
    place = lineage.synthetic_samples("p10-s000")
    path, facts = place.folder / SAMPLES_NAME, place.require().facts
    told = [replace(one, content=HOSTILE, reasoning=HOSTILE) for one in iter_samples(path)]
    write_samples(path, told)
    made = place.finish([path], facts)
    assert "evil" in next(iter_samples(path)).content
    shown: list[Any] = [metadata(made, place.folder), check_samples(lineage.recipe, [made])]
    if "good" in verdicts:
        audited = audit_samples(lineage)
        shown += [metadata(audited, tmp_path), passed_quality(audited), shards_of_audit(lineage)]
    else:
        with pytest.raises(QualityError) as failed:
            audit_samples(lineage)
        shown.append(failed_quality(lineage.recipe, str(failed.value)))
    assert "evil" not in repr(shown)
