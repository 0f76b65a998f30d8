import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.extraction.space import SpaceWatch


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    now = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: now)
    return lambda count: setattr(now, "free", count)


def test_the_work_ends_before_the_disk_is_full(tmp_path: Path, free: Callable[[int], None]) -> None:
    times = iter(range(10))
    watch = SpaceWatch(tmp_path, keep_free=1 << 30, clock=lambda: float(next(times)))
    watch.wrote(1 << 35)
    free(1 << 29)
    with pytest.raises(
        NotEnoughRoom, match=r"0.50 GiB are free .* storage.keep_free_gib wants 1.00 GiB left"
    ):
        watch.wrote(1)


def test_the_disk_is_looked_at_once_a_second(tmp_path: Path, free: Callable[[int], None]) -> None:
    now = [0.0]
    watch = SpaceWatch(tmp_path, keep_free=1 << 30, clock=lambda: now[0])
    watch.wrote(1)
    free(0)
    watch.wrote(1)
    now[0] = 1.0
    with pytest.raises(NotEnoughRoom):
        watch.wrote(1)


def test_the_budget_of_the_recipe_is_never_exceeded(tmp_path: Path) -> None:
    watch = SpaceWatch(tmp_path, keep_free=0, budget=3 << 30)
    watch.wrote(3 << 30)
    with pytest.raises(
        NotEnoughRoom, match=r"storage.max_gib is reached: .* 3.00 GiB were left at the start"
    ):
        watch.wrote(1)
