"""Samples: what the target answered, as token ids, and the judgement of it."""

from eagle3_pipeline.samples.sample import Sample
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, iter_samples, read_samples, write_samples

__all__ = ["SAMPLES_NAME", "Sample", "iter_samples", "read_samples", "write_samples"]
