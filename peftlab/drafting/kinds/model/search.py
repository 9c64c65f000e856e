"""What finding a draft inside its target takes, whatever is chosen: text, a loss, and a file for what was found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.kinds.model.pair_loss import PairLoss
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import Collate
from peftlab.drafting.text.target_text import weights_digest, written_once
from peftlab.files import Json, replacing
from peftlab.section import Section
from peftlab.tasks.batches import epoch_batches


@dataclass(frozen=True)
class Found:
    """What a search has found: ``tensors`` that make the draft, and a ``report`` for results.json."""

    tensors: dict[str, Tensor]
    report: Mapping[str, Json]


@dataclass(frozen=True)
class Search:
    """A search for a draft in ``source``, the target's weights in the draft's dtype, all layers.

    Attributes:
        target: whose distribution the objective compares with. train: the draft's training text.
        batch_size: examples per step. seed: of their order and of all that is drawn.
    """

    source: PreTrainedModel
    target: PreTrainedModel
    objective: Objective
    train: Dataset
    batch_size: int
    seed: int

    def batches(self, steps: int) -> Iterator[dict[str, Tensor]]:
        """Yield this many batches on the source's device; the text is read again as often as that takes."""
        collate, device = Collate(), self.source.device
        epochs = (
            epoch_batches(self.train["length"], self.batch_size, seed=self.seed, epoch=epoch) for epoch in count()
        )
        for rows in islice((batch for epoch in epochs for batch in epoch), steps):
            yield {key: value.to(device) for key, value in collate(self.train.__getitems__(rows)).items()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean of the objective over a batch's tokens."""
        return PairLoss(self.objective, self.target)(model, batch) / batch["weights"].sum()

    def find(self, cache: Path, settings: Section, choose: Callable[[], Found]) -> Found:
        """Return what ``choose`` returns, from ``cache`` if the same search has ended before.

        A resumed run reads what it began with, whatever machine it continues on.

        Raises:
            PeftlabError: the file is damaged.
        """
        objective = asdict(self.objective) | {"settings": dict(self.objective.settings)}
        known = [type(settings).__name__, settings.as_json(), objective, self.batch_size, self.seed]
        text = [
            weights_digest(self.source),
            weights_digest(self.target),
            [*self.train["input_ids"]],
            [*self.train["prompt"]],
        ]
        digest = hashlib.sha256(json.dumps([known, text]).encode()).hexdigest()
        path = cache / f"draft-{digest[:16]}.safetensors"

        def write() -> None:
            if not path.exists():
                found = choose()
                with replacing(path) as temporary:
                    write_tensors(temporary, found.tensors, {"report": json.dumps(found.report)})

        with PartialState().main_process_first():
            written_once([path], write)
        tensors, metadata = read_tensors(path)
        return Found(tensors, json.loads(metadata["report"]))
