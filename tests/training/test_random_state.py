"""Random numbers of every library go on where they were."""

import json
import random

import numpy as np
import torch

from eagle3_pipeline.training.random_state import random_state, restore_random_state


def test_random_numbers_of_every_library_go_on_after_a_state_went_through_json() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), float(torch.rand(()))]

    before = random_state()
    draw()  # leaves a second Gaussian behind, in both generators that make two at a time
    state = json.loads(json.dumps(random_state()))
    expected = draw()
    draw()
    restore_random_state(state)
    assert draw() == expected
    restore_random_state(before)
