import pytest

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.recipe.release import Release
from eagle3_pipeline.release.gate import check_gate


def test_each_number_stands_beside_its_bound() -> None:
    gate = check_gate(Release(min_acceptance_length=1.2), {"acceptance_length": 1.5, "speedup": 0.9})
    assert gate == {
        "acceptance_length": {"measured": 1.5, "bound": 1.2, "passed": True},
        "speedup": {"measured": 0.9, "bound": 0.0, "passed": True},
    }


def test_a_number_on_its_bound_passes() -> None:
    check_gate(
        Release(min_acceptance_length=1.5, min_speedup=1.0), {"acceptance_length": 1.5, "speedup": 1.0}
    )


def test_a_refusal_lists_every_missed_bound() -> None:
    release = Release(min_acceptance_length=2.0, min_speedup=1.1)
    with pytest.raises(QualityError) as refusal:
        check_gate(release, {"acceptance_length": 1.5, "speedup": 0.9})
    assert "acceptance_length is 1.500, release.min_acceptance_length is 2" in str(refusal.value)
    assert "speedup is 0.900, release.min_speedup is 1.1" in str(refusal.value)


@pytest.mark.parametrize("measured", [None, float("nan"), "fast"])
def test_what_was_not_measured_does_not_pass(measured: object) -> None:
    with pytest.raises(QualityError, match="speedup is not measured"):
        check_gate(Release(), {"acceptance_length": 1.5, "speedup": measured})
