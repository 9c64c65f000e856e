"""The output directories of runs and tables: which run is continued, the inputs that must not be overwritten, how a run
was made (``provenance.json``), and the results and the report that it ends with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from peftlab.environment import describe_environment, git_state
from peftlab.errors import PeftlabError
from peftlab.files import (
    WRITTEN,
    Claim,
    Inputs,
    Json,
    Mark,
    claimed,
    is_url,
    parse_json,
    read_object,
    real_path,
    write_json,
    write_text,
)
from peftlab.recipe.load import dump_recipe, load_recipe
from peftlab.recipe.schema import AnyTable, DraftRecipe, DraftTableRecipe, FinetuneRecipe, Recipe
from peftlab.remote import RemoteDirectory, local_place, mirrored

if TYPE_CHECKING:
    import torch

RUN = Mark("run", WRITTEN["run"])
TABLE = Mark("table", WRITTEN["table"])


@contextmanager
def run_directory(recipe: FinetuneRecipe | DraftRecipe, *, overwrite: bool, resume: bool) -> Iterator[Claim]:
    """Lock the directory of ``recipe``'s run while it runs; errors as in ``peftlab.files.claimed``.

    Where ``output_dir`` is a URL, it is the one of this machine that ``peftlab.remote`` uploads from.

    Args:
        recipe: the run's.
        overwrite: replace what an earlier run left there.
        resume: continue the run that is there.
    """
    path, inputs = recipe.output_dir, recipe_inputs(recipe)
    if Path(path).parts[:1] and Path(path).parts[0].startswith("~"):  # a directory of that name, not someone's home
        path = os.path.abspath(path)
    advice = (
        f"choose another output_dir, continue with `peftlab resume {shlex.quote(path)}`, or pass --overwrite to lose it"
    )
    hold = partial(claimed, mark=RUN, resume=resume, inputs=inputs, advice=advice)
    if not is_url(path):
        with hold(path, overwrite=overwrite) as claim:
            yield claim
        return
    for name, value in inputs.items():
        if f"{value}/".startswith(f"{path.rstrip('/')}/"):
            raise PeftlabError(f"{path} is or contains {name} ({value}); choose another URL")
    with (
        mirrored(path, RUN, overwrite=overwrite, resume=resume, advice=advice) as (mirror, place),
        hold(place) as claim,
    ):
        if mirror is not None:
            claim.completed = mirror.push
        yield claim


def check_directory(recipe: Recipe, *, overwrite: bool, resume: bool) -> None:
    """Check that a run of ``recipe`` may write its directory; a table's is its runs' and may exist.

    Args:
        recipe: a run's or a table's.
        overwrite: replace what an earlier run left there.
        resume: continue the run that is there.
    """
    if not isinstance(recipe, AnyTable):
        with run_directory(recipe, overwrite=overwrite, resume=resume):
            pass


def stored_recipe(directory: str | Path) -> Recipe:
    """Return the recipe of the run in a directory or at a URL, whose ``output_dir`` it is: a run may be moved.

    A run at a URL is continued at the URL, not in its working directory on this machine.

    Raises:
        PeftlabError: there is no run.
    """
    missing = PeftlabError(f"{directory}: no run here (there is no recipe.yaml)")
    if is_url(directory):
        content = RemoteDirectory(str(directory)).read("recipe.yaml")
        if content is None:
            raise missing
        with TemporaryDirectory() as place:
            write_text(Path(place, "recipe.yaml"), content.decode("utf-8", "replace"))
            recipe = load_recipe(Path(place, "recipe.yaml"))
    elif not (Path(directory) / "recipe.yaml").exists():
        raise missing
    else:
        recipe = load_recipe(Path(directory) / "recipe.yaml")
        at = recipe.output_dir
        if is_url(at) and real_path(local_place(at, "runs")) == real_path(directory):
            return recipe
    # Set as a value: a path in an override would be read as YAML.
    return recipe.model_copy(update={"output_dir": str(directory)})


def overwrite_or_resume(recipe: Recipe, *, overwrite: bool) -> tuple[bool, bool]:
    """Return (overwrite, resume): whether a run replaces its directory's contents, and whether it is resumed.

    torchrun starts the command again when a worker has died. Of what the same launch has begun by the same recipe and
    has not ended, the newest checkpoint is resumed; without one it starts again.

    Args:
        recipe: the run's.
        overwrite: what the command line asked for.
    """
    if isinstance(recipe, AnyTable) or (own := launch()) is None:
        return overwrite, False
    if is_url(recipe.output_dir):
        remote = RemoteDirectory(recipe.output_dir)
        content, stored, names = remote.read("provenance.json"), remote.read("recipe.yaml"), [*remote.versions()]
    else:
        directory = Path(recipe.output_dir)
        files = (directory / name for name in ("provenance.json", "recipe.yaml"))
        content, stored = (file.read_bytes() if file.is_file() else None for file in files)
        names = [path.relative_to(directory).as_posix() for path in directory.glob("checkpoints/*")]
        names += [path.name for path in directory.glob("results.json")]
    try:
        begun = parse_json(content.decode("utf-8")) if content is not None else None
    except ValueError:  # a file that cannot be read names no launch
        begun = None
    if not isinstance(begun, dict) or begun.get("launch") != own:
        return overwrite, False
    if "results.json" in names or not _was_begun_by(recipe, stored):
        return overwrite, False
    resume = any(fnmatch(name, "checkpoints/step-*.pt") for name in names)
    return not resume, resume


def _was_begun_by(recipe: Recipe, stored: bytes | None) -> bool:
    """Return whether a run's ``recipe.yaml`` is that of ``recipe``, but for what the run found where it has null."""
    from ruamel.yaml import YAML, YAMLError

    try:
        before = YAML(typ="safe").load((stored or b"").decode("utf-8"))
    except (YAMLError, UnicodeDecodeError):
        return False

    def same(value: object, other: object) -> bool:
        if isinstance(value, dict):
            return isinstance(other, dict) and all(same(inner, other.get(key)) for key, inner in value.items())
        return value is None or value == other

    return same(recipe.model_dump(mode="json", by_alias=True), before)


