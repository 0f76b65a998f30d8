from pathlib import Path

import pytest

from eagle3_pipeline.errors import Busy
from eagle3_pipeline.staging import FAILED_SUFFIX, NO_ROOM_SUFFIX, staging_folder, temporary_name


def test_staging_is_empty_before_and_after_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    file = tmp_path / "cmpl-1-0.safetensors"
    leftovers = [
        file,
        temporary_name(file),
        *(Path(f"{file}{end}") for end in (NO_ROOM_SUFFIX, FAILED_SUFFIX)),
    ]
    (tmp_path / "notes.txt").touch()
    for path in leftovers:
        path.touch()
    with staging_folder(tmp_path):
        assert not any(path.exists() for path in leftovers)
        file.touch()
    assert not file.exists()
    assert (tmp_path / "notes.txt").exists()


def test_two_processes_never_share_a_staging_folder(tmp_path: Path) -> None:
    with staging_folder(tmp_path), pytest.raises(Busy), staging_folder(tmp_path):
        pass
    with staging_folder(tmp_path):
        pass
