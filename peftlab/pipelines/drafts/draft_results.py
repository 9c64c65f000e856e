"""What a draft run found, as ``results.json`` contains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from peftlab.checkpoints.merge.verify import Latency, MergeCheck
from peftlab.decoding.benchmark import DraftedText
from peftlab.decoding.statistics import Interval, MeasuredGain, TimeShares
from peftlab.decoding.timing import Conditions
from peftlab.drafting.endpoint import ServedText
from peftlab.drafting.text import Repetition
from peftlab.files import Json, to_json
from peftlab.hardware import Cpu
from peftlab.models.costs import Cost
from peftlab.tasks.problem import Scores
from peftlab.training.state import SelectionResult


@dataclass(frozen=True)
class DecodingSpeed:
    """Greedy decoding of a few held-out prompts, plain and with the draft.

    Attributes:
        block_efficiency: tokens per target step.
        tau_without_bonus: the drafted ones among them, without the one that the target itself adds.
        accepted: accepted share of the drafted tokens that were tried.
        acceptance_by_position: the same for the first, second, ... token of a step.
        accepted_runs: drafted tokens accepted one after the other in a step -> steps.
        plain_tokens_per_second: of plain decoding.
        tokens_per_second: of decoding with the draft.
        speed_up: the ratio of the two.
        speed_up_interval: its 95 % interval.
        lossless: whether every output is plain decoding's, with every drafter.
        verdict: the speed-up in words.
        beside: speed-up of the drafters that were timed in turn with it: copying what followed a repeated suffix
            (``suffix``), and both in one tree (``suffix+draft``).
        time: shares of target, draft and the time outside the models; None where not measured.
        gain: the speed-up by its parts (tau, verification C(n), drafting D), and the best draft length; None where not
            measured.
        kernel: how the target's step is computed.
        conditions: of the machine.
        example: one output with what was drafted for it; None before training.
    """

    block_efficiency: float | None
    tau_without_bonus: float | None
    accepted: float | None
    acceptance_by_position: list[float | None]
    accepted_runs: dict[str, int]
    plain_tokens_per_second: float
    tokens_per_second: float
    speed_up: float
    speed_up_interval: Interval
    lossless: bool
    verdict: str
    beside: dict[str, float]
    time: TimeShares | None
    gain: MeasuredGain | None
    kernel: str
    conditions: Conditions
    example: DraftedText | None


@dataclass(frozen=True)
class Decoding:
    """How fast target and draft decode together.

    Attributes:
        before: before training; None where nothing could draft yet, an empty object in ``results.json``.
        after: after training.
        gamma: tokens drafted per target step.
    """

    before: DecodingSpeed | None
    after: DecodingSpeed
    gamma: int

    def as_json(self) -> dict[str, Json]:
        """Return the attributes; ``before`` is an empty object where nothing could draft yet."""
        return to_json(vars(self)) | ({"before": {}} if self.before is None else {})


@dataclass(frozen=True)
class HeldOutRates:
    """The draft's acceptance on each example of the first held-out split, to compare runs in pairs.

    Attributes:
        text: digest of the examples, in order. tokens: of each continuation. acceptance: of each, after training.
    """

    text: str
    tokens: list[int]
    acceptance: list[float]


@dataclass
class DraftResults:
    """What a draft run ends with; ``results.json`` contains these fields in this order.

    Those that default to None are measured on the finished draft, after a first ``results.json`` was written. Fields
    that are not described here mean what they do in ``FinetuneResults``.

    Attributes:
        draft: the kind of draft, ``draft.kind``.
        objective: ``objective.name``.
        train_examples: training examples.
        learnt_tokens: tokens of the target's text in them.
        kept_share: share of those tokens that the loss counted (``objective.selective``).
        repetition: of the held-out answers: share of the 8-grams ``seen`` in the training text, share of the
            4-grams ``repeated`` within an answer.
        merged_metrics: acceptance of the merged draft, read from disk.
        vocabulary: ``tokens`` of a reduced vocabulary, and the ``ceiling`` that it puts on acceptance.
        acceptance_head: squared error of the acceptance head on held-out text, and that of a constant.
        decoding: speed ``before`` and ``after`` training, as ``DecodingSpeed``, and ``gamma``, tokens drafted per
            target step.
        chosen: how the parts of a draft were found on the target's text. By gates: the ``layers`` kept, the
            ``probabilities`` that each layer's gate is open, how many are ``expected`` open, the ``price`` of
            one, ``steps``. Pruned: units ``kept`` ``of`` how many per layer, and of each of the ``rounds`` its
            ``steps``, the largest of the ``distances`` of each mask from those before it, and whether they were
            ``stable``. Absent elsewhere.
        served: text by ``data.endpoint``: the ``model`` id there, stored ``answers``, form of the request ->
            answers (``forms``), reason -> answers that were left out (``dropped``), answers with the text of an
            earlier sample of their prompt (``repeated``); absent elsewhere.
        held_out: ``acceptance`` of each example of the first held-out split, its ``tokens``, and a digest of
            the ``text``: ``peftlab report A B`` compares runs on the same text in pairs by them.
    """

    task: str
    draft: str
    method: str | None
    model: str
    objective: str
    metric: str
    score: float | None
    metrics: Scores
    last_metrics: Scores
    best_step: int
    steps: int
    baseline_score: float
    baseline_metrics: Scores
    trainable_parameters: int
    total_parameters: int
    train_seconds: float
    examples_per_second: float
    tokens_per_second: float
    train_examples: int
    learnt_tokens: int
    kept_share: float
    peak_rss_mb: float
    peak_gpu_mb: float | None
    lr: float
    cpu: Cpu
    seed: int
    repetition: Repetition
    merge: MergeCheck | None = None
    latency: Latency | None = None
    merged_metrics: Scores | None = None
    vocabulary: dict[str, float] | None = None
    acceptance_head: dict[str, float] | None = None
    decoding: Decoding | None = None
    chosen: Mapping[str, Json] | None = None
    cost: Cost | None = None
    selection: SelectionResult | None = None
    served: ServedText | None = None
    held_out: HeldOutRates | None = None

    def as_json(self) -> dict[str, Json]:
        """Return them as ``results.json`` has them: without what was not measured."""
        optional = {name.name for name in fields(self) if name.default is None}
        return {key: value for key, value in to_json(vars(self)).items() if value is not None or key not in optional}
