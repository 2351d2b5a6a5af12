"""Text continuation by sampling one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sample_continuation(
    model: torch.nn.Module, prompt_S: Tensor, num_tokens: int, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """Sample `num_tokens` ids after a prompt, recomputing the last `seq_length` ids of context for each.

    Every expert-parallel rank must call this with the same arguments.

    Args:
        model: a `HybridSparseMoEModel`, or anything that returns `(logits, routing)` for ids alone.
        prompt_S: int64 ids, at least one.
        temperature: divides the logits; 0 takes the most likely token.
        seed: seed of the draws.

    Returns:
        int64 Tensor `[S + num_tokens]`.
    """
    generator = torch.Generator(device=prompt_S.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    ids_S = prompt_S
    context = model.config.seq_length
    for _ in range(num_tokens):
        logits_V = model(ids_S[None, -context:])[0][0, -1].float()
        if temperature == 0:
            next_id = logits_V.argmax()
        else:
            next_id = torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)
        ids_S = torch.cat([ids_S, next_id.reshape(1)])
    model.train(was_training)
    return ids_S
