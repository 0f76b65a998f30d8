import logging
from pathlib import Path

import pytest

from eagle3_pipeline.serving.readiness import _Progress


def test_progress_is_told_every_ten_seconds_while_it_changes_and_else_every_thirty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3_pipeline")
    log = tmp_path / "log"
    progress = _Progress(log, 600)
    for second in range(100):
        log.write_text(f"step {min(second // 10, 3)}\n")
        progress.tell(float(second))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"loading for {second} of at most 600 s: step {step}"
        for second, step in [(10, 1), (20, 2), (30, 3), (60, 3), (90, 3)]
    ]
