"""Training a draft further: on the requests it has served since, or in between the requests of a stream (Online SD)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import Generation, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import read_draft_tokens
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import policy, window
from peftlab.drafting.base import DraftKind, SavedDraft, ServedDraft, with_window
from peftlab.drafting.config import DraftConfig
from peftlab.drafting.live import (
    LiveRequest,
    RejectionTopK,
    StreamResults,
    Window,
    rejection_dataset,
    stream_results,
    window_result,
)
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import check_method, end_ids
from peftlab.drafting.text import make_dataset, model_digest
from peftlab.errors import PeftlabError
from peftlab.files import Json, claimed, read_object, staged_directory, to_json, write_json, write_text
from peftlab.methods.inject import inject
from peftlab.models.load import load_tokenizer
from peftlab.pipelines.benchmark import acceptance_head, draft_lengths
from peftlab.pipelines.directory import RUN
from peftlab.pipelines.draft import (
    DraftResults,
    ExampleSets,
    SourceText,
    load_target,
    make_draft,
    make_sets,
    read_text,
    run_draft,
    save_draft,
    training_problem,
)
from peftlab.progress import counted
from peftlab.recipe.load import dump_recipe, load_recipe
from peftlab.recipe.schema import DraftRecipe, injected_method
from peftlab.references import similar_path
from peftlab.registry import resolve
from peftlab.reporting.drafts import stream_page, window_line
from peftlab.tasks.prompts import Request, read_requests
from peftlab.training.distributed import make_accelerator
from peftlab.training.loop import Interrupted, train
from peftlab.training.recomputation import recompute_activations

SETTINGS, STREAM = "settings.json", "stream.json"  # of an update that serves a stream: at its start and at its end


def update_draft(
    run: str | Path, logs: str | Path, *, size: int = 1024, overrides: Iterable[str] = (), device: str = "auto"
) -> DraftResults:
    """Train a run's newest merged draft further on the requests in ``logs``; return the update's results.

    Liu et al. 2023 (arXiv 2310.07177). The update is a run of its own, ``RUN/updates/0001`` and so on, whose
    recipe is the run's, starting from the newest draft. ``updates/replay-0001.jsonl`` holds the newest
    ``size`` requests, this log's and earlier ones': the newest of them are held out, and acceptance on them, before and
    after, is what the update is judged by. It also trains on the text the target wrote for the run.

    Args:
        run: directory of a draft recipe's run.
        logs: served requests, one prompt and response per row.
        size: of the buffer, in requests.
        overrides: as for ``peftlab run``: fewer steps, another learning rate.
        device: as for ``peftlab.run``.

    Raises:
        PeftlabError: no such run, a kind of draft that cannot be updated, no merged draft, or no request in ``logs``.
    """
    run = Path(run)
    first = draft_run(run)
    with claimed(run, RUN, resume=True):
        update = _update(run, first, logs, size, tuple(overrides))
        return run_draft(update, device=device)


def draft_run(run: Path) -> DraftRecipe:
    """Return the recipe of a draft's run, or raise ``PeftlabError`` where there is none."""
    if not run.is_dir():
        raise PeftlabError(f"{run}: no such directory{similar_path(str(run))}")
    if not (run / "recipe.yaml").exists():
        raise PeftlabError(f"{run}: no run here (there is no recipe.yaml)")
    first = load_recipe(run / "recipe.yaml")
    if not isinstance(first, DraftRecipe):
        raise PeftlabError(f"{run}: a run of kind {first.kind}; only drafts are updated")
    return first


def updates(run: Path) -> tuple[list[Path], Path | None]:
    """Return a run's finished updates, oldest first, and the stream that was stopped before its end, or None."""
    places = sorted((run / "updates").glob("[0-9][0-9][0-9][0-9]"))
    stopped = [place for place in places if (place / SETTINGS).exists() and not (place / STREAM).exists()]
    done = [place for place in places if (place / "recipe.yaml").exists() and place not in stopped]
    return done, stopped[-1] if stopped else None  # neither: killed before it began


