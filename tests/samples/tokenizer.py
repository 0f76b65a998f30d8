"""A small real tokenizer without a model: bytes, and a few merges."""

from pathlib import Path
from typing import Any

END = "<|end|>"


def make_tokenizer(folder: Path) -> Any:
    """Write a byte-level BPE tokenizer that merges `the` to a folder and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return fast
