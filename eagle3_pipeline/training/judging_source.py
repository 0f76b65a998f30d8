"""The samples that judge, with what the target itself takes for the likeliest token at each of their rows.

A draft is served greedily: its proposal is accepted where it is the target's likeliest token, over the
target's whole vocabulary and not only over the draft's. So that token takes the place of the text's as the
label of a row:

    position         p    p+1    p+2
    token            a    b      c           c was written after y_(p+1)
    last layer            y_(p+1)
    label            head(norm(y_(p+1))) is likeliest: c, where the reply is greedy and the states are right

The product with the whole head is made once for each of these samples, block by block, and only ids are
kept. In a greedy reply nearly all of them are the text; where fewer are, it is not greedy, or the states are
of another model, and an acceptance length counted by them is no promise for serving.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.training.batches import SampleSource, supervised_rows

logger = logging.getLogger(__name__)

# Greedy replies of SmolLM2 agree in 98.4 %: near ties go either way (see extraction/meaning.py).
_LEAST_AGREEMENT = 0.9


class JudgingSource:
    """A SampleSource that adds `choices` to the samples in `judges`: the labels of their rows."""

    def __init__(
        self,
        source: SampleSource,
        judges: Sequence[int],
        read_head: Callable[[], Head],
        device: torch.device,
    ) -> None:
        """`read_head` is called when a judge is read first; the products are made on `device`."""
        self._source = source
        self._judges = dict.fromkeys(judges)
        self._read_head = read_head
        self._device = device
        self._choices: dict[int, torch.Tensor] = {}
        self._agreement = 0.0

    def __len__(self) -> int:
        return len(self._source)

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask of one sample, `[tokens]`."""
        return self._source.loss_mask(index)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""
        self._source.prefetch(indices)

    def name(self, index: int) -> str:
        """The sample's id."""
        return self._source.name(index)

    def read(self, index: int) -> Mapping[str, torch.Tensor]:
        """One sample, and for one that judges its `choices` `[S]`, one for each supervised row."""
        sample = self._source.read(index)
        if index not in self._judges:
            return sample
        self._choose()
        return {**sample, "choices": self._choices[index]}

    @property
    def greedy_agreement(self) -> float:
        """Share of the tokens of these replies, from the second on, that are the target's likeliest."""
        self._choose()
        return self._agreement

    def _choose(self) -> None:
        if self._choices:
            return
        head = self._read_head().to(self._device)
        chosen: dict[int, torch.Tensor] = {}
        agreed = rows = 0
        for index in self._judges:
            sample = self._source.read(index)
            at = supervised_rows(sample["loss_mask"])
            states = sample["hidden_states"][at + 1, -1].to(self._device)
            chosen[index] = head.outlook(states, temperature=1, top_p=1, top_k=1).likeliest.cpu()
            agreed += int((chosen[index] == sample["token_ids"][at + 2]).sum())
            rows += len(at)
        self._choices, self._agreement = chosen, agreed / rows
        if self._agreement < _LEAST_AGREEMENT:
            logger.warning(
                "%.1f %% of the tokens of the %d replies that judge are the target's likeliest ones by their "
                "hidden states, expected nearly all: the replies are not greedy, or the states are of "
                "another model. Acceptance lengths are then no promise for serving. Look at `sampling` of "
                "these samples in synthetic_samples, and make their states again if that is right.",
                *(100 * self._agreement, len(self._judges)),
            )
