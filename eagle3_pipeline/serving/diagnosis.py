"""Why a server died: the last lines of its log, and the likely cause in words."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.errors import ServerDied, ServerError, ServerRefused
from eagle3_pipeline.known_vllm import VERSIONS

_READ_BYTES = 256 * 1024
_TAIL_LINES = 15
_FULL_BYTES = 2**20
_LINE_CHARACTERS = 400
# The marks below a line of a traceback, and what a binding library prints whenever Python ends.
_NOISE = re.compile(r"^[\s^~|]*$|.*\s[\^~]{3,}\s*$|^ - leaked |^nanobind: |^ - \.\.\. skipped remainder")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=123) INFO 01-31 12:00:00 [core.py:10] text" -> "text"
_PREFIX = re.compile(r"^(\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ (\[[^]]*\] )?")
# vLLM's progress bar over the files of the weights, a line for each step.
_WEIGHTS = re.compile(r"checkpoint shards: .*\| (\d+)/(\d+) ")
# No causes: what is merely told, and the engine's settings, which vLLM dumps when it fails.
_HARMLESS = re.compile(
    r"^(\([^)]*\) )?"
    r"((DEBUG|INFO|WARNING) [\d-]+ (?!.*exited unexpectedly)|ERROR [\d-]+ [\d:.]+ \[dump_input\.py)"
)
# The last line of a traceback in the log of a process of the server.
_RAISED = re.compile(r"^\([^)]*\) ERROR [\d-]+ [\d:.]+ \[[^]]*\] [\w.]*(Error|Exception)\b")


@dataclass(frozen=True)
class Cause:
    """A likely cause: how it shows in a log, what to tell, and whether trying again is futile."""

    pattern: re.Pattern[str]
    words: str
    refused: bool


def _cause(pattern: str, words: str, *, refused: bool) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), words, refused)


# The first that is found counts, so the specific ones stand first.
_CAUSES = (
    _cause(
        r"HiddenStatesConnector does not fit this vLLM: .*extraction\.unlisted_vllm",
        "capturing hidden states was not tried with its version of vLLM, only with "
        f"{', '.join(VERSIONS)}. Install that in the server's Python, or set extraction.unlisted_vllm: true",
        refused=True,
    ),
    _cause(
        r"HiddenStatesConnector does not fit this vLLM|cannot import name .* from 'vllm\.|"
        r"No module named 'vllm\.(distributed|v1)\b",
        "its vLLM is not one that the capture of hidden states knows "
        f"({', '.join(VERSIONS)}). Install that in the server's Python",
        refused=True,
    ),
    _cause(
        r"No module named '?vllm",
        "the server's Python has no vLLM. Install it there, or set server.<phase>.python",
        refused=True,
    ),
    _cause(
        r"No module named '?eagle3_pipeline",
        "the server's Python cannot import eagle3_pipeline. Install it there too",
        refused=True,
    ),
    _cause(
        r"Timed out waiting for engine",
        "vLLM's own limit for the start of its engine ran out. Raise server.<phase>.start_timeout_s, which "
        "sets that limit too",
        refused=True,
    ),
    _cause(
        r"address already in use|Errno 98\b|EADDRINUSE",
        "the port is in use by another process. Free it, or leave server.<phase>.port out to get a free one",
        refused=True,
    ),
    _cause(
        r"unrecognized arguments|error: argument |invalid choice:|expected one argument",
        "vLLM does not know a flag or its value. Look at server.<phase>.extra_args and the vLLM version",
        refused=True,
    ),
    _cause(
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "a disk is full. Free space on it (model, cache, /tmp and /dev/shm may be different disks)",
        refused=False,
    ),
    _cause(
        r"driver version is insufficient|driver on your system is too old|no CUDA-capable device|"
        r"CUDA driver initialization failed|found no NVIDIA driver|forward compatibility was attempted",
        "the GPU driver does not fit or shows no GPU. Check `nvidia-smi` and that vLLM's CUDA is not newer",
        refused=True,
    ),
    _cause(
        r"larger than the maximum number of tokens|larger than the available KV cache|"
        r"No available memory for the cache blocks",
        "too little memory for the KV cache. Lower server.<phase>.max_model_len, or raise "
        "gpu_memory_utilization (cpu_kv_cache_gib on the CPU)",
        refused=True,
    ),
    _cause(
        r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|is less than desired GPU memory|"
        r"DefaultCPUAllocator|not enough memory",
        "out of memory. See what else holds memory; lower gpu_memory_utilization or max_num_seqs, "
        "or take more GPUs",
        refused=False,
    ),
    _cause(
        r"Cannot find any model weights|no safetensors|No such file or directory: .*\.safetensors|"
        r"Invalid repository ID or local directory|SafetensorError|does not appear to have a file named|"
        r"is not a local folder and is not a valid model identifier|Can't load the configuration|"
        r"Failed to load (the )?weights|weights were not initialized",
        "the model's weights or config are missing or damaged. Delete the folder of target_model and start "
        "again, or correct target in the recipe",
        refused=True,
    ),
    _cause(
        r"NCCL (error|WARN)|ncclSystemError|ncclUnhandledCudaError|ProcessGroupNCCL.*(timeout|abort)",
        "the GPUs cannot talk to each other (NCCL). Set NCCL_DEBUG=INFO in extra_env and look at the log",
        refused=False,
    ),
    _cause(
        r"Segfault encountered",
        "a process of it crashed in native code: vLLM or one of its libraries cannot do what it was asked. "
        "Change the settings (expert_parallel on the CPU is known for this) or the version of vLLM",
        refused=False,
    ),
    _cause(
        r"Worker proc \S+ died unexpectedly|engine core exited unexpectedly",
        "a process of it was killed or crashed; the kernel kills when memory runs out (see `dmesg`)",
        refused=False,
    ),
    _cause(
        r"ValidationError|is not supported|not supported for|does not support|NotImplementedError|"
        r"must be divisible|trust_remote_code|Unknown quantization|parser '[^']*' not found",
        "vLLM refuses this combination of model and settings",
        refused=True,
    ),
)


def read_lines(log: Path) -> list[str]:
    """The last lines of a log (at most 256 KiB): no colours, no blank lines, progress bars as they ended."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            # A log that was cut while it is written begins with zeros.
            text = file.read(_READ_BYTES).decode(errors="replace").replace("\0", "")
    except OSError:
        return []
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in _ANSI.sub("", text).split("\n"))
    return [line for line in lines if line]


