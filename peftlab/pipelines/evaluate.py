"""Scores a stored model, that of a run, an adapter or a merged directory, on its recipe's task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from peftlab.checkpoints.adapter import CONFIG_FILE, Adapter, load_adapter, read_adapter
from peftlab.environment import Cpu, describe_cpu
from peftlab.errors import PeftlabError
from peftlab.files import Json, to_json
from peftlab.models.config import BaseConfig
from peftlab.models.load import eval_mode, load_config
from peftlab.pipelines.finetune import answer_scorer, load_task, model_source, sample_inputs
from peftlab.pipelines.merge import EXAMPLES, TIMING, merge_latency, timed_weights
from peftlab.progress import Phase
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.references import local_copy, similar_path
from peftlab.tasks.problem import TaskProblem
from peftlab.tasks.table import find_task
from peftlab.training.distributed import accelerator_on

_OF_THE_MODEL = (
    "model", "revision", "trust_remote_code", "base", "task", "train.max_length", "train.eval_batch_size",
    "train.precision",
)  # fmt: skip
SCORED_BY = (*_OF_THE_MODEL, "data", "objective", "generate", "init_from")
"""The keys of a recipe, or the sections, that scores of a trained model depend on."""
PREDICTED_BY = (*_OF_THE_MODEL, "data.text", "data.image", "data.choices", "data.drop_missing")
"""Those that its predictions depend on."""


@dataclass(frozen=True)
class TimingSetup:
    """The machine and the weights that forward passes were timed on.

    Attributes:
        device: its type.
        cpu: the processor.
        weights: how those of the ``base`` and the ``merged`` model are stored.
    """

    device: str
    cpu: Cpu
    weights: dict[str, str]

    def line(self) -> str:
        """Return device, processor and stored weights as a line of text."""
        where = str(self.cpu) if self.device == "cpu" else self.device
        return f"timed on {where}; weights: " + ", ".join(f"{name} in {how}" for name, how in self.weights.items())


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        scores: split to metric to value, as ``evaluate`` returns them.
        examples: split to the number of examples that were scored.
        timed: on what the latency was measured; None: it was not.
    """

    scores: dict[str, dict[str, float]]
    examples: dict[str, int]
    timed: TimingSetup | None = None

    def as_json(self) -> dict[str, Json]:
        """Return the scores, and ``timed`` beside them."""
        return to_json(self.scores) | ({} if self.timed is None else {"timed": to_json(self.timed)})


def evaluate(
    reference: str | Path,
    recipe_name: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    latency: bool = False,
    device: str = "auto",
) -> dict[str, dict[str, float]]:
    """Return the metrics by evaluation split of the model that ``reference`` names; its answers' as ``generate``.

    The class names and their order are the trained model's, not those of the file that is scored.

    Args:
        reference: a run (its adapter is scored), an adapter, or a model as ``models.config.find_model`` takes it.
        recipe_name: the recipe that names task and data; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``, of what scores depend on (``SCORED_BY``): other data, another batch size;
            ``data.validation=all`` scores a whole file.
        latency: also return as ``latency`` how long forward passes take on that device, relative to the base model's:
            ``merged``, of the merged model beside the adapter, and ``unmerged``, of base and adapter.
        device: as for ``peftlab.run``.

    Raises:
        PeftlabError: no recipe is found, there is no such model or one whose head is not trained, the
            data's labels are not the model's classes, or there is no merged model to time.
    """
    return score_trained(reference, recipe_name, overrides, latency=latency, device=device).scores


def score_trained(
    reference: str | Path,
    recipe_name: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    latency: bool = False,
    device: str = "auto",
) -> EvaluationResult:
    """Return the metrics with the number of examples that they are computed on; all else as for ``evaluate``.

    Args:
        reference: as for ``evaluate``.
        recipe_name: as for ``evaluate``.
        overrides: as for ``evaluate``.
        latency: as for ``evaluate``.
        device: as for ``evaluate``.
    """
    accelerator = accelerator_on(device)
    trained = find_trained(reference, recipe_name, overrides, SCORED_BY)
    merged = _merged_directory(reference, trained) if latency else None
    with Phase("reading data and model"):
        recipe, task = trained.recipe, _load(trained)
    answers = answer_scorer(task, recipe.generate, accelerator)
    if task.refer is not None:
        with Phase("scoring the examples by the model before training, the reference"):
            task.compare_with(nn.Module.to(_starting_model(recipe, task), accelerator.device))
    model = accelerator.prepare(task.model)
    with eval_mode(model):
        with Phase("scoring"):
            scores = dict(task.score(model))
        if answers is not None:
            scores["generate"] = answers(task.model)
    timed = None
    if merged is not None and trained.adapter is not None:
        inputs = sample_inputs(task, EXAMPLES)
        trusted, where = recipe.trust_remote_code, accelerator.device
        what = (trained.adapter, recipe.model, merged, inputs)
        with Phase(TIMING):
            found = merge_latency(*what, trust_remote_code=trusted, device=where)
        scores["latency"] = asdict(found)
        timed = TimingSetup(accelerator.device.type, describe_cpu(), timed_weights(trained.adapter, merged))
    return EvaluationResult(scores, {split: len(rows) for split, rows in task.held_out.items()}, timed)


def _merged_directory(reference: str | Path, trained: Trained) -> Path:
    """Return the directory of the merged model beside an adapter."""
    if trained.place is None:
        raise PeftlabError(f"{reference}: --latency compares an adapter with its base model, and this is no adapter")
    home = trained.place.parent if trained.place.name == "adapter" else trained.place
    if not (home / "merged" / "config.json").exists():
        raise PeftlabError(
            f"{reference}: --latency needs the merged model beside the adapter; write it: "
            f"peftlab merge {trained.place} -o {home / 'merged'}"
        )
    return home / "merged"


