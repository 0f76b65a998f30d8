"""Whether two captures of the same token ids are the same states, but for rounding."""

import torch

# Per layer, the cosines of the rows of two captures of the same ids. Other company in a batch changes the
# last bits of a rounding (above 0.9999 here); a token that takes other experts for it moves single rows,
# which the median and the lowest tenth leave out. States of another request are far below.
LEAST_COSINE = 0.99
LEAST_OF_TENTH = 0.9
_ROWS_AT_ONCE = 256  # the states of a whole sample as float32 may be gigabytes


def difference(first: torch.Tensor, second: torch.Tensor) -> str | None:
    """How states `[tokens, layers, hidden]` differ by more than rounding, None where they do not."""
    cosines = _cosines(first, second)
    median = cosines.median(dim=0).values
    # Not between two rows: one row of other experts must not spoil a short sample.
    tenth = cosines.quantile(0.1, dim=0, interpolation="higher")
    # Said so that values that are no numbers fail.
    if float(median.min()) >= LEAST_COSINE and float(tenth.min()) >= LEAST_OF_TENTH:
        return None
    return (
        f"cosines by layer {_rounded(median)} (median of the rows), {_rounded(tenth)} (lowest tenth), "
        f"expected {LEAST_COSINE} and {LEAST_OF_TENTH} at least"
    )


def _cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of each row of each layer `[tokens, layers]`; -1 where the shapes differ."""
    if first.shape != second.shape:
        return torch.full((1, 1), -1.0)
    chunks = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, len(first), _ROWS_AT_ONCE))
    return torch.cat(
        [torch.cosine_similarity(first[rows].float(), second[rows].float(), dim=-1) for rows in chunks]
    )


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
