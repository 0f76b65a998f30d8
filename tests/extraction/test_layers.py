import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.extraction.layers import check_layers


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([2, 15, 31], "id 31 is more than the target's 30 layers"),
        ([0, 15, 30], "0 is the embedding"),
        ([2, 15, 27], "lacks 30"),
        ([1, 14, 26, 29], r"Use \[1, 14, 26, 29, 30\]"),
        ([15, 2, 30], "must rise strictly"),
        ([2, 2, 30], "must rise strictly"),
        ([], "must rise strictly"),
        ([30], "at least one layer beside the last"),
        ([-1, 30], "start at 1 or above"),
    ],
)
def test_ids_that_the_target_cannot_give_are_refused_with_what_would_do(ids: list[int], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        check_layers(ids, 30)


def test_good_ids_pass() -> None:
    check_layers((2, 15, 27, 30), 30)
