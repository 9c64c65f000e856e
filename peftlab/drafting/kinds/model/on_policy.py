"""Continuations by the draft itself, mixed into training: it learns from its own mistakes (DistillSpec, GKD)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.hidden_states import unwrapped
from peftlab.methods.modes import eval_mode


@dataclass
class OnPolicy:
    """Exchanges each row's continuation, with probability ``share`` (λ), for one the draft writes now.

    Agarwal et al. 2023 (arXiv 2306.13649), Zhou et al. 2023 (arXiv 2310.08461). A rewritten row has the weight
    of the row it replaces, spread over its own tokens, and is at most as long. Randomness comes from torch's
    global generator, whose state checkpoints contain.

    Attributes:
        share: λ. temperature: of the draft's sampling; 0 is greedy. eos: ids that end a continuation.
    """

    share: float
    temperature: float
    eos: frozenset[int]
    _engine: Engine | None = field(init=False, repr=False, default=None)

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with some rows rewritten; keys and shapes stay."""
        chosen = (torch.rand(len(inputs["input_ids"])) < self.share).nonzero().squeeze(-1).tolist()
        seed = int(torch.randint(2**31, ()))
        if not chosen:
            return inputs
        bare = unwrapped(model)
        counts = (inputs["weights"] > 0).sum(1).tolist()
        starts = (inputs["weights"] > 0).int().argmax(1).tolist()
        prompts = [inputs["input_ids"][i, : starts[i] + 1].tolist() for i in chosen]
        with eval_mode(bare):
            if self._engine is None:
                self._engine = build_engine(bare, flat=False)  # reads the weights anew at every step
            outputs = decode(
                self._engine,
                prompts,
                StoppingCriteria(max(counts[i] for i in chosen), self.eos),
                sampling=Sampling(self.temperature, seed=seed),
            )
        inputs = {key: value.clone() for key, value in inputs.items()}
        for i, output in zip(chosen, outputs, strict=True):
            tokens = output.tokens[: counts[i]]
            begin, end = starts[i] + 1, starts[i] + 1 + len(tokens)
            inputs["input_ids"][i, begin:end] = torch.tensor(tokens, device=inputs["input_ids"].device)
            inputs["attention_mask"][i, end:] = 0
            inputs["weights"][i] = 0
            inputs["weights"][i, begin - 1 : end - 1] = counts[i] / len(tokens)
        return inputs
