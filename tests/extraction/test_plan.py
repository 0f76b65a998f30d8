from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.extraction.plan import is_compared


@given(first=st.text(min_size=1), samples=st.integers(0, 2000))
def test_one_in_a_hundred_samples_of_a_shard_is_compared(first: str, samples: int) -> None:
    compared = sum(is_compared(first, position) for position in range(samples))
    assert samples // 100 <= compared <= -(-samples // 100)


def test_small_shards_have_their_share_of_compared_samples() -> None:
    compared = sum(is_compared(f"{shard}-t0", position) for shard in range(2000) for position in range(10))
    assert 150 < compared < 250
