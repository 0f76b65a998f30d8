"""Tiny target models that the real vLLM serves on a CPU, made in seconds from a seed.

`make_llama` builds a Llama whose weights are laid out by hand, because random weights answer with noise
on which a greedy decoder flips at the smallest rounding difference, and from which a draft learns nothing.
What it computes is a walk through a random graph:

    every token has a state (a code of +-1 in most dimensions of the residual stream) and a bit
    layer 0, head 0 looks back exactly LOOK_BACK tokens (a constant query, turned by RoPE) and brings that
                    token's bit
    the output head knows two tokens per state, and the bit that was brought decides between them

    hidden    0        1         2              3 ...... code ...... scratch ......
              constant own bit   brought bit    state of the token   random layers write here

So the completion depends on the prompt, ends at last (the state END leads to the end-of-turn token), has
a clear winner at each step, and a draft can learn the graph (half of the steps without looking back at all).
All other heads and MLPs are random and write mostly to the scratch dimensions, which the output head does
not read: states of neighbouring layers differ although the answer is fixed.
"""

import json
from pathlib import Path
from typing import Any

from tests.corpus import TEXT

BOS, USER, ASSISTANT, SYSTEM, END = "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
THINK, THOUGHT = "<think>", "</think>"  # so that a reasoning parser finds its marks; the walk never says them
SPECIAL_TOKENS = (BOS, USER, ASSISTANT, SYSTEM, END, THINK, THOUGHT)
LOOK_BACK = 12  # tokens; long enough that greedy walks seldom enter a circle before they end
END_SHARE = 0.08  # share of the tokens whose state leads to the end of the turn: about 25 tokens a reply
HEAD_SIZE = 32  # the smallest that vLLM's CPU attention knows

CHAT_TEMPLATE = (
    "{{ '" + BOS + "' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def make_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 512,
    max_context: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a Llama of `layers` x `hidden` with its tokenizer to `folder` and return it (half a second)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _save_tokenizer(folder, vocab, max_context)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        head_dim=HEAD_SIZE,
        max_position_embeddings=max_context,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        names = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    weights = {name: _random_weight(name, shape, hidden, generator) for name, shape in names.items()}
    _write_walk(weights, _Walk(tokenizer, vocab, hidden, generator), config)
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_deepseek(
    folder: Path,
    *,
    layers: int = 3,
    experts: int = 8,
    experts_per_token: int = 2,
    groups: int = 2,
    scaled_positions: bool = True,
    vocab: int = 512,
    max_context: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a tiny DeepSeek-V3 (MLA, experts, one shared expert) to `folder`; its weights are noise.

    A token uses half of the expert groups. Positions are scaled by YaRN, as in Kimi-K2, or not at all.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = _save_tokenizer(folder, vocab, max_context)
    positions: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled_positions:
        positions |= {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
        positions |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        positions["original_max_position_embeddings"] = max_context // 4
    config = DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=experts,
        num_experts_per_tok=experts_per_token,
        n_group=groups,
        topk_group=max(1, groups // 2),
        topk_method="noaux_tc",  # vLLM asks for it before it takes the router's bias
        scoring_func="sigmoid",  # transformers knows no other; vLLM takes softmax where a config does not say
        rope_parameters=positions,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path, vocab: int, max_context: int) -> Any:
    """Train a byte-level BPE tokenizer on the tests' text and write it the way transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"the tests' text yields {tokenizer.get_vocab_size()} tokens, not {vocab}: lower vocab"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, model_max_length=max_context
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return tokenizer


class _Walk:
    """The random graph: state and bit of every token, and the state and bit that lead to it."""

    def __init__(self, tokenizer: Any, vocab: int, hidden: int, generator: Any) -> None:
        import torch

        self.code_size = (hidden - 3) * 4 // 5
        text = {token: id_ for token, id_ in tokenizer.get_vocab().items() if id_ >= len(SPECIAL_TOKENS)}
        printable = sorted(id_ for token, id_ in text.items() if token.isascii() or token.startswith("Ġ"))
        self.outputs = [tokenizer.token_to_id(END), *printable]
        if len(self.outputs) % 2:
            self.outputs.pop()
        states = len(self.outputs) // 2
        self.codes = (torch.randint(0, 2, (states, self.code_size), generator=generator) * 2 - 1).float()
        self.state = torch.randint(1, states, (vocab,), generator=generator)
        self.state[torch.rand(vocab, generator=generator) < END_SHARE] = 0
        self.state[: len(SPECIAL_TOKENS)] = 1  # no special token is at the end already
        self.bit = (torch.randint(0, 2, (vocab,), generator=generator) * 2 - 1).float()
        order = torch.randperm(len(self.outputs) - 1, generator=generator) + 1
        # State 0 leads to the end-of-turn token; every other one has one state and bit that lead to it.
        self.reached = [self.outputs[0], *(self.outputs[int(index)] for index in order)]


def _random_weight(name: str, shape: tuple[int, ...], hidden: int, generator: Any) -> Any:
    import torch

    if len(shape) == 1:
        return torch.ones(shape)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        weight[: 3 + (hidden - 3) * 4 // 5] *= 0.01  # the walk's dimensions stay almost as they are
    return weight


def _write_walk(weights: dict[str, Any], walk: _Walk, config: Any) -> None:
    """Put the graph into embedding and output head, and the look back into head 0 of layer 0."""
    import torch

    code = slice(3, 3 + walk.code_size)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding.mul_(1.0)[:, 2] = 0
    embedding[:, 0], embedding[:, 1], embedding[:, code] = 1, walk.bit, walk.codes[walk.state]
    head.zero_()
    for number, token in enumerate(walk.reached):
        head[token, code] = walk.codes[number // 2] * (14 / walk.code_size)
        head[token, 2] = 1.5 if number % 2 else -1.5
    attention = {one: weights[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkvo"}
    half = HEAD_SIZE // 2
    frequencies = 1.0 / 10000.0 ** (torch.arange(half) / half)
    sharpness = torch.where(torch.arange(half) < 6, 9.0, 0.0)  # the slow frequencies tell no neighbours apart
    for one in "qkv":
        attention[one][:HEAD_SIZE] = 0
    attention["k"][:half, 0] = sharpness
    attention["q"][:half, 0] = sharpness * torch.cos(LOOK_BACK * frequencies)
    attention["q"][half:HEAD_SIZE, 0] = -sharpness * torch.sin(LOOK_BACK * frequencies)
    attention["v"][0, 1] = 1
    attention["o"][:, :HEAD_SIZE] = 0
    attention["o"][2, :] = 0
    attention["o"][2, 0] = 2
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not name.startswith(
            "model.layers.0.self_attn"
        ):
            weight[2] = 0


def model_facts(folder: Path) -> dict[str, int]:
    """Layers, hidden size and vocabulary of a model folder."""
    config = json.loads((folder / "config.json").read_text())
    return {name: config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
