"""Rotary settings come out in one form, whichever of the usual forms a config has."""

from typing import Any

import pytest

from eagle3_pipeline.training.rope import rope_parameters, rotates_partly

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, DEFAULT, id="nothing said"),
        pytest.param({"rope_theta": 10000.0, "rope_scaling": None}, DEFAULT, id="transformers 4"),
        pytest.param(
            {"rope_theta": 500000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            YARN,
            id="transformers 4, scaled, type under its old name",
        ),
        pytest.param({"rope_parameters": YARN}, YARN, id="transformers 5"),
        pytest.param(
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
            YARN,
            id="one per layer type",
        ),
        pytest.param(
            {"rope_parameters": {**DEFAULT, "mrope_section": [16, 24, 24]}}, DEFAULT, id="image coordinates"
        ),
        pytest.param(
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            DEFAULT,
            id="image coordinates, transformers 4",
        ),
        pytest.param(
            {"rope_parameters": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 500000.0},
            {**DEFAULT, "rope_theta": 500000.0},
            id="image coordinates, base frequency beside them",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 500000.0},
            YARN,
            id="transformers 5, base frequency beside them",
        ),
        pytest.param(
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5},
            DEFAULT,
            id="a part of each head",
        ),
        pytest.param({"rope_parameters": {**DEFAULT, "rope_dim": 64}}, DEFAULT, id="a part, as a number"),
    ],
)
def test_rotary_settings_have_the_form_of_transformers_5(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert rope_parameters(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        (
            {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0, "rope_dim": 64}, "head_dim": 64},
            False,
        ),
        ({"partial_rotary_factor": 0.5, "rope_theta": 1.0}, True),
        ({"rotary_pct": 0.25}, True),
        ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, True),
        ({"rope_parameters": {**DEFAULT, "rope_dim": 32}, "head_dim": 64}, True),
    ],
)
def test_a_draft_that_is_served_with_a_part_of_each_head_rotated_is_known(
    config: dict[str, Any], expected: bool
) -> None:
    assert rotates_partly(config) is expected
