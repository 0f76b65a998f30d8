"""Rotary settings come out in one form, whichever of the usual forms a config has."""

from typing import Any

import pytest

from eagle3_pipeline.training.rope import rope_parameters

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
    ],
)
def test_rotary_settings_have_the_form_of_transformers_5(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert rope_parameters(config) == expected
