"""The states of a training as speculators has them: a table of samples, and one file of states per sample.

DATA/
    data-*.arrow ...                 input_ids, loss_mask, seq_len: what `prepare-data` leaves
    hidden_states/hs_0.safetensors   hidden_states [tokens, layers, hidden], token_ids [tokens]: what
    ...                              `generate-offline-data` leaves
    d2t-4096.npy, t2d-4096.npy       the vocabulary, under the names by which `train` finds it
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.vocabulary.mapping import read_mapping


def write_their_data(folder: Path, plan: TrainingPlan) -> Path:
    """Write all samples of the plan's shards to `folder`, unless it is there, and return it."""
    if folder.exists():
        return folder
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "hidden_states").mkdir(parents=True)
    reader = ShardReader([Path(shard) for shard in plan.shards])
    rows = [_write_sample(unfinished, number, reader[number]) for number in range(len(reader))]
    _write_table(unfinished, rows)
    d2t, t2d = read_mapping(Path(plan.vocabulary))
    for name, mapping in (("d2t", d2t), ("t2d", t2d)):
        np.save(unfinished / f"{name}-{len(d2t)}.npy", mapping.numpy())
    unfinished.rename(folder)
    return folder


def draft_tokens(data: Path) -> int:
    """Size of the vocabulary in a folder that `write_their_data` wrote."""
    return int(next(data.glob("d2t-*.npy")).stem.removeprefix("d2t-"))


def _write_sample(folder: Path, number: int, sample: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import save_file

    kept = {name: sample[name].contiguous() for name in ("hidden_states", "token_ids")}
    save_file(kept, folder / "hidden_states" / f"hs_{number}.safetensors")
    ids = sample["token_ids"].tolist()
    return {"input_ids": ids, "loss_mask": sample["loss_mask"].int().tolist(), "seq_len": len(ids)}


def _write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    from datasets import Dataset
    from datasets.utils import disable_progress_bars

    disable_progress_bars()
    Dataset.from_list(rows).with_format("torch").save_to_disk(folder)
