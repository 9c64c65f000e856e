"""A recipe of any kind: validated, run or resumed. What it names is checked before torch or a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.drafting.config import ModelDraft
from peftlab.errors import PeftlabError
from peftlab.models.config import find_model
from peftlab.recipe.load import load_recipe, runs_of
from peftlab.recipe.schema import AnyTable, DraftRecipe, FinetuneRecipe, Recipe
from peftlab.references import locate, refuse_misspelt
from peftlab.registry import resolve
from peftlab.tasks.data import tables_read
from peftlab.tasks.table import DataConfig, Task, find_task

if TYPE_CHECKING:
    from peftlab.pipelines.draft import DraftResults
    from peftlab.pipelines.finetune import FinetuneResults
    from peftlab.pipelines.table import TableResults

    Results = FinetuneResults | TableResults | DraftResults

# kind of recipe -> the function that runs it
RUNNERS = {
    "finetune": "peftlab.pipelines.finetune:run_finetune",
    "draft": "peftlab.pipelines.draft:run_draft",
    "table": "peftlab.pipelines.table:run_table",
    "draft_table": "peftlab.pipelines.table:run_table",
}


def validate(recipe: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, check it, its model's place and its data's files and columns; return it with all its defaults.

    Args:
        recipe: a file, or the short name of a shipped recipe.
        overrides: ``"train.lr=1e-4"``, ``"~data.path"`` and so on, applied from left to right.

    Raises:
        PeftlabError: every mistake in it, with file, line and the nearest right spelling; or its model, a file of its
            data or a column is missing. What the hub has is not asked.
    """
    checked = load_recipe(recipe, overrides)
    check_models(checked)
    check_data(checked)
    return checked


def run(
    recipe: str | Path,
    overrides: Iterable[str] = (),
    *,
    overwrite: bool = False,
    device: str = "auto",
    shard: str | None = None,
    on: str = "local",
    cpus: int | None = None,
) -> Results:
    """Run a recipe from its file and return its results, of a type that depends on its kind.

    Where torchrun starts the same command again, the run continues from its newest checkpoint.

    Args:
        recipe, overrides: as for ``validate``.
        overwrite: replace an earlier run in the same directory.
        device: ``auto`` (the accelerator that there is, cuda or mps, else the CPU), ``cpu``, ``cuda`` or ``mps``.
        shard: of a table or sweep, ``"I/N"``: only every N-th cell, from number I on; other processes run the others.
        on: where the cells of a table or sweep run: ``local``, in processes of this machine; ``ray``, on the Ray
            cluster that RAY_ADDRESS names or that runs on this machine, else on one that is started for the call;
            ``ray://HOST:PORT``, on that cluster.
        cpus: of a table or sweep, each cell's CPU cores and threads. None: one on Ray; on this machine the cells of a
            CPU run one at a time, with as many threads as PyTorch chooses.

    Raises:
        PeftlabError: anything the user can correct; an error found before training leaves no run directory.
    """
    from peftlab.pipelines.directory import check_directory, overwrite_or_resume

    if on != "local":
        from peftlab.pipelines.table import check_engine

        check_engine(on)
    checked = load_recipe(recipe, overrides)
    check_models(checked)  # both again when they are used; here before anything heavy is imported
    overwrite, resume = overwrite_or_resume(checked, overwrite=overwrite)
    check_directory(checked, overwrite=overwrite, resume=resume)
    return run_recipe(checked, overwrite=overwrite, resume=resume, device=device, shard=shard, on=on, cpus=cpus)


def resume(directory: str | Path, *, device: str = "auto", on: str = "local", cpus: int | None = None) -> Results:
    """Continue the run in ``directory``, a path or a URL, from its newest checkpoint; return its results.

    Args:
        device, on, cpus: as for ``run``.

    Raises:
        PeftlabError: there is no run in the directory, or it cannot be continued.
    """
    from peftlab.pipelines.directory import stored_recipe

    return run_recipe(stored_recipe(directory), resume=True, device=device, on=on, cpus=cpus)


def run_recipe(
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    device: str = "auto",
    shard: str | None = None,
    on: str = "local",
    cpus: int | None = None,
) -> Results:
    """Run a recipe of any kind and return its results; arguments as in ``run``."""
    options: dict[str, object] = {}
    if isinstance(recipe, AnyTable):
        from peftlab.pipelines.table import Shard

        options = {"shard": None if shard is None else Shard.read(shard), "on": on, "cpus": cpus}
    else:
        for name, value in {"shard": shard, "on": None if on == "local" else on, "cpus": cpus}.items():
            if value is not None:
                raise PeftlabError(f"{name} {value}: only tables and sweeps have cells, this is a {recipe.kind}")
    return resolve(RUNNERS[recipe.kind])(recipe, overwrite=overwrite, resume=resume, device=device, **options)


def check_models(recipe: Recipe) -> None:
    """Check that each model that running ``recipe`` starts from is there, if it is a path or a file of a package.

    Raises:
        PeftlabError: no such path, package or file of it; a directory that contains no model; offline, an id that is
            not in the hub's cache and spelled like a path that is there.
    """
    runs = runs_of(recipe)
    finetuned = [run for run in runs if isinstance(run, FinetuneRecipe)]
    references = [each.model for each in finetuned]
    references += [each.train.sample.scorer for each in finetuned if each.train.sample and each.train.sample.scorer]
    for run in runs:
        if isinstance(run, DraftRecipe):
            start = run.draft.from_ if isinstance(run.draft, ModelDraft) else None
            named = (run.target, start, run.objective.reference, *(run.data.targets or ()))
            references += [reference for reference in named if reference is not None]
    for reference in dict.fromkeys(references):
        place = locate(find_model(reference).base)
        if isinstance(place, str):
            refuse_misspelt(place)
        if isinstance(place, Path) and place.is_dir() and not (place / "config.json").exists():
            raise PeftlabError(f"model {reference!r}: {place} has no config.json")


def check_data(recipe: Recipe) -> None:
    """Check that the files that ``recipe`` names are there, can be read and have the columns that its task reads.

    Data of the hub are not asked for.

    Raises:
        PeftlabError: a file or column is missing, or a file cannot be read.
    """
    runs = runs_of(recipe)
    finetuned = [run for run in runs if isinstance(run, FinetuneRecipe)]
    for task, data in {(each.task, repr(each.data)): (each.task, each.data) for each in finetuned}.values():
        _check_columns(find_task(task), data)
    for run in runs:
        files = {"prompts": run.data.prompts, "replay": run.data.replay} if isinstance(run, DraftRecipe) else {}
        for key, file in files.items():
            if isinstance(file, str) and not isinstance(locate(file, f"data.{key}"), Path):
                raise PeftlabError(f"data.{key} {file!r}: no such file")


def _check_columns(task: Task, data: DataConfig) -> None:
    if data.path is None:
        return
    if task.glue:
        from peftlab.tasks.glue import glue_directory

        glue_directory(task, data.path)
        return
    for table, needed in tables_read(task, data).values():
        for name, key in needed.items():
            if name not in table.columns:
                table.column(name, key)
