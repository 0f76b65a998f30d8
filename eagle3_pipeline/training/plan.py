"""What one training process does, as one JSON file; the process knows neither recipe nor lineage."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile

FULL_DISK = (
    "Free some space or point EAGLE3_STORAGE to a larger disk, then materialise draft_checkpoint again: it "
    "goes on at its last checkpoint."
)
"""What to do when the disk of a training is full."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Paths, settings and the fingerprint that checkpoints carry. Settings are as in recipe.Training."""

    folder: str
    """Where checkpoints, metrics.jsonl and draft/ are written."""
    target: str
    """Folder of the target model."""
    target_name: str
    """Name of the target in the draft's config: a hub id, where there is one."""
    shards: tuple[str, ...]
    """Folders of the hidden-state shards of this turn, in order."""
    samples: str | None
    """The samples of all waves (wave_samples.py); None where all shards are there at once."""
    turn: int
    """Which of the turns over waves and passes this is, from 0."""
    passes: int
    """How often all waves are gone through; divides `epochs`."""
    vocabulary: str
    """The vocabulary file."""
    base_draft: str | None
    """Folder of the pretrained draft to start from."""
    layers: tuple[int, ...]
    """Layer ids of the hidden states; the last one is the verifier's."""
    model_fingerprint: str
    """Of the target, as its shards must name it."""
    devices: tuple[str, ...]
    """GPU names of the partition; empty for the CPU."""
    processes: int
    """Processes that train together, one for each GPU."""
    validation: tuple[str, ...]
    """Ids of the prompts that judge."""
    epochs: int
    learning_rate: float
    rates: dict[str, float]
    """Share of the learning rate by part: fusion, layer, norm, head."""
    warmup_share: float
    optimizer: str
    weight_decay: float
    pull_to_start: float
    max_gradient_norm: float
    tokens_per_step: int
    accumulation: int
    loss: str
    test_time_steps: int
    step_decay: float
    train_head: bool
    per_layer_norm: bool
    norm_output: bool
    norm_before_residual: bool
    attention_window: int | None
    intermediate_size: int | None
    patience: int | None
    checkpoint_every_s: float
    seed: int
    keep_free_bytes: int
    """What the copy of the validation samples leaves free on the disk."""
    fingerprint: str
    """Of the place, so of every setting and input that decides weights, and the same in all turns.

    A checkpoint of another fingerprint is never continued.
    """

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "TrainingPlan":
        """Read a plan; raises DamagedFile."""
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            lists = {name: tuple(values[name]) for name in ("shards", "layers", "devices", "validation")}
            return cls(**{**values, **lists})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{path} is no training plan ({error}). Start train_draft again.") from error
