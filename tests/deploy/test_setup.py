"""The set-up of a machine: lock files, Makefile, scripts/setup.sh, Dagster's own settings."""

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# It takes a tenth of a second; the rest is for a machine on which a server starts at the same moment.
AT_ONCE_S = 5.0


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "name", ["torchvision", "torchaudio", "torchcodec", "triton", "llm", "llama-cpp-python"]
)
def test_what_breaks_or_bloats_a_cpu_environment_stays_out_of_its_lock(name: str) -> None:
    assert name not in lock("lock-cpu.txt")


@pytest.mark.parametrize(
    ("locks", "wanted"),
    [
        pytest.param(["lock-cpu.txt"], PROJECT["dependencies"] + EXTRAS["cpu"] + EXTRAS["demo"], id="cpu"),
        pytest.param(["lock-gpu.txt"], PROJECT["dependencies"] + EXTRAS["gpu"], id="gpu"),
        pytest.param(["lock-cpu.txt", "lock-dev.txt"], EXTRAS["dev"], id="dev"),
    ],
)
def test_lock_satisfies_each_dependency_of_the_project(locks: list[str], wanted: list[str]) -> None:
    locked = {name: version for file in locks for name, version in lock(file).items()}
    missed = [
        f"{text}: locked {locked.get(canonicalize_name(Requirement(text).name))}"
        for text in wanted
        if (version := locked.get(canonicalize_name(Requirement(text).name))) is None
        or not Requirement(text).specifier.contains(version, prereleases=True)
    ]
    assert missed == []


def test_locks_follow_the_pins() -> None:
    locked = lock("lock-gpu.txt") | lock("lock-cpu.txt")
    strayed = {
        name: (pin, locked.get(name))
        for name, pin in lock("pins.txt").items()
        if locked.get(name, "").split("+")[0] != pin
    }
    assert strayed == {}


def test_development_tools_repeat_nothing_of_the_runtime_lock() -> None:
    assert not set(lock("lock-cpu.txt")) & set(lock("lock-dev.txt"))


def test_only_the_library_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["include"] == ["eagle3_pipeline", "eagle3_pipeline.*"]


def test_pyproject_leaves_the_workspace_to_workspace_yaml() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert not {"dagster", "dg"} & set(tools)


def test_workspace_loads_a_file_that_exists() -> None:
    [origin] = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert (ROOT / origin["python_file"]["relative_path"]).exists()


def test_dagster_accepts_the_instance_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster import DagsterInstance

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.telemetry_enabled is False
        assert instance.run_monitoring_enabled
        assert not instance.run_retries_max_retries


@pytest.mark.parametrize(
    "document", sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md")}), ids=lambda p: p.name
)
def test_make_targets_named_in_the_documents_exist(document: Path) -> None:
    # In code alone: in prose, `make` is a verb.
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", document.read_text(), re.DOTALL))
    named = set(re.findall(r"\bmake ([a-z-]+)", code))
    assert named <= makefile_targets()


