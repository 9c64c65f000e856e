"""Exact laws of randomised functions: every coin and every draw is taken both, or all, ways."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor

from peftlab.decoding import engines
from peftlab.decoding.sampling import RandomSource


@pytest.fixture(params=["flat, compiled", "flat"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The beginning of an engine's kind, with the extra ``fast`` and without it."""
    if request.param == "flat":
        monkeypatch.setattr(engines, "compiled_engine", lambda *_: None)
    else:
        pytest.importorskip("numba")
    return request.param


class Script(RandomSource):
    """RandomSource that follows a script, then takes first options, and records what else was possible."""

    def __init__(self, script: list[int]):
        super().__init__()
        # The base class is frozen: these are this class's own.
        object.__setattr__(self, "script", script)
        object.__setattr__(self, "taken", [])
        object.__setattr__(self, "options", [])
        object.__setattr__(self, "weights", [])

    def _choose(self, weights: list[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        if not possible:  # a row of zeros: "nothing drafted", whatever the index
            possible, weights = [0], [1.0]
        depth = len(self.taken)
        choice = self.script[depth] if depth < len(self.script) else possible[0]
        self.taken.append(choice)
        self.options.append(possible)
        self.weights.append(weights[choice])
        return choice

    def bernoulli(self, probability: Tensor) -> Tensor:
        flips = [self._choose([1 - p, p]) for p in probability.flatten().tolist()]
        return torch.tensor(flips, dtype=torch.bool).reshape(probability.shape)

    def draw(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._choose(row) for row in rows]).reshape(probs.shape[:-1])


def exact_law(step: Callable[[RandomSource], Hashable]) -> dict[Hashable, float]:
    """Return outcome -> probability of ``step``, by running it once for every combination of choices."""
    parts: dict[Hashable, list[float]] = defaultdict(list)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        random = Script(script)
        parts[step(random)].append(math.prod(random.weights))
        for depth in range(len(script), len(random.taken)):
            scripts += [[*random.taken[:depth], other] for other in random.options[depth][1:]]
    return {outcome: math.fsum(weights) for outcome, weights in parts.items()}


class Model:
    """Random next-token distributions, one for each prefix, made when asked for and always the same."""

    def __init__(self, vocab: int, seed: int, zeros: bool = False):
        self.vocab, self.seed, self.zeros = vocab, seed, zeros

    def __call__(self, prefix: tuple[int, ...] = ()) -> Tensor:
        code = sum((x + 1) * 7**i for i, x in enumerate(prefix))
        generator = torch.Generator().manual_seed(1000 * self.seed + code)
        weights = torch.rand(self.vocab, generator=generator, dtype=torch.float64) ** 3
        if self.zeros:
            weights *= torch.rand(self.vocab, generator=generator) < 0.6
            weights[int(torch.randint(self.vocab, (), generator=generator))] += 0.1
        return weights / weights.sum()

    def sequences(self, length: int, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        """Return the law of the first ``length`` tokens, given that they start with ``prefix``."""
        law = {prefix: 1.0}
        while len(next(iter(law))) < length:
            law = {(*s, x): w * p for s, w in law.items() for x, p in enumerate(self(s).tolist())}
        return law


def completed(law: dict[tuple[int, ...], float], target: Model, length: int) -> dict[tuple[int, ...], float]:
    """Return the law of the first ``length`` tokens when the target continues alone after what was emitted."""
    result: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, weight in law.items():
        for sequence, w in target.sequences(length, emitted[:length]).items():
            result[sequence] += weight * w
    return dict(result)


def distance(a: dict, b: dict) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


@pytest.fixture(scope="session")
def enumerate_law():
    return exact_law


@pytest.fixture(scope="session")
def model():
    return Model


@pytest.fixture(scope="session")
def assert_follows():
    """Assert that emitted sequences, gone on with by the target, are distributed as the target's own."""

    def check(law, target, length):
        assert distance(completed(law, target, length), target.sequences(length)) < 1e-12

    return check


@pytest.fixture(scope="session")
def stories_model(stories):
    from peftlab.models.load import load_base

    return load_base(str(stories), "AutoModelForCausalLM")[0]


@pytest.fixture(scope="session")
def stories_tokenizer(stories):
    from peftlab.models.load import load_tokenizer

    return load_tokenizer(str(stories))


@pytest.fixture(scope="session")
def uneven_prompts(stories_tokenizer) -> list[list[int]]:
    """Eight prompts of 1 to some 40 tokens."""
    texts = [
        "",
        "Once upon a time",
        "Lily and Tom went to the park. They saw a big dog. Lily said",
        "The",
        "One day, a little boy named Tim found a red ball in the garden",
        "Mom",
        "There was a bird. The bird was sad because it could not fly. It wanted to fly to the",
        "It was dark and",
    ]
    return [stories_tokenizer(text).input_ids for text in texts]


def hf_greedy(model, prompt: list[int], new: int, eos: int | None = None) -> list[int]:
    """What ``transformers`` generates for one prompt on its own."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0 if eos is None else eos,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def generate_greedy():
    return hf_greedy
