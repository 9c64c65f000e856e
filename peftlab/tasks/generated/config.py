"""The ``generate`` section of a finetune recipe."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from peftlab.errors import PeftlabError
from peftlab.section import Section, Seed
from peftlab.tasks.generated.table import GENERATION_METRICS


class GenerateConfig(Section):
    """Which held-out prompts are answered, how, and by which metrics the answers are scored."""

    metrics: list[str] = Field(
        min_length=1, description="gsm8k, gsm8k_peft, exact_match, rouge_l, bleu, nist, cider (peftlab[metrics])."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens of the longest answer.")
    examples: int | None = Field(
        default=None, ge=1, description="At most this many held-out prompts, drawn with data.split_seed; null: all."
    )
    before: bool = Field(default=True, description="Also score the model before training.")
    batch_size: int = Field(default=16, ge=1, description="Prompts per batch and process.")
    beams: int = Field(default=1, ge=1, description="Beams of beam search; 1: greedy, or sampled.")
    length_penalty: float = Field(
        default=1.0, description="Beam search: the exponent of the length that a beam's log-probability is divided by."
    )
    no_repeat_ngram: int = Field(default=0, ge=0, description="No n-gram of this size occurs twice; 0: any may.")
    temperature: float = Field(default=0.0, ge=0, description="0: the most probable token; above: sampled.")
    top_k: int | None = Field(default=None, ge=1, description="Sample from the k most probable tokens.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Sample from the fewest most probable tokens whose sum reaches this."
    )
    seed: Seed = Field(default=0, description="Seed of sampling.")

    @field_validator("metrics")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        try:
            for name in names:
                GENERATION_METRICS.find(name)
        except PeftlabError as error:
            raise ValueError(str(error)) from None
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _consistent(self) -> GenerateConfig:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p restrict sampling: set temperature above 0")
        if self.beams > 1 and self.temperature > 0:
            raise ValueError("beam search does not sample: leave out temperature, or beams")
        if self.beams == 1 and self.length_penalty != 1:
            raise ValueError("length_penalty belongs to beam search: set beams above 1")
        return self

    @property
    def stepwise(self) -> bool:
        """Whether each token depends on the logits alone: what peftlab's own decoder computes."""
        return self.beams == 1 and self.no_repeat_ngram == 0
