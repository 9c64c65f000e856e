"""The table of metrics of generated answers.

Adding one is a row here, or an entry point ``peftlab.generation_metrics``.
"""

from __future__ import annotations

from dataclasses import dataclass

from peftlab.rows import Rows

LOW, HIGH = "_low", "_high"  # what follows a metric's name in the names of the ends of its 95 % interval


@dataclass(frozen=True)
class GenerationMetric:
    """One metric; its function is named as ``"module:attribute"``.

    Attributes:
        score: function of a sequence of ``contexts.Answer`` to a number; or, of a metric that is a mean over the
            answers, to one number for each of them.
        mean: whether it is such a mean; it is then reported with a 95 % interval.
        packages: what has to be installed, by import name.
    """

    score: str
    mean: bool = False
    packages: tuple[str, ...] = ()


_BUILT_IN = {
    "gsm8k": GenerationMetric("peftlab.tasks.generated.matches:gsm8k", mean=True),
    "gsm8k_peft": GenerationMetric("peftlab.tasks.generated.matches:gsm8k_peft", mean=True),
    "exact_match": GenerationMetric("peftlab.tasks.generated.matches:exact_match", mean=True),
    "rouge_l": GenerationMetric("peftlab.tasks.generated.overlap:rouge_l", mean=True, packages=("rouge_score",)),
    "bleu": GenerationMetric("peftlab.tasks.generated.overlap:bleu", packages=("sacrebleu",)),
    "nist": GenerationMetric("peftlab.tasks.generated.overlap:nist", packages=("nltk", "sacrebleu")),
    "cider": GenerationMetric("peftlab.tasks.generated.cider:cider"),
}
GENERATION_METRICS: Rows[GenerationMetric] = Rows("metric", "peftlab.generation_metrics", GenerationMetric, _BUILT_IN)