def continued_section(first: DraftRecipe, newest: Path, log: str | Path) -> DraftConfig:
    """Return the draft section that continues from the draft of ``newest``.

    Args:
        first: the first run's recipe. newest: directory of a run or update. log: the requests, for messages.
    """
    kind: type[DraftKind[DraftConfig]] = resolve(DRAFTS.find(first.draft.kind).kind)
    return kind.update(first.draft, newest, Path(log))


def with_overrides(run: Path, overrides: Iterable[str]) -> DraftRecipe:
    """Return the run's recipe with overrides; refuse those of what an update sets, or that make it another kind.

    Args:
        run: the run's directory. overrides: KEY=VALUE.
    """
    overrides = [*overrides]
    for override in overrides:
        key = override.removeprefix("~").partition("=")[0]
        if any(key == own or key.startswith(f"{own}.") for own in ("draft", "output_dir", "data.replay")):
            raise PeftlabError(f"override {override!r}: an update continues the run's draft, on its own replay buffer")
    wanted = load_recipe(run / "recipe.yaml", overrides)
    if not isinstance(wanted, DraftRecipe):
        raise PeftlabError(f"an update is one run of kind draft, and the overrides make it a {wanted.kind}")
    return wanted


def fill_replay(
    run: Path, number: int, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request], size: int
) -> Path:
    """Write the replay buffer of an update: the newest of its requests and of the earlier updates'.

    Args:
        run: the first run's directory. number: of the update. tokenizer: the target's. requests: in order.
        size: requests of the buffer, at most.
    """
    before = run / "updates" / f"replay-{number - 1:04d}.jsonl"
    buffer = [*(read_requests(before, tokenizer) if before.exists() else []), *requests][-size:]
    rows = ({"prompt_ids": r.prompt, "response_ids": r.response} for r in buffer)
    path = run / "updates" / f"replay-{number:04d}.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def _update(run: Path, first: DraftRecipe, logs: str | Path, size: int, overrides: tuple[str, ...]) -> DraftRecipe:
    """Write the replay buffer, and return the recipe of the update."""
    done, stopped = updates(run)
    if stopped is not None:
        raise PeftlabError(f"{stopped}: a stream that was stopped; repeat its command, which finishes it, or delete it")
    draft = continued_section(first, done[-1] if done else run, logs)
    tokenizer, number = load_tokenizer(first.target), len(done) + 1
    replay = fill_replay(run, number, tokenizer, read_requests(logs, tokenizer, chat=first.data.chat), size)
    wanted = with_overrides(run, overrides)
    # Set as values: a path in an override would be read as YAML.
    cache = wanted.data.cache or str(run.parent / "draft-data")
    data = wanted.data.model_copy(update={"replay": str(replay), "cache": cache})
    changes = {"draft": draft, "data": data, "output_dir": str(run / "updates" / f"{number:04d}")}
    return wanted.model_copy(update=changes)


# Greedy decoding, and one pass over the buffer at one rate: the draft is trained, and the next update follows soon.
_USUAL = (
    "data.temperature=0", "data.top_p=null", "data.samples=1", "data.max_prompts=null", "data.on_policy=0",
    "data.endpoint=null", "data.targets=null", "train.epochs=1", "train.max_steps=null", "train.eval_every=null",
    "train.save_every=null", "train.early_stopping=null", "train.trackers=[]", "train.scheduler=constant",
    "train.warmup=0",
)  # fmt: skip


