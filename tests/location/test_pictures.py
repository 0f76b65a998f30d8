"""Pictures and plotted numbers of the steps, from invented facts: opaque, white, of the right things."""

import base64
import io
import re
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest
import torch

from assets import acceptance_report, draft_checkpoint, hidden_state_shards, sample_audit, synthetic_samples
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.scales import scales_of
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.recipe import Recipe, load_recipe
from tests.location.conftest import ROOT
from tests.release.made import REPORT

RECIPE: Recipe = load_recipe("smollm2-cpu", ROOT / "recipes")
LENGTHS = {"completion_lengths": {"edges": [0, 8, 16], "counts": [3, 5]}}
TRAINED = {
    "loss_curve": {"steps": [10, 20, 30], "loss": [9.0, 6.0, 5.0]},
    "validation_curve": {"steps": [15, 30], "epochs": [1, 2], "acceptance_length": [1.2, 1.3]},
    "simulated_acceptance_by_position": [0.2, 0.1],
}


def _manifest(**facts: Any) -> Manifest:
    return Manifest("any", "f" * 64, (), facts=facts, made_by={})


def _pixels(value: Any) -> Any:
    """The picture in a Markdown value, as an array `[height, width, RGBA]` between 0 and 1."""
    from matplotlib.image import imread

    assert isinstance(value, dg.MarkdownMetadataValue)
    found = re.fullmatch(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", value.value)
    assert found is not None
    return imread(io.BytesIO(base64.b64decode(found[1], validate=True)), format="png")


def _audited(*shares: float) -> dict[str, Any]:
    shards = {f"p100-s{number:03d}": {"truncated_share": share} for number, share in enumerate(shares)}
    return sample_audit._pictures(RECIPE, _manifest(**LENGTHS), shards)


def _extracted(scales: Sequence[float]) -> Manifest:
    layers = [2, 15, 27][: len(scales)]
    table = {f"the log scale of layer {layer}": one for layer, one in zip(layers, scales, strict=True)}
    return _manifest(layers=[2, 15, 27], layer_table={**table, "the cosine of layers 2 and 15": 0.8})


def test_every_picture_is_opaque_and_white_at_its_edges_so_that_it_reads_on_any_background() -> None:
    shown = {
        **synthetic_samples._pictures(_manifest(**LENGTHS)),
        **_audited(0.1, 0.2),
        **hidden_state_shards._scales(_extracted([1.0, 2.0, 3.0])),
        **draft_checkpoint._pictures(_manifest(**TRAINED)),
        **{f"report_{name}": one for name, one in acceptance_report._pictures(_manifest(**REPORT)).items()},
    }
    pictures = {name: _pixels(one) for name, one in shown.items() if name.endswith("_plot")}
    assert set(pictures) == {
        *("completion_length_plot", "truncated_share_plot", "scale_plot"),
        *("loss_plot", "acceptance_plot", "position_plot", "report_acceptance_plot", "report_speedup_plot"),
    }
    for pixels in pictures.values():
        assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert edge.min() == 1


def test_an_audit_draws_the_truncated_share_of_each_shard_and_says_the_worst() -> None:
    assert _audited(0.1, 0.4, 0.0)["truncated_share_of_worst_shard"] == 0.4
    few, other = (_pixels(_audited(*shares)["truncated_share_plot"]) for shares in ((0.1, 0.4), (0.4, 0.1)))
    assert (few != other).any()


def test_thousands_of_shards_are_one_picture_of_the_usual_size() -> None:
    many = _audited(*(number / 5000 for number in range(2000)))["truncated_share_plot"]
    assert _pixels(many).shape == _pixels(_audited(0.1)["truncated_share_plot"]).shape
    assert len(many.value) < 100_000


@pytest.mark.parametrize(("truncated", "samples", "share"), [(2, 8, 0.25), (0, 8, 0.0), (0, 0, 0.0)])
def test_a_shard_of_samples_has_its_truncated_share_as_a_number(
    truncated: int, samples: int, share: float
) -> None:
    shown = synthetic_samples._shown(_manifest(**LENGTHS, truncated=truncated, samples=samples))
    assert shown["truncated_share"] == share


def test_a_shard_of_states_has_the_scale_of_each_layer_as_a_number_and_a_picture() -> None:
    shown = hidden_state_shards._scales(_extracted([1.25, -0.5, 3.0]))
    assert shown.pop("scale_plot")
    assert shown == {
        "log_scale_of_layer_2": 1.25,
        "log_scale_of_layer_15": -0.5,
        "log_scale_of_layer_27": 3.0,
    }


def test_a_shard_of_too_few_samples_shows_no_scale() -> None:
    assert hidden_state_shards._scales(_extracted([])) == {}


def test_the_scales_are_those_that_a_table_of_layers_tells() -> None:
    table = LayerTable([2, 15])
    for number in range(40):
        generator = torch.Generator().manual_seed(number)
        table.add(torch.randn(50, 2, 64, generator=generator) * torch.tensor([1.0, 8.0])[:, None])
    scales = scales_of({"layers": [2, 15], "layer_table": table.facts()})
    assert scales == pytest.approx({2: 0.0, 15: 2.079}, abs=0.05)
    assert scales_of({"layers": [2, 15], "layer_table": LayerTable([2, 15]).facts()}) == {}


def test_shares_by_position_and_speed_ups_by_set_are_numbers() -> None:
    drafted = draft_checkpoint._numbers(_manifest(**TRAINED))
    assert drafted == {"simulated_acceptance_1": 0.2, "simulated_acceptance_2": 0.1}
    reported = acceptance_report._numbers(_manifest(**REPORT))
    by_position = [reported[f"acceptance_{k}"] for k, _ in enumerate(REPORT["acceptance_by_position"], 1)]
    assert by_position == REPORT["acceptance_by_position"]
    assert reported["speedup/everyday"] == REPORT["sets"]["everyday"]["speedup"]
