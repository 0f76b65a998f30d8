"""The Llama of random weights, for whoever looks at what states mean."""

from collections.abc import Iterator

import pytest
import torch

from tests.extraction.noise import NoisyLlama


@pytest.fixture(scope="module")
def llama() -> Iterator[NoisyLlama]:
    """On one thread, because threads that wait for each other cost more than this model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield NoisyLlama()
    torch.set_num_threads(threads)