def launch() -> str | None:
    """Return what identifies the launch of torchrun's that started this process, again perhaps; None without one.

    That is ``--rdzv-id``, which all machines of a launch share. Without one torchrun calls every launch "none", and
    the directory of its own logs, which has a random name, tells this one from others.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name or None
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents  # LOGS/attempt_N/RANK/error.json
    return logs[2].name if len(logs) > 3 else None


def recipe_inputs(recipe: Recipe) -> Inputs:
    """Return the paths and references that a recipe reads, by what they are."""
    if isinstance(recipe, DraftRecipe | DraftTableRecipe):
        own: dict[str, str | None] = {}
        if isinstance(recipe, DraftRecipe):
            own = {"the draft": getattr(recipe.draft, "from_", None), "the reference model": recipe.objective.reference}
        return {
            "the target": recipe.target,
            **own,
            "the prompts": recipe.data.prompts if isinstance(recipe.data.prompts, str) else None,
            "the requests": recipe.data.replay,
            "the data sets": recipe.data.cache,
            **{f"the target {reference}": reference for reference in recipe.data.targets or []},
        }
    start = recipe.init_from if isinstance(recipe, FinetuneRecipe) else None
    sample = recipe.train.sample
    return {
        "the model": recipe.model,
        "the data": recipe.data.path,
        "the run to start from": start,
        "the scorer": sample.scorer if sample is not None else None,
    }


_BEGUN_BY = Path("checkpoints", "recipe.yaml")  # what the first step was taken by; recipe.yaml may be edited
# Keys that change no step that has been taken: where things are, how long training goes on, what is stored and scored.
_MAY_CHANGE = (
    "output_dir", "model", "target", "init_from", "data.path", "data.cache", "train.max_steps", "train.epochs",
    "train.early_stopping", "train.eval_every", "train.eval_batch_size", "train.save_every", "train.keep_checkpoints",
    "train.trackers", "generate", "merge", "gamma", "policy", "draft_window",
)  # fmt: skip


def begin_or_compare(directory: Path, recipe: Recipe, data_fingerprint: str, *, resume: bool) -> None:
    """Keep the recipe that a run is begun by, or refuse to continue one that was begun by another or on other data.

    Args:
        directory: of the run. recipe: as it is run. data_fingerprint: of its data. resume: it is continued.

    Raises:
        PeftlabError: keys differ on which the steps already taken depend, or the data do.
    """
    file = directory / _BEGUN_BY
    if not resume:
        file.parent.mkdir(exist_ok=True)
        write_text(file, dump_recipe(recipe))
        return
    if not file.exists():
        return
    from peftlab.reporting.facts import flatten

    here, there = (dict(flatten(each.model_dump(mode="json"))) for each in (recipe, load_recipe(file)))
    allowed = tuple(f"{key}." for key in _MAY_CHANGE)
    differ = [text for key, text in changed_keys(here, there).items() if not f"{key}.".startswith(allowed)]
    if read_object(directory / "provenance.json").get("data_fingerprint") != data_fingerprint:
        differ.append("the examples are others")
    if differ:
        raise PeftlabError(
            f"{directory} was begun by another recipe: {'; '.join(differ)}. Resuming may change how long a run trains "
            "(train.max_steps, train.epochs) and what is scored and stored; for anything else start another run "
            "(init_from: this one)"
        )


def changed_keys(here: Mapping[str, object], there: Mapping[str, object]) -> dict[str, str]:
    """Return the keys of two recipes whose values differ, each with a text: ``train.lr 0.001, now 0.5``.

    Args:
        here: the values now, by dotted key. there: those before.
    """
    differ = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    return {key: f"{key} {there.get(key)}, now {here.get(key)}" for key in differ}


def provenance(seed: int, data_fingerprint: str, processes: int, device: torch.device) -> dict[str, Json]:
    """Return the contents of ``provenance.json``."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "launch": launch(),
        "command": [sys.argv[0].rpartition("/")[2], *sys.argv[1:]],
        "seed": seed,
        "data_fingerprint": data_fingerprint,
        "processes": processes,
        **git_state(),
        **describe_environment(device),
    }


@contextmanager
def stored_results(run_dir: Path, results: dict[str, Json]) -> Iterator[None]:
    """Write ``results.json`` before measurements that may fail, and ``report.html``, which takes longer, if they do.

    Args:
        run_dir: the run's directory.
        results: the contents of ``results.json``.
    """
    write_json(run_dir / "results.json", results)
    try:
        yield
    except BaseException:
        write_results(run_dir, results)
        raise


def write_results(run_dir: Path, results: dict[str, Json]) -> None:
    """Write ``results.json`` and ``report.html``, or print why there is no report.

    Args:
        run_dir: the run's directory.
        results: the contents of ``results.json``.
    """
    from peftlab.reporting.pages import write_report

    write_json(run_dir / "results.json", results)
    try:
        write_report(run_dir)
    except PeftlabError as error:
        print(f"no report.html: {error}")


def write_and_print_results(run_dir: Path, results: dict[str, Json]) -> None:
    """Write the results, as ``write_results`` does, and print them.

    Args:
        run_dir: the run's directory.
        results: the contents of ``results.json``.
    """
    from peftlab.reporting.facts import print_results

    write_results(run_dir, results)
    print_results(results, run_dir)