def update_live(
    run: str | Path,
    prompts: str | Path,
    *,
    every: int = 16,
    size: int = 1024,
    overrides: Iterable[str] = (),
    device: str = "auto",
) -> StreamResults:
    """Decode a stream of requests with a run's newest draft, and train it after every few on what was rejected.

    Liu et al. 2023 (arXiv 2310.07177). Requests are decoded one at a time as the recipe says (``gamma``, ``policy``,
    ``data.max_new_tokens``), losslessly, and each a second time with the draft as it was at the start. After a window
    of ``every`` requests the draft trains on the newest ``size`` requests of the stream, on the tokens alone that the
    target put in the place of drafted ones. The update is ``RUN/updates/0001`` and so on, whose ``stream.json`` and
    ``stream.html`` have the numbers. The same call continues a stream that was stopped.

    Args:
        run: directory of a draft recipe's run. prompts: file of requests, as ``data.prompts`` takes it, in order.
        every: requests of a window. size: of the buffer, in requests.
        overrides: as for ``peftlab run``, of the run's recipe. By default decoding is greedy, whatever its
            ``data.temperature``, all requests are decoded, and an update is one epoch at a constant rate.
        device: as for ``peftlab.run``.

    Raises:
        PeftlabError: no such run, a kind of draft that cannot be updated, several processes, or a stream with other
            settings that was stopped.
    """
    run = Path(run)
    first = draft_run(run)
    if every < 1:
        raise PeftlabError(f"every: {every} requests; give 1 or more")
    with claimed(run, RUN, resume=True):
        done, stopped = updates(run)
        start, number = done[-1] if done else run, len(done) + 1
        place = stopped or run / "updates" / f"{number:04d}"
        wanted = with_overrides(run, (*_USUAL, *overrides))
        if wanted.data.on_policy:
            raise PeftlabError("data.on_policy: a stream teaches what the target rejected, no text of the draft's own")
        changes = {"prompts": str(prompts), "replay": None, "held_out": 1}
        recipe = wanted.model_copy(
            update={
                "draft": continued_section(first, start, prompts),
                "data": wanted.data.model_copy(update=changes),
                "output_dir": str(place),
            }
        )
        with claimed(place, RUN, resume=stopped is not None) as claim:
            live = _begin_stream(run, start, recipe, every, size, device)
            settings = live.settings()
            if stopped is None:
                claim.begin()
                write_text(place / "recipe.yaml", dump_recipe(recipe))
                write_json(place / SETTINGS, settings)
            else:
                _check_same(place, settings)
            live.serve()
            return live.finish(number)


def _check_same(place: Path, settings: dict[str, Json]) -> None:
    """Raise ``PeftlabError`` where a stopped stream was begun with other settings than it is to be continued with."""
    before = read_object(place / SETTINGS)
    differ = [name for name, value in settings.items() if before.get(name) != value]
    if differ:
        raise PeftlabError(
            f"{place}: a stream that was stopped, with other {' and '.join(differ)}; repeat its command, which "
            "finishes it, or delete it"
        )


