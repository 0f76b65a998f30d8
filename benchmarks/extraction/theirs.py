"""speculators' client, `speculators generate-offline-data --validate-outputs`, on the samples of a benchmark.

    python -m benchmarks.extraction.theirs --endpoint ... --preprocessed-data ...       its own options

It waits for vLLM's own connector, which holds a lock file until a file is complete. The server's connector
here names a file and lets it appear when it is complete, without locks. So this command is theirs with one
change: a lock file stands for a file that is still to come, and waiting for the lock is waiting for that
file, where and as asynchronously as in the original.
"""

import importlib
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.generation.process import Usage, run
from eagle3_pipeline.staging import staging_folder, wait_for_file

_COMMAND = "speculators.cli.generate_offline_data"
_SECONDS = re.compile(r"Timing:\s+([\d.]+)s\s+elapsed")
_CPU = re.compile(r"CPU of the work: ([\d.]+) s")
_LOCK_SUFFIX = ".lock"
_FILE_LIMIT_S = 120.0


def write_dataset(folder: Path, samples: list[list[int]]) -> Path:
    """The samples as its `prepare-data` leaves them."""
    from datasets import Dataset

    masks = [[1] * len(ids) for ids in samples]
    rows = Dataset.from_dict({"input_ids": samples, "loss_mask": masks}).with_format("torch")
    rows.save_to_disk(folder)
    return folder


def generate(
    folder: Path, dataset: Path, base_url: str, staging: Path, in_flight: int, count: int
) -> tuple[Usage, dict[str, float]]:
    """Run it in `folder` on all `count` samples; what it used, and seconds and CPU without imports.

    Holds the staging folder, which it knows nothing of. Raises RuntimeError unless there is a file for each
    sample.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.extraction.theirs"]
    command += ["--endpoint", f"{base_url}/v1", "--preprocessed-data", str(dataset), "--output", "states"]
    command += ["--concurrency", str(in_flight), "--validate-outputs", "--fail-on-error"]
    with staging_folder(staging):
        usage = run(command, folder, {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")})
    files = list((folder / "states").glob("hs_*.safetensors"))
    said = usage.output + (folder / "log.txt").read_text()
    seconds, cpu_s = _SECONDS.search(said), _CPU.search(said)
    if seconds is None or cpu_s is None or len(files) != count:
        raise RuntimeError(f"{len(files)} files for {count} samples in {folder}: {said[-1000:]}")
    return usage, {"seconds": float(seconds[1]), "work_cpu_s": float(cpu_s[1]), "samples": count}


def _let_locks_stand_for_files(module: Any, asked: list[float]) -> None:
    """Put the change into their module, which looks both functions up when it calls them.

    `asked` gets the CPU that the process had used at each request.
    """
    ask = module.generate_hidden_states_async

    async def ask_and_lock(*arguments: Any, **keywords: Any) -> Any:
        asked.append(time.process_time())
        path, parameters = await ask(*arguments, **keywords)
        if not Path(path).exists():
            Path(path + _LOCK_SUFFIX).touch()
        return path, parameters

    async def wait_for_lock(lock: str) -> None:
        await wait_for_file(Path(lock.removesuffix(_LOCK_SUFFIX)), _FILE_LIMIT_S)
        Path(lock).unlink()

    module.generate_hidden_states_async = ask_and_lock
    module.wait_for_lock_async = wait_for_lock


def main() -> None:
    """Run their command with the options of this one."""
    app = importlib.import_module("speculators.cli").app
    asked: list[float] = []
    _let_locks_stand_for_files(sys.modules[_COMMAND], asked)
    try:
        app(["generate-offline-data", *sys.argv[1:]])
    finally:
        if asked:
            print(f"CPU of the work: {time.process_time() - asked[0]:.3f} s")


if __name__ == "__main__":
    main()
