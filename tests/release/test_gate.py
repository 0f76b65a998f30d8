import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.release.gate import check_gate
from tests.release.made import REPORT, recipe

BASE = {"hub_id": "somebody/a-draft"}
NUMBERS = ("acceptance_length", "position_0", "speedup", "to_base")


def bounds(**least: float) -> list[dict[str, Any]]:
    return [{"number": number, "at_least": value} for number, value in least.items()]


def gated(folder: Path, gate: list[dict[str, Any]], **sections: Any) -> Recipe:
    return recipe(folder, release={"gate": gate}, **sections)


def report(**changes: Any) -> dict[str, Any]:
    spread = {"speedup_least": 1.1, "speedup_most": 1.3, "repeats": 3}
    base = {"acceptance_length": 1.25, "sets": {"everyday": {"acceptance_length": 2.0}}}
    return REPORT | spread | {"base": base} | changes


def test_each_number_stands_beside_its_bound(tmp_path: Path) -> None:
    gate = bounds(acceptance_length=1.2, position_0=0.3, speedup=0.0, to_base=1.0)
    entries = check_gate(gated(tmp_path, gate, base_draft=BASE), report())
    everything = {"set": None, "passed": True}
    assert entries == [
        {"number": "acceptance_length", "measured": 1.5, "at_least": 1.2, **everything},
        {"number": "position_0", "measured": 0.3, "at_least": 0.3, **everything},
        {"number": "speedup", "measured": 1.2, "at_least": 0.0, "least": 1.1, "most": 1.3, **everything},
        {"number": "to_base", "measured": 1.2, "at_least": 1.0, **everything},
    ]


def test_a_bound_on_a_set_is_on_the_numbers_of_that_set(tmp_path: Path) -> None:
    gate = [{"number": number, "at_least": 0.1, "set": "everyday"} for number in NUMBERS]
    of_set = {"acceptance_length": 3.0, "acceptance_by_position": [0.9], "speedup": 1.9}
    entries = check_gate(gated(tmp_path, gate, base_draft=BASE), report(sets={"everyday": of_set}))
    assert [entry["measured"] for entry in entries] == [3.0, 0.9, 1.9, 1.5]
    assert {entry["set"] for entry in entries} == {"everyday"}


def test_by_default_a_draft_must_be_measured_and_not_worse_than_its_base(tmp_path: Path) -> None:
    (alone,) = check_gate(recipe(tmp_path), report(base=None))
    assert (alone["number"], alone["at_least"]) == ("acceptance_length", 1.0)
    warm = recipe(tmp_path, base_draft=BASE)
    assert [entry["number"] for entry in check_gate(warm, report())] == ["acceptance_length", "to_base"]
    with pytest.raises(QualityError, match=r"to_base of all sets is 0\.938, at least 1: MISSED"):
        check_gate(warm, report(base={"acceptance_length": 1.6}))


def test_a_refusal_shows_every_number_against_its_bound(tmp_path: Path) -> None:
    gate = bounds(acceptance_length=2.0, position_0=0.1, speedup=1.25)
    with pytest.raises(QualityError) as refusal:
        check_gate(gated(tmp_path, gate), report())
    head, length, position, speedup = str(refusal.value).splitlines()
    assert head == "the draft is not released: 2 of 3 bounds of release.gate missed"
    assert length.startswith("  acceptance_length of all sets is 1.500, at least 2: MISSED; train on more")
    assert position == "  position_0 of all sets is 0.300, at least 0.1"
    assert speedup.startswith(
        "  speedup of all sets is 1.200 (1.100 to 1.300 over the repeats), at least 1.25: MISSED; "
    )


def test_a_refusal_says_when_the_server_does_not_run_what_training_judged(tmp_path: Path) -> None:
    missed = gated(tmp_path, bounds(acceptance_length=2.0))
    with pytest.raises(QualityError) as refusal:
        check_gate(missed, report())
    assert "simulated" not in str(refusal.value)
    with pytest.raises(QualityError, match=r"1\.600 simulated, 1\.590 served .*They DISAGREE"):
        check_gate(missed, report(simulation_agrees=False))


@pytest.mark.parametrize("measured", [None, float("nan"), "fast"])
def test_what_was_not_measured_does_not_pass(tmp_path: Path, measured: object) -> None:
    with pytest.raises(QualityError, match="speedup of all sets is not measured"):
        check_gate(gated(tmp_path, bounds(speedup=0.0)), report(speedup=measured))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_the_report_lacks_misses_its_bound(tmp_path: Path, number: str) -> None:
    with pytest.raises(QualityError, match=f"{number} of all sets is not measured"):
        check_gate(gated(tmp_path, bounds(**{number: 0.0}), base_draft=BASE), {})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe(tmp_path_factory.mktemp("recipe"))


@given(measured=st.floats(0, 4), bound=st.floats(0, 4))
def test_a_draft_is_released_exactly_if_its_number_is_not_below_the_bound(
    settings: Recipe, measured: float, bound: float
) -> None:
    release = settings.release.model_validate({"gate": bounds(acceptance_length=bound)})
    gated = settings.model_copy(update={"release": release})
    try:
        (entry,) = check_gate(gated, {"acceptance_length": measured})
    except QualityError:
        assert measured < bound
    else:
        assert entry["measured"] == measured >= bound == entry["at_least"]


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ({"number": "speedup", "at_least": 1.0, "set": "gsm8k"}, "no such set, evaluation.sets has everyday"),
        ({"number": "to_base", "at_least": 1.0}, "the recipe has no base_draft"),
        ({"number": "position_0", "at_least": 40.0}, "is at most 1, at_least 40 is never reached"),
        ({"number": "acceptance_length", "at_least": 4.5}, "is at most 4, at_least 4.5 is never reached"),
        ({"number": "speedup", "at_least": float("nan")}, "finite"),
        ({"number": "speed_up", "at_least": 1.0}, "'speedup'"),
        ({"number": "speedup"}, "at_least"),
    ],
)
def test_a_bound_that_no_report_can_answer_is_refused_with_the_recipe(
    tmp_path: Path, bound: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(why)):
        gated(tmp_path, [bound])