@dataclass
class _Live:
    """A stream while its requests are decoded.

    Attributes:
        run: the draft's first run. start: where the draft at the start of the stream is stored.
        recipe: of the update. text: the requests.
        every, size: see ``update_live``. windows: those that are done. frozen: the draft at the start.
    """

    run: Path
    start: Path
    recipe: DraftRecipe
    text: SourceText
    target: PreTrainedModel
    accelerator: Accelerator
    every: int
    size: int
    windows: list[Window] = field(default_factory=list)
    frozen: ServedDraft = field(init=False)
    _engines: dict[tuple[int, ...], Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.frozen = self._serve(self.start)

    @property
    def place(self) -> Path:
        """The directory of the update."""
        return Path(self.recipe.output_dir)

    def settings(self) -> dict[str, Json]:
        """Return the settings on which the stream depends, by their names in messages."""
        requests = hashlib.sha256(json.dumps(self.text.prompts).encode()).hexdigest()
        target = model_digest(self.target)
        recipe = dump_recipe(self.recipe)
        return {"requests": requests, "target": target, "recipe": recipe, "every": self.every, "size": self.size}

    def serve(self) -> None:
        """Decode the windows that are not done yet, with an update after each; a finished window is stored.

        What a window depends on is stored: a stream that is stopped and continued ends as one that was not.
        """
        prompts, live = self.text.prompts, None
        for path in sorted((self.place / "windows").glob("[0-9]*.json")):
            self.windows.append(Window.read(path))
        starts = range(len(self.windows) * self.every, len(prompts), self.every)
        for first in counted(starts, "decoding the stream", len(starts), "window"):
            number, numbers = len(self.windows) + 1, range(first, min(first + self.every, len(prompts)))
            live = live or self._serve(self._newest())
            requests, seconds = self._decode(live, numbers)
            learnt, clock = 0, time.perf_counter()
            examples = rejection_dataset(self._buffer(requests))
            if len(examples):
                learnt = sum(examples["kept"])
                self._update(examples, requests, number)
                live = self._serve(self._stored(number))
            updating = time.perf_counter() - clock if learnt else 0.0
            self.windows.append(Window(requests, *seconds, updating, learnt))
            write_text(self.place / "windows" / f"{number:04d}.json", json.dumps(to_json(self.windows[-1])) + "\n")
            for old in (self.place / "drafts").glob("[0-9]*"):
                if learnt and old != self._stored(number):
                    shutil.rmtree(old)
            print(window_line(number, first + 1, window_result(self.windows[-1])))

    def finish(self, number: int) -> StreamResults:
        """Move the last draft to where a run has it, and write the stream's results.

        Where nothing was rejected the draft is as it was, and the update's directory is removed.
        """
        newest = self._newest()
        updated = any(each.learnt_tokens for each in self.windows)
        greedy = self.recipe.data.temperature == 0
        results = stream_results(
            self.recipe.target, str(self.place if updated else newest), self.every, self.windows, greedy=greedy
        )
        if not updated:
            shutil.rmtree(self.place)
            return results
        for part in sorted(newest.iterdir()) if newest.is_dir() else []:
            if part.is_dir():
                os.replace(part, self.place / part.name)
        shutil.rmtree(self.place / "drafts", ignore_errors=True)
        fill_replay(self.run, number, self.text.tokenizer, [each.request for each in self._requests()], self.size)
        write_text(self.place / "stream.html", stream_page(results))
        write_json(self.place / STREAM, results)
        return results

    def _requests(self) -> list[LiveRequest]:
        """Return all requests that were decoded, in order."""
        return [request for each in self.windows for request in each.requests]

    def _buffer(self, newest: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Return the newest ``size`` requests of the stream, ``newest`` included."""
        return [*self._requests(), *newest][-self.size :]

    def _stored(self, number: int) -> Path:
        """Return the directory of the draft after a window."""
        return self.place / "drafts" / f"{number:04d}"

    def _newest(self) -> Path:
        """Return the directory of the draft after the newest update."""
        learnt = [number for number, each in enumerate(self.windows, start=1) if each.learnt_tokens]
        return self._stored(learnt[-1]) if learnt else self.start

    def _load(self, directory: Path) -> DraftKind[DraftConfig]:
        """Load the draft in a directory as training continues it."""
        config = continued_section(self.recipe, directory, self.place)
        if "store_gb" in type(config).model_fields:  # an update's text is read once
            config = config.model_copy(update={"store_gb": None})
        recipe = self.recipe.model_copy(update={"draft": config})
        draft = make_draft(recipe, self.text, directory, self.accelerator.device)
        draft.load(self.target)
        if recipe.method is not None:
            check_method(draft.injected, recipe.method)
            if draft.injected is self.target:
                raise PeftlabError(
                    f"draft.kind {recipe.draft.kind}: method {recipe.method.name} trains within the target, which "
                    "decodes meanwhile; collect the requests and update with --requests"
                )
        return draft

    def _serve(self, directory: Path) -> ServedDraft:
        """Load the draft in a directory for decoding, which may cut its head down to a reduced vocabulary."""
        draft = self._load(directory)
        merged = draft.adapted if draft.separate else None
        served = draft.drafter(SavedDraft(directory, merged, read_draft_tokens(directory / "merged")))
        assert served is not None  # it has been saved
        return served

    def _decode(self, live: ServedDraft, numbers: range) -> tuple[list[LiveRequest], tuple[float, float]]:
        """Decode some requests with both drafts; return them and the seconds that each draft took."""
        top_k = self.recipe.data.top_k
        kept = [RejectionTopK(top_k) if top_k is not None else None for _ in numbers]
        clock = time.perf_counter()
        outputs = self._outputs(live, numbers, kept)
        between = time.perf_counter()
        others = self._outputs(self.frozen, numbers, [None for _ in numbers])
        seconds = between - clock, time.perf_counter() - between
        requests = []
        for number, mine, other, top in zip(numbers, outputs, others, kept, strict=True):
            request = Request(self.text.prompts[number], mine.tokens)
            equal, stored = mine.tokens == other.tokens, None if top is None else top.of(mine)
            requests.append(LiveRequest(request, mine.steps, other.steps, equal, stored))
        return requests, seconds

    def _outputs(
        self, served: ServedDraft, numbers: range, observers: Sequence[RejectionTopK | None]
    ) -> list[Generation]:
        """Decode requests one after the other, each seeded by its number alone."""
        data, recipe = self.recipe.data, self.recipe
        if served.features not in self._engines:
            self._engines[served.features] = build_engine(self.target, features=served.features)
        engine = self._engines[served.features]
        drafter = with_window(served.drafter(), None if recipe.draft_window is None else window(recipe.draft_window))
        chosen = policy(recipe.policy)
        head = partial(acceptance_head, str(self.run), self.accelerator.device)
        lengths = draft_lengths(chosen, recipe.gamma, engine, {"draft": lambda: drafter}, head=head)
        stopping = StoppingCriteria(data.max_new_tokens, end_ids(self.target, self.text.tokenizer))
        outputs = []
        for number, observe in zip(numbers, observers, strict=True):
            sampling = Sampling(data.temperature, top_p=data.top_p, seed=data.seed + number)
            prompt, length = self.text.prompts[number], lengths.policies["draft"]
            outputs += decode(engine, [prompt], stopping, drafter, policy=length, sampling=sampling, observe=observe)
        return outputs

    def _update(self, examples: Dataset, newest: Sequence[LiveRequest], number: int) -> None:
        """Train the draft on the examples and store it."""
        recipe = self.recipe
        draft = self._load(self._newest())
        set_seed(recipe.train.seed + number)
        text = self._text(self._buffer(newest))
        draft.prepare(text)
        if recipe.method is not None:
            inject(draft.injected, injected_method(recipe.method, recipe.train))
        if recipe.train.gradient_checkpointing and draft.separate:
            recompute_activations(draft.adapted, selective=recipe.train.gradient_checkpointing == "selective")
        sets = ExampleSets(examples, {"window": make_dataset([each.request for each in newest])}, [], "", None)
        with staged_directory(self._stored(number), "draft", overwrite=True) as staging:
            draft.directory = staging
            problem = replace(training_problem(recipe, draft, sets), new=False)
            try:
                train(problem, recipe.train, self.accelerator, staging)
            except Interrupted as stop:
                stop.args = (f"stopped in the update after window {number}; repeat the command to continue there",)
                raise
            self.accelerator.free_memory()
            save_draft(recipe, draft, replace(sets, train=text))
            for left in ("adapter", "checkpoints"):  # of a base that is removed, and of a training that is over
                shutil.rmtree(staging / left, ignore_errors=True)

    def _text(self, buffer: Sequence[LiveRequest]) -> Dataset:
        """Return the text from which a reduced vocabulary is chosen: the buffer's, and the run's own if it has any."""
        served = make_dataset([each.request for each in buffer])
        first = draft_run(self.run)
        if getattr(self.recipe.draft, "vocabulary", None) is None or first.data.prompts is None:
            return served
        plain = first.model_copy(
            update={"data": first.data.model_copy(update={"top_k": None, "replay": None, "targets": None})}
        )
        text, eos = read_text(plain), end_ids(self.target, self.text.tokenizer)
        cache = Path(first.data.cache or self.run.parent / "draft-data")
        return concatenate_datasets([make_sets(plain, text, [self.target], eos, cache, nullcontext()).train, served])


def _begin_stream(run: Path, start: Path, recipe: DraftRecipe, every: int, size: int, device: str) -> _Live:
    """Read the requests, check that the draft can train, and load the target."""
    text = read_text(recipe)
    if text.images is not None:
        raise PeftlabError(
            "a stream serves requests of text alone, and this one has images; draft update RUN learns from them"
        )
    accelerator = make_accelerator(recipe.train, Path(recipe.output_dir), device)
    if accelerator.num_processes > 1:
        raise PeftlabError("a stream is served by one process; start it without a launcher")
    draft = make_draft(recipe, text, start, accelerator.device)
    if recipe.method is not None and recipe.draft.language_model and not draft.folds:
        raise PeftlabError(
            f"method {recipe.method.name} has no linear fold, or merge is off; a stream stores its draft merged"
        )
    draft.check(text.config)
    return _Live(run, start, recipe, text, load_target(recipe, text, accelerator.device), accelerator, every, size)
