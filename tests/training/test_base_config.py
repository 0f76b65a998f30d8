"""What a base draft's config means: which layers feed it, however they are counted, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.training.base_config import (
    attention_of,
    aux_layers,
    layer_of,
    norm_flags,
    read_config,
    require_layers,
)

_IDS = "eagle_aux_hidden_state_layer_ids"
_BASE = Path("the-draft")
_KIMI = 61


def _nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {_IDS: list(ids), "use_aux_hidden_state": True}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 30, 58)),
        ({"eagle_config": {_IDS: []}}, (2, 30, 58)),
        ({_IDS: [1, 29, 57]}, (1, 29, 57)),
        ({"transformer_layer_config": {"hidden_size": 1}, _IDS: [1, 29, 57]}, (1, 29, 57)),
        (_nested(1, 29, 57), (2, 30, 58)),
        (_nested(2, 30, 58), (2, 30, 58)),
        (_nested(24, 30, 61), (24, 30, 61)),
        ({**_nested(5, 30, 50), _IDS: [1, 29, 57]}, (1, 29, 57)),  # vLLM takes those beside the rest
    ],
)
def test_layers_are_counted_by_where_the_ids_stand_and_what_they_are(
    config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert aux_layers(_BASE, config, _KIMI, "auto") == expected


def test_a_numbering_that_cannot_be_known_is_asked_for_with_both_readings() -> None:
    with pytest.raises(BadInput, match=r"draws on the layers \[5, 30, 50\].*which are \[6, 31, 51\] in"):
        aux_layers(_BASE, _nested(5, 30, 50), _KIMI, "auto")
    assert aux_layers(_BASE, _nested(5, 30, 50), _KIMI, "input") == (5, 30, 50)
    assert aux_layers(_BASE, _nested(5, 30, 50), _KIMI, "output") == (6, 31, 51)
    assert aux_layers(_BASE, {_IDS: [1, 29, 57]}, _KIMI, "output") == (2, 30, 58)


def test_other_layers_are_refused_with_the_layers_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_nested(1, 29, 57)))
    assert require_layers(tmp_path, _KIMI, (2, 30, 58), "auto") == (2, 30, 58)
    with pytest.raises(BadInput, match=r"has \[1, 29, 57\] before the last: set it to \[2, 30, 58, 61\]"):
        require_layers(tmp_path, _KIMI, (1, 29, 57), "auto")


def test_norm_flags_are_read_where_each_project_writes_them() -> None:
    config = {"norm_before_residual": True, "eagle_config": {"norm_before_fc": True}}
    assert norm_flags(config) == {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "takes no hidden states of middle layers .*"),
        ({"logit_scale": 0.25}, "scales its logits by 0.25"),
        ({"num_hidden_layers": 2}, "has 2 decoder layers"),
        ({"partial_rotary_factor": 0.5}, "rotates only a part of each head .*"),
        ({"transformer_layer_config": {"rope_parameters": {"rope_dim": 64}}}, "rotates only a part .*"),
        (
            {"eagle_config": {"norm_before_fc": True}, "fc_norm": True},
            "has norm_before_fc and fc_norm at once",
        ),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"{message}, which training does not know"):
        read_config(tmp_path)


@pytest.mark.parametrize("ids", [["1", "2", "3"], [1, 2.5, 3], [True, 2, 3], 7, {"1": 2}])
@pytest.mark.parametrize("where", ["beside", "nested"])
def test_layers_that_are_no_numbers_are_refused(ids: Any, where: str) -> None:
    config = {_IDS: ids} if where == "beside" else {"eagle_config": {_IDS: ids}}
    with pytest.raises(BadInput, match="expected whole numbers"):
        aux_layers(_BASE, config, _KIMI, "auto")


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_config": [1]},
        {"rope_scaling": "yarn"},
        {"transformer_layer_config": "llama"},
        {"transformer_layer_config": {"rope_parameters": [1]}},
    ],
)
def test_a_part_of_the_config_that_is_no_mapping_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="expected a mapping"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_config_that_describes_no_draft_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({}, {}),
        ({"sliding_window": 512}, {}),
        ({"layer_types": ["full_attention"], "sliding_window": 512}, {}),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 512},
            {"layer_types": ["sliding_attention"], "sliding_window": 512, "use_sliding_window": True},
        ),
    ],
)
def test_a_window_counts_only_where_the_layers_type_says_so(
    layer: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert attention_of(_BASE, layer) == expected


@pytest.mark.parametrize(
    "layer", [{"layer_types": ["sliding_attention"]}, {"layer_types": ["chunked_attention"]}]
)
def test_an_attention_that_training_does_not_know_is_refused(layer: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="has the attention"):
        attention_of(_BASE, layer)


def test_the_layer_is_nested_or_the_whole() -> None:
    assert layer_of({"hidden_size": 3}) == {"hidden_size": 3}
    assert layer_of({"transformer_layer_config": {"hidden_size": 4}, "hidden_size": 3}) == {"hidden_size": 4}
