import pytest

from eagle3_pipeline.duration import in_words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_a_duration_is_in_the_unit_that_a_person_would_take(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
