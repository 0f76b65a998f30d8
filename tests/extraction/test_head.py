from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.extraction import head as head_module
from eagle3_pipeline.extraction.head import Head
from tests.extraction.noise import HIDDEN, VOCAB, NoisyLlama


def _vllms(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Probability of the likeliest token, cut as vLLM's apply_top_k_top_p does: from the small end."""
    ordered = (logits.double() / temperature).sort(dim=1).values
    if top_k > 0:
        ordered[:, : max(0, ordered.shape[1] - top_k)] = -torch.inf
    cut = ordered.softmax(1).cumsum(1) <= 1 - top_p
    cut[:, -1] = False
    return ordered.masked_fill(cut, -torch.inf).softmax(1)[:, -1]


@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize("top_k", [-1, 1, 20, 10**6])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_the_likeliest_tokens_probability_is_the_one_that_vllm_samples_with(
    temperature: float,
    top_p: float,
    top_k: int,
    blocks: int,
    llama: NoisyLlama,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "_LOGITS_BYTES", 4 * 40 * -(-VOCAB // blocks))
    states = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        logits = llama.model.lm_head(llama.model.model.norm(states)).float()
    outlook = Head(llama.weights).outlook(states, temperature, top_p, top_k)
    assert (outlook.likeliest == logits.argmax(1)).float().mean() > 0.97  # exact ties aside
    # A flat distribution has more tokens than those among which top-p is found: then the last one is guessed.
    tolerance = 0.02 if top_p < 1 and top_k < 1 else 0.002
    assert outlook.probability.double() == pytest.approx(
        _vllms(logits, temperature, top_p, top_k), rel=tolerance, abs=1e-4
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("logit_scale", 0.25, lambda logits: logits * 0.25),
        ("logits_scaling", 4.0, lambda logits: logits / 4),
        ("final_logit_softcapping", 3.0, lambda logits: (logits / 3).tanh() * 3),
    ],
)
def test_what_a_model_family_does_to_its_logits_is_done(
    name: str, value: float, expected: Callable[[torch.Tensor], torch.Tensor], llama: NoisyLlama
) -> None:
    states = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        logits = expected(llama.model.lm_head(llama.model.model.norm(states)).float())
    weights = replace(llama.weights, config=llama.weights.config | {name: value})
    outlook = Head(weights).outlook(states, 1.0, 1.0, -1)
    assert outlook.probability == pytest.approx(logits.softmax(1).amax(1), rel=0.002)


def test_a_target_without_an_rms_norm_is_refused(llama: NoisyLlama) -> None:
    config = {name: one for name, one in llama.weights.config.items() if name != "rms_norm_eps"}
    with pytest.raises(BadInput, match="no rms_norm_eps"):
        Head(replace(llama.weights, config=config))
