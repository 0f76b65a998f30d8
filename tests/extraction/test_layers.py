import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.extraction.layers import check_layers, from_output_of_layer, to_output_of_layer


def test_ids_counted_by_output_convert_to_ids_counted_by_input_and_back() -> None:
    assert from_output_of_layer([1, 14, 26, 29]) == (2, 15, 27, 30)
    assert to_output_of_layer((2, 15, 27, 30)) == (1, 14, 26, 29)


def test_the_embedding_is_the_output_of_no_layer() -> None:
    with pytest.raises(RecipeError, match="embedding"):
        to_output_of_layer([0, 3])


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
