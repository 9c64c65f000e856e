"""Every command and every Python program of README and docs: executed on tiny models, or marked as out of reach.

What a page shows is executed in its order, in a directory that has what the page names; the arguments below are added to
make it short. A grid of runs, each a process of its own, is validated only: ``tests/table`` runs such grids; so is the
launcher of several processes, of which ``tests/training`` starts some. A command that needs a hub, GPUs or hours has one of ``MARKS`` in the comment behind it: its options and its recipe are checked. A
program that does has it in its first line, and is compiled.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.recipe.load import load_recipe
from tests.documents.blocks import Block, Command, blocks, commands, programs
from tests.documents.place import CHAT, ENCODER, furnish
from tests.packages import MINILM, SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
SHOWN: dict[str, list[Command | Block]] = {
    page: sorted([*commands(page, text), *programs(page, text)], key=lambda shown: shown.line)
    for page, text in sorted(PAGES.items())
}
MARKS = (
    "needs the hub",
    "needs two GPUs",
    "needs two machines",
    "needs a bucket",
    "needs the digits",
    "needs a server",
    "needs llama.cpp",
    "needs vLLM",
    "needs GPUs",
    "takes hours",
)

# What makes a recipe short, by the name that `run` takes, and a verb.
STEP = "train.max_steps=1 train.batch_size=2 train.max_length=64 train.eval_batch_size=4 train.warmup=0"
REVIEWS = f"model={ENCODER} data.path=ratings.csv data.validation=4 merge.latency=false"
LONG = "train.max_length=160 generate.max_new_tokens=2 generate.examples=2"
DRAFTED = "train.max_length=200 data.max_prompts=4 data.held_out=1 data.max_new_tokens=4"
RECIPES = {
    "glue/cola-lora": f"model={ENCODER}",
    "quickstart": REVIEWS,
    "recipes/quickstart.yaml": REVIEWS,
    "recipe.yaml": "data.path=glue_data/CoLA output_dir=runs/again",
    "my-chats.yaml": "data.validation=4",
    "chat.yaml": f"model={CHAT} data.validation=4",
    "text-classification": "data.validation=4",
    "draft/eagle3": f"draft.vocabulary=null {DRAFTED}",
    "my-draft.yaml": DRAFTED,
    "chat/quickstart": f"model={CHAT} data.path=ratings.csv data.validation=4",
    "chat/qlora": "data.validation=4",
    "chat/preference": f"model={CHAT} data.validation=4",
    "gsm8k": f"data.validation=4 {LONG}",
    "e2e": f"model={CHAT} method.target_modules=null {LONG} generate.metrics=[rouge_l]",
    "draft/quickstart": f"target={CHAT} data.prompts=questions.jsonl data.field=question draft.vocabulary=null {DRAFTED}",
    "draft/gsm8k": f"draft.vocabulary=null {DRAFTED}",
}
VERBS = {
    "generate": "--max-new-tokens 2",
    "draft plan": "--repeats 1 --max-gamma 1 --context 4",
    "draft bench": "--repeats 1 --max-new-tokens 2 --max-prompts 1",
    "draft update": "train.max_steps=1 train.max_length=200",
}

# The names under which a page's complete recipes are in the directory, in their order.
SAVED = {
    "README.md": ["recipe.yaml"],
    "docs/guide/cookbook.md": ["chat.yaml"],
    "docs/guide/quickstart.md": ["tickets.yaml"],
    "docs/guide/language_models.md": ["my-chats.yaml", "shakespeare.yaml"],
    "docs/drafts/training_drafts.md": ["my-draft.yaml"],
}
# What a page takes to have happened before: commands, and code before each of its programs, by number.
BEFORE = {
    "docs/guide/tasks.md": [
        "peftlab run text-classification task=text/multilabel data.path=films.csv data.text=[plot] data.label=genres "
        "'data.separator=\"|\"' output_dir=runs/films"
    ],
    "docs/drafts/training_drafts.md": ["peftlab run my-draft.yaml"],
    "docs/drafts/decoding.md": [
        "peftlab run draft/ci target=TARGET 'draft={kind: gated_lora}' 'method={name: lora}' data.samples=1 "
        "data.held_out=1 data.max_new_tokens=4 output_dir=runs/gated"
    ],
    "docs/guide/merging.md": ["peftlab run chat/qlora data.path=chats.jsonl"],
    "docs/reference/command_line.md": ["peftlab run glue/cola-lora data.path=glue_data/CoLA"],
}
DECODER = "import torch, transformers\nmodel = transformers.AutoModelForCausalLM.from_pretrained('models/base')\n"
CLASSIFIER = f"import torch, transformers\nmodel = transformers.AutoModelForSequenceClassification.from_pretrained({ENCODER!r})\n"
BATCH = "batch = {'input_ids': torch.tensor([[5, 6, 7, 8]] * 4)}\n"
LABELLED = f"{BATCH}batches = [batch | {{'labels': torch.tensor([0, 1, 0, 1])}}]\n"
ROWS = "train_rows = validation_rows = [{'input_ids': [5, 6, 7], 'labels': 0}] * 8\n"
TEXTS = "from datasets import Dataset\ndataset = Dataset.from_list([{'text': 'Hello.'}] * 8)\n"
NAMED = "for name in 'legal', 'medical': peftlab.load_adapter(model, f'adapters/{name}', name=name)\n"
ADAPTER = "import shutil\nshutil.rmtree('adapter')\nshutil.copytree('my-adapter', 'adapter')\n"
SHORT = (
    "from pathlib import Path\nfrom peftlab.recipe.library import find\n"
    "text = find('glue/cola-lora').read_text()\nPath('glue').mkdir()\n"
    "Path('glue/cola-lora').write_text(text.replace('epochs: 80', 'epochs: 1').replace('512', '64'))\n"
    "Path('questions.jsonl').write_text('{\"prompt\": \"Where is Rome?\"}\\n' * 2)\n"
)
GIVEN = {
    "docs/guide/adapters.md": [DECODER, DECODER + NAMED, BATCH],
    "docs/guide/language_models.md": [f"import peftlab, transformers\nreference = {CHAT!r}"],
    "docs/guide/python.md": ["", CLASSIFIER.replace("model =", "fresh_model ="), ADAPTER, SHORT],
    "docs/guide/trainers.md": [ROWS, TEXTS, CLASSIFIER + LABELLED],
    "docs/drafts/decoding.md": [f"{DECODER}target_model, draft_model, prompts = model, model, [[5, 6], [7]]"],
    **{f"docs/methods/{name}.md": [CLASSIFIER] for name in ("lora", "houlsby", "bitfit", "full", "head")},
}


@pytest.fixture(scope="module", autouse=True)
def _at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokens and the shell's settings out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # CI may have started us without one
        patch.setenv("HF_DATASETS_CACHE", str(home / "cache"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
        yield


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that every page starts from."""
    place = tmp_path_factory.mktemp("documents") / "place"
    furnish(place)
    shutil.copytree(ROOT / "recipes", place / "recipes")
    for page, names in SAVED.items():
        complete = [block.text for block in blocks(page, PAGES[page]) if "output_dir:" in block.text]
        for name, text in zip(names, complete, strict=True):
            (place / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        execute(["peftlab", "run", "my-chats.yaml"])
        execute(["peftlab", "run", "tickets.yaml"])
        for copy in ("a", "b", "mine", "tickets-bitfit"):
            shutil.copytree("runs/tickets", f"runs/{copy}")
    return place


def parsed(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return verb and arguments of a command, once launcher and command line have accepted their names and options."""
    if words[0] == "accelerate":
        launch_command_parser().parse_args(words[2:])
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    command, rest, verb = typer.main.get_command(app), list(words[words.index("peftlab") + 1 :]), ""
    while rest and rest[0] in getattr(command, "commands", {}):
        command, verb = command.commands[rest[0]], f"{verb} {rest.pop(0)}".strip()
    command.make_context(verb or "peftlab", list(rest), resilient_parsing=not verb)
    return verb, rest


def recipe_and_overrides(arguments: Sequence[str]) -> list[str]:
    """Return arguments of ``run`` without its options."""
    given = typer.main.get_command(app).commands["run"].make_context("run", list(arguments)).params  # type: ignore[attr-defined]
    return [given["recipe"], *(given["overrides"] or [])]


def execute(words: Sequence[str], piped: str | None = None) -> None:
    """Execute a command in the working directory, in this process."""
    verb, arguments = parsed([word.replace(SMOLLM2, CHAT).replace(MINILM, ENCODER) for word in words])
    short = f"{STEP} {RECIPES.get(arguments[0], '')}" if verb == "run" else VERBS.get(verb, "")
    added = [*arguments, *([] if "--theory" in arguments else shlex.split(short))]  # the formulas take no option
    if any(argument.startswith("sweep.") for argument in arguments):  # a grid: of run's options validate has none
        verb, added = "validate", recipe_and_overrides(added)
    done = CliRunner().invoke(app, [*verb.split(), *added], input=piped or "Hello\n")
    if done.exception is not None:
        raise AssertionError(f"{shlex.join(words)}\n{done.output[-3000:]}{done.exception!r}") from done.exception


def marked(shown: Command | Block) -> bool:
    """Whether a command's comment, or the first line of a program, says that it is out of reach."""
    note = shown.note if isinstance(shown, Command) else shown.text.partition("\n")[0]
    return any(mark in note for mark in MARKS)


@pytest.mark.parametrize("page", [page for page, shown in SHOWN.items() if not all(map(marked, shown))])
def test_what_a_page_shows_runs(page: str, furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(furnished, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    for command in BEFORE.get(page, ()):
        execute(shlex.split(command))
    names: dict[str, object] = {}
    given = iter(GIVEN.get(page, ()))
    for shown in SHOWN[page]:
        if marked(shown):
            continue
        if isinstance(shown, Block):
            exec(next(given, ""), names)
            exec(compile("\n" * (shown.line - 1) + shown.text, str(ROOT / page), "exec"), names)
        else:
            execute(shown.words, shown.piped)


@pytest.mark.parametrize("command", [shown for each in SHOWN.values() for shown in each if marked(shown)], ids=str)
def test_a_marked_command_has_options_and_keys_that_exist(command: Command | Block) -> None:
    if isinstance(command, Block):
        compile(command.text, str(command), "exec")
        return
    verb, arguments = parsed(command.words)
    if verb == "run":
        recipe, *overrides = recipe_and_overrides(arguments)
        load_recipe(recipe, overrides)