def news(log: Path) -> str:
    """The last line of a log that tells a person something, without its prefix, in at most 120 characters."""
    lines = [line for line in read_lines(log) if not line.startswith((" ", "\t")) and "GET /" not in line]
    # A line of vLLM's own logging before what libraries print around it.
    logged = [line for line in lines if _PREFIX.match(line) or _WEIGHTS.search(line)]
    if logged and (weights := _WEIGHTS.search(logged[-1])):
        return f"weight shards loaded: {weights[1]} of {weights[2]}"
    return _PREFIX.sub("", (logged or lines or ["no output yet"])[-1]).strip()[:120]


def find_cause(lines: Sequence[str]) -> tuple[Cause, str] | None:
    """The likely cause and the last line that shows it, or None. Mere warnings are no causes."""
    lines = [line for line in lines if not _HARMLESS.match(line)]
    for cause in _CAUSES:
        for line in reversed(lines):
            if cause.pattern.search(line):
                return cause, line
    return None


def explain_death(name: str, log: Path, ended: str | None, *, loading: bool) -> ServerError:
    """The error for a dead server: ServerRefused if it died loading because of its settings, else ServerDied.

    `ended` is how its process ended, in words, where that is known.
    """
    lines = read_lines(log)
    found = find_cause(lines)
    words = "no known cause shows in its log"
    if found is not None:
        words = found[0].words
    elif log.parent.is_dir() and shutil.disk_usage(log.parent).free < _FULL_BYTES:
        words = f"the disk of its log is full, so the log may lack it. Free space in {log.parent}"
    elif ended and "SIGKILL" in ended:
        words = "killed from outside; the kernel does so when memory runs out (see `dmesg`)"
    tail = [line for line in lines if not _NOISE.match(line)][-_TAIL_LINES:]
    telling = found[1] if found else next((line for line in lines if _RAISED.match(line)), None)
    if telling is not None and telling not in tail:
        tail = [telling, "...", *tail]
    shown = "\n".join(f"  {line[:_LINE_CHARACTERS]}" for line in tail) or "  (the log is empty)"
    kind = ServerRefused if loading and found is not None and found[0].refused else ServerDied
    when = "while loading" if loading else "after it was ready"
    how = f" with {ended}" if ended else ""
    return kind(f"{name} ended {when}{how}. Likely cause: {words}.\nFrom the end of {log}:\n{shown}")