def test_plain_make_lists_each_target_and_starts_nothing() -> None:
    done = subprocess.run(["make", "--silent"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines()} == makefile_targets()


@pytest.mark.parametrize("script", ["scripts/setup.sh", ".ci/run"])
def test_script_is_executable_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def checkout(folder: Path) -> Path:
    """As much of the project as scripts/setup.sh looks at, with no environment yet."""
    for name in (
        "scripts/setup.sh",
        "requirements/lock-cpu.txt",
        "requirements/lock-dev.txt",
        "pyproject.toml",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def fake(folder: Path, name: str, script: str) -> str:
    """A command that answers in place of the real one; returns the PATH on which it is found first."""
    command = folder / "fake" / name
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def set_up(folder: Path, path: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": path} | settings
    environment.pop("EAGLE3_SKIP_PLATFORM_CHECK", None)
    command = [folder / "scripts/setup.sh"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("command", "answer", "message"),
    [
        ("uname", '[ "$1" = -s ] && echo Darwin || echo arm64', "this is Darwin on arm64"),
        ("uname", '[ "$1" = -s ] && echo Linux || echo aarch64', "this is Linux on aarch64"),
        ("grep", "exit 1", "no AVX2"),
        ("awk", "echo 8000000", "7 GiB of memory; a server and the training beside it need 15 GiB"),
        ("df", 'printf "Filesystem\\nx 9 9 2097152 9 /\\n"', "2 GiB free"),
    ],
    ids=["macOS", "arm", "no AVX2", "little memory", "little disk"],
)
def test_setup_refuses_the_wrong_machine_at_once(
    tmp_path: Path, command: str, answer: str, message: str
) -> None:
    folder = checkout(tmp_path)
    began = time.monotonic()
    done = set_up(folder, fake(tmp_path, command, answer))
    assert time.monotonic() - began < AT_ONCE_S
    assert done.returncode == 1
    assert message in done.stderr
    assert not (folder / ".venv").exists()


def test_setup_without_a_python_that_it_can_use_names_the_package_to_install(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    for name in ("python3", "python3.12"):
        fake(tmp_path, name, "exit 127")
    done = set_up(folder, fake(tmp_path, "python3.11", "exit 127"))
    assert done.returncode == 1
    assert "apt-get install python3.11" in done.stderr


def part_of_setup(folder: Path, function: str) -> Path:
    """scripts/setup.sh beside itself, running one function in place of the whole."""
    text = (folder / "scripts/setup.sh").read_text()
    part = folder / "scripts" / f"{function}.sh"
    part.write_text(text.replace('\nmain "$@"\n', f"\n{function}\n"))
    return part


def test_setup_that_is_complete_returns_at_once_and_prints_nothing(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    command = ["bash", part_of_setup(folder, "fingerprint")]
    stamp = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / ".venv").mkdir()
    (folder / ".venv/ready").write_text(stamp)
    began = time.monotonic()
    done = set_up(folder, os.environ["PATH"])
    assert time.monotonic() - began < AT_ONCE_S
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_step_that_fails_shows_the_end_of_its_log_and_leaves_no_stamp(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    # A python that passes for 3.11 and breaks when it is to make an environment.
    broken = fake(
        tmp_path, "python3.11", 'case "$*" in *venv*--clear*) echo "no room"; exit 5;; *) exit 0;; esac'
    )
    done = set_up(folder, broken, EAGLE3_PYTHON=str(tmp_path / "fake/python3.11"))
    assert done.returncode == 1
    assert "no room" in done.stderr
    assert '"virtual environment" failed' in done.stderr
    assert not (folder / ".venv/ready").exists()


@pytest.mark.parametrize("has_wheel", [True, False])
def test_torch_is_asked_for_plainly_first_and_then_from_pytorchs_cpu_index(
    tmp_path: Path, has_wheel: bool
) -> None:
    folder = checkout(tmp_path)
    asked = tmp_path / "asked"
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    found = "true" if has_wheel else "false"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\ncase "$*" in *--index-url*) exit 0;; *) {found};; esac\n'
    )
    python.chmod(0o755)
    part = part_of_setup(folder, "install_torch")
    subprocess.run(["bash", part], check=True, capture_output=True)
    plain, *others = asked.read_text().splitlines()
    assert plain.endswith("+cpu")
    assert "index-url" not in plain
    assert ["whl/cpu" in line and line.endswith("+cpu") for line in others] == ([] if has_wheel else [True])


def test_packages_cut_off_while_being_unpacked_are_not_taken_for_installed(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    site = folder / ".venv/lib/python3.11/site-packages"
    for name in ("whole-1.0.dist-info", "cut-1.0.dist-info", "~ninstalled"):
        (site / name).mkdir(parents=True)
    (site / "whole-1.0.dist-info/RECORD").touch()
    subprocess.run(["bash", part_of_setup(folder, "drop_unfinished")], check=True, capture_output=True)
    assert [entry.name for entry in site.iterdir()] == ["whole-1.0.dist-info"]


def test_locks_and_setup_name_no_package_host_but_pytorchs_own() -> None:
    texts = [
        *ROOT.glob("requirements/*"),
        ROOT / "scripts/setup.sh",
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
    ]
    hosts = {
        host
        for path in texts
        if path.is_file()
        for host in re.findall(r"https?://([\w.-]+)", path.read_text())
    }
    assert hosts <= {"download.pytorch.org", "127.0.0.1"}
