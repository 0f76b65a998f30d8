"""Which samples train in which wave, known before there are states: the learning rate is planned by them.

`samples.json` in the folder of draft_checkpoint, written once and read by the training of every turn. An
extraction may leave samples out (unusable states), but never adds one. Needs no torch.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.lineage import Lineage

SAMPLES_NAME = "samples.json"
VALIDATION_FOLDER = "validation"  # the states of those that judge: see wave_source.py


@dataclass(frozen=True)
class WaveSamples:
    """The samples of all waves that have a token to propose; each is numbered by its place in `names`."""

    names: list[str]
    """Sample ids, wave after wave."""
    rows: list[int]
    """Rows of each: its tokens, cut as they are extracted, less one (see batches.py)."""
    sizes: list[int]
    """How many of them each wave has."""
    without_supervision: int
    """Samples that are in no list, since no token of theirs can be proposed."""

    def waves(self) -> list[range]:
        """The numbers of the samples of each wave."""
        return [range(*bounds) for bounds in pairwise(accumulate(self.sizes, initial=0))]

    @classmethod
    def read(cls, path: Path) -> "WaveSamples":
        """Read the file; raises DamagedFile."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DamagedFile(
                f"{path} is no list of samples ({error}). Delete it: it is written again from the samples."
            ) from error


def write_wave_samples(lineage: Lineage, waves: Sequence[Sequence[str]], path: Path) -> None:
    """Go through the samples of all shards, wave by wave, and write the file; a minute for 25,000 samples."""
    from eagle3_pipeline.extraction.plan import planned_shard

    names: list[str] = []
    rows: list[int] = []
    sizes: list[int] = []
    without = 0
    for wave in waves:
        before = len(names)
        for shard in wave:
            for sample in planned_shard(lineage, shard).samples:
                if _is_supervised(sample.loss_mask):
                    names.append(sample.sample_id)
                    rows.append(len(sample.token_ids) - 1)
                else:
                    without += 1
        sizes.append(len(names) - before)
    write_json(path, asdict(WaveSamples(names, rows, sizes, without)))


def _is_supervised(loss_mask: Iterable[int]) -> bool:
    """Whether a row has a label: two tokens of the target side by side, as batches.supervised_rows has it."""
    return any(one and other for one, other in pairwise(islice(loss_mask, 1, None)))