def _load(trained: Trained) -> TaskProblem:
    """Load model and data, whose labels are read as the model's classes.

    An adapter of another library names none: then the labels must be class numbers.
    """
    recipe, classes = trained.loaded, trained.class_names()
    task = load_task(recipe, classes, train=False)
    if trained.adapter is None:
        refuse_untrained(recipe.model, task.fresh)
        return task
    row = find_task(recipe.task)
    own = row.labelled and not row.glue and task.task.labels
    if classes is None and own and own != tuple(map(str, range(len(own)))):
        raise PeftlabError(
            f"{trained.place}: does not say what its classes are called, and the data calls them {', '.join(own)}; "
            "label the rows by class number, from 0"
        )
    load_adapter(task.model, trained.adapter)
    return task


def _starting_model(recipe: FinetuneRecipe, task: TaskProblem) -> nn.Module:
    """Load the model that training started from."""
    model, _ = model_source(recipe).model(task.auto_class, recipe.train.max_length)
    if recipe.init_from is not None:
        load_adapter(model, read_adapter(local_copy(recipe.init_from)))
    return model


@dataclass(frozen=True)
class Trained:
    """A trained model that is not loaded yet.

    Attributes:
        recipe: task, data and settings.
        loaded: the same recipe, whose ``model`` is the one to load: the base of an adapter, or the model itself.
        place: directory of the adapter; adapter: what it contains. Both None for a whole model.
    """

    recipe: FinetuneRecipe
    loaded: FinetuneRecipe
    place: Path | None = None
    adapter: Adapter | None = None

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in label order; none for regression; None where they are not stored.

        Raises:
            PeftlabError: the stored value is no list of names, or it has several numbers for a regression.
        """
        task, recipe = find_task(self.recipe.task), self.loaded
        if not task.labelled:
            return None
        if task.choices:
            return ()
        names: object
        if self.adapter is not None:
            config = self.adapter.base.get("config")
            names = config.get("id2label") if isinstance(config, dict) else None
            if names is None:
                return None  # of another library
        else:
            names = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code).id2label
        place = self.place or recipe.model
        classes = _ordered_names(names, place)
        if not task.regression:
            return classes
        if len(classes) != 1:
            raise PeftlabError(f"{place}: has {len(classes)} classes, and task {recipe.task} needs one number")
        return ()


def find_trained(
    reference: str | Path, recipe_name: str | Path | None, overrides: Iterable[str], read: Sequence[str]
) -> Trained:
    """Find the trained model that ``reference`` names, and the recipe that it is scored by.

    Args:
        reference: a run (its adapter) or its URL, an adapter, or a model as ``models.config.find_model`` takes it.
        recipe_name: the recipe that names task and data; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``, of the keys that are read.
        read: those keys, or the sections that they are in.

    Raises:
        PeftlabError: no recipe is found, it is of another kind, there is no such model, or an override changes nothing.
    """
    reference = local_copy(reference)
    directory = Path(reference)
    if not directory.is_dir() and recipe_name is None:
        raise PeftlabError(
            f"{directory}: no such directory{similar_path(str(directory))}; a model that is not in a directory needs "
            "--recipe"
        )
    overrides = list(overrides)
    recipe = load_recipe(recipe_name or _recipe_near(directory), overrides)
    for override in overrides:
        key = override.removeprefix("~").partition("=")[0].strip() + "."
        if not any(key.startswith(f"{name}.") or f"{name}.".startswith(key) for name in read):
            raise PeftlabError(
                f"override {override!r}: the run is trained already; it changes nothing here, where {', '.join(read)} "
                "are read"
            )
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"{recipe_name or directory}: a recipe of kind {recipe.kind} has no task to score")
    place = next((d for d in (directory, directory / "adapter") if (d / CONFIG_FILE).exists()), None)
    if place is not None:
        return Trained(recipe, recipe, place, read_adapter(place))
    if directory.is_dir() and not _is_model(directory):
        raise PeftlabError(f"{directory}: neither a run, an adapter nor a model directory")
    # Plain weights are not quantised again, which would change the model.
    base = BaseConfig() if recipe.base.quantised else recipe.base
    whole = {"model": str(reference), "revision": None, "base": base}
    return Trained(recipe, recipe.model_copy(update=whole))


def _ordered_names(names: object, place: str | Path) -> tuple[str, ...]:
    try:
        numbered = (
            {int(str(number)): str(name) for number, name in names.items()} if isinstance(names, Mapping) else None
        )
    except ValueError:
        numbered = None
    if numbered is None:
        raise PeftlabError(f"{place}: id2label is not a mapping from class numbers to names")
    return tuple(name for _, name in sorted(numbered.items()))


def refuse_untrained(model: str, fresh: list[str]) -> None:
    """Refuse a model with parameters that no checkpoint contains.

    Args:
        model: its reference, for the message.
        fresh: names of the parameters that no checkpoint contains.
    """
    if fresh:
        raise PeftlabError(
            f"{model}: contains no trained weights for {', '.join(fresh[:5])}; its answers would be random"
        )


def _is_model(directory: Path) -> bool:
    return any((place / "config.json").exists() for place in (directory, directory / "merged"))


def _recipe_near(directory: Path) -> Path:
    for place in (directory, directory.parent):
        if (place / "recipe.yaml").exists():
            return place / "recipe.yaml"
    raise PeftlabError(f"{directory}: no recipe.yaml here or above; name one with --recipe")
