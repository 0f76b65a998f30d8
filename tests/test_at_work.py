"""The lock that says that a step works on a recipe."""

import subprocess
import sys
from pathlib import Path

from eagle3_pipeline.at_work import at_work, is_at_work

HOLD = (
    "import sys, pathlib; from eagle3_pipeline.at_work import at_work\n"
    "with at_work(pathlib.Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
)


def test_a_folder_that_is_not_there_or_was_never_worked_in_is_free(tmp_path: Path) -> None:
    assert not is_at_work(tmp_path / "none")
    assert not is_at_work(tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_work_beside_each_other_and_the_last_one_frees_the_folder(tmp_path: Path) -> None:
    with at_work(tmp_path / "recipe"):
        with at_work(tmp_path / "recipe"):
            assert is_at_work(tmp_path / "recipe")
        assert is_at_work(tmp_path / "recipe")
    assert not is_at_work(tmp_path / "recipe")


def test_a_process_that_is_killed_works_no_longer_and_its_children_do_not_count(tmp_path: Path) -> None:
    child = "import subprocess; subprocess.Popen(['sleep', '5'], stdout=subprocess.DEVNULL)"
    hold = HOLD.replace("print", f"exec({child!r}); print")
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        assert is_at_work(tmp_path)
        process.kill()
        process.wait()
        assert not is_at_work(tmp_path)


def test_a_folder_that_is_made_is_for_its_user_alone_and_one_that_is_there_stays_as_it_is(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for folder, mode in ((tmp_path / "root" / "recipe", 0o700), (shared, 0o755)):
        with at_work(folder):
            assert folder.stat().st_mode & 0o777 == mode
