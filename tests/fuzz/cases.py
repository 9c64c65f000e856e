"""The classes of input: what is mutated, the command that reads it, and what it has to print or write if accepted."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz import hostile, mutations, recipes, tables, tensors
from tests.fuzz import images as pictures
from tests.fuzz.running import Outcome
from tests.fuzz.world import ADAPTERS, CLASSES, WORDS, World

ROOT = Path(__file__).resolve().parents[2]
_BASES = {"base": "base", "sharded": "sharded"}


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        arguments: of the command line.
        check: given the outcome of a command that accepted, says what is wrong about it; empty for nothing.
        outputs: paths that must not be there after a refusal.
        kept: files of the user's that must be there after either.
    """

    arguments: list[str]
    check: Callable[[Outcome], str]
    outputs: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()


def recipe(world: World, folder: Path, rng: random.Random) -> Case:
    """A recipe's text or values, perhaps with overrides, printed by ``validate``."""
    text = rng.choice(sorted((ROOT / "recipes").rglob("*.yaml"))).read_bytes()
    file = folder / "recipe.yaml"
    kind = rng.choice(("bytes", "bytes", "values", "values", "sound", "aliases"))
    if kind == "bytes":
        file.write_bytes(mutations.damaged(text, rng))
    elif kind == "values":
        file.write_text(hostile.spelled(mutations.changed(yaml.safe_load(text), rng)))
    elif kind == "sound":
        file.write_bytes(text)
    else:
        file.write_text(_aliases(rng))
    overrides = [f"train.{_fitting(rng)}" for _ in range(rng.randrange(4))] if kind == "sound" else []
    if rng.random() < 0.2:
        keys = ("model", "train.lr", "train.seed", "method", "method.r", "data.path", "x", "train", "kind", "draft", "")
        for _ in range(rng.choice((1, 2))):
            value = (
                hostile.spelled(hostile.value(rng)) if rng.random() < 0.5 else rng.choice(("lora", "1", "[a]", "yes"))
            )
            overrides.append(f"{rng.choice(keys)}={value.replace(chr(0), '')[:100_000]}")

    def check(outcome: Outcome) -> str:
        try:
            stated = recipes.overridden(recipes.read(file.read_text(encoding="utf-8")), overrides)
        except recipes.Unreadable:
            return ""  # the two YAML parsers differ in what they take for YAML at all
        return recipes.disagreement(stated, recipes.read(outcome.out), _schema())

    return Case(["validate", "recipe.yaml", *overrides], check)


def run(world: World, folder: Path, rng: random.Random) -> Case:
    """A recipe's section ``train``, run for two steps and, in all that it says, by ``results.json``."""
    fitting = [text for _ in range(rng.randrange(1, 4)) if not (text := _fitting(rng)).startswith(("compile", "max_s"))]
    seed = rng.choice((0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1))
    overrides = [f"train.{text}" for text in (*fitting, f"seed={seed}")]

    def check(outcome: Outcome) -> str:
        results = json.loads((folder / "out" / "results.json").read_text())
        told = {"seed": seed, "task": "text/classification", "method": "lora", "model": str(world.base)}
        wrong = [key for key, value in told.items() if results[key] != value]
        return f"results.json: {wrong}" if wrong or results["steps"] not in (1, 2) else ""

    return Case(["run", str(world.run / "recipe.yaml"), "output_dir=out", *overrides], check, (folder / "out",))


def _fitting(rng: random.Random) -> str:
    """A key of the section ``train`` with a value that its type allows, if not its bounds."""
    key, field = rng.choice(list(_schema()["$defs"]["TrainConfig"]["properties"].items()))
    options = field.get("anyOf", [field])
    option = rng.choice(options)
    values = {
        "integer": rng.choice((0, 1, 2, 7, 300, 2**31)),
        "number": rng.choice((0, 0.5, 1e-4, 3, 1e30)),
        "boolean": rng.choice(("true", "false")),
        "null": rng.choice(("null", "~")),
        "array": rng.choice(("[]", "[0.9, 0.99]", "[wandb]", "[tensorboard, trackio]")),
        "string": rng.choice(option.get("enum", ["x"])),
    }
    return f"{key}={values.get(option.get('type', ''), 'null')}"  # sections and choices among them have no type


def _aliases(rng: random.Random) -> str:
    """A document that grows tenfold with each line when its aliases are expanded, or that contains itself."""
    if rng.random() < 0.3:
        return "model: a\ntask: glue/cola\noutput_dir: b\ndata: &a {text: [*a]}\n"
    lines = ["x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, rng.choice((3, 9, 30)))]
    return "\n".join(["model: a", "task: glue/cola", "output_dir: b", *lines]) + "\n"


def _schema() -> dict[str, Any]:
    from peftlab.recipe.document import json_schema

    return json_schema()


def adapter_config(world: World, folder: Path, rng: random.Random) -> Case:
    """``adapter_config.json``, merged."""
    adapter = _copied(world.adapter(rng.choice(list(ADAPTERS))), folder / "adapter")
    _mutate_json(adapter / "adapter_config.json", rng)
    return _merge(world, adapter, world.root / rng.choice(list(_BASES)), folder)


def adapter_weights(world: World, folder: Path, rng: random.Random) -> Case:
    """``adapter_model.safetensors``: its header's values, or its bytes, merged."""
    adapter = _copied(world.adapter(rng.choice(list(ADAPTERS))), folder / "adapter")
    _mutate_tensors(adapter / "adapter_model.safetensors", rng)
    return _merge(world, adapter, world.base, folder)


def base_weights(world: World, folder: Path, rng: random.Random) -> Case:
    """The base's weight files or their index, merged into."""
    base = _copied(world.root / rng.choice(list(_BASES)), folder / "base")
    index = base / "model.safetensors.index.json"
    if index.exists() and rng.random() < 0.5:
        _mutate_json(index, rng)
    else:
        _mutate_tensors(rng.choice(sorted(base.glob("*.safetensors"))), rng)
    return _merge(world, world.adapter(rng.choice(("lora", "head"))), base, folder)


def _merge(world: World, adapter: Path, base: Path, folder: Path) -> Case:
    out = folder / "merged"

    def check(outcome: Outcome) -> str:
        config = json.loads((adapter / "adapter_config.json").read_text())
        weights = tensors.read(adapter / "adapter_model.safetensors")
        return tensors.difference(out, tensors.merged(tensors.read_directory(base), weights, config))

    return Case(["merge", str(adapter), "--base", str(base), "-o", "merged", "--no-verify"], check, (out,))


def model_config(world: World, folder: Path, rng: random.Random) -> Case:
    """A model's ``config.json``: inspected, merged into, or loaded and scored."""
    base = _copied(world.base, folder / "base")
    path = base / "config.json"
    if rng.random() < 0.3:
        config = json.loads(path.read_text())
        numbers = [key for key, value in config.items() if type(value) is int]
        config[rng.choice([*numbers, "num_labels"])] = rng.choice((10**6, 10**9, 2**31, 2**63, 10**30, -1, 0))
        path.write_text(json.dumps(config))
    else:
        _mutate_json(path, rng)
    verb = rng.choice(("inspect", "inspect", "merge", "eval"))
    if verb == "merge":
        return _merge(world, world.adapter("lora"), base, folder)
    if verb == "eval":
        return Case(["eval", str(world.run), f"model={base}"], lambda outcome: "")
    return Case(["inspect", "base", "r=2", "target_modules=[query]"], lambda outcome: _counts(path, outcome))


def _counts(path: Path, outcome: Outcome) -> str:
    """Compare what ``inspect`` counted with BERT's formula, where the configuration is still a BERT classifier's."""
    config = json.loads(path.read_text())
    if config.get("model_type") != "bert" or config.get("architectures") != ["BertForSequenceClassification"]:
        return ""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings")
    d, layers, wide, vocabulary, positions = (config.get(name) for name in names)
    types = config.get("type_vocab_size", 2)
    named = len(config.get("id2label") or (0, 1))
    labels = config.get("num_labels", named)
    if labels != named:
        return ""  # the file contradicts itself
    if None in (d, layers, wide, vocabulary, positions, types):
        return ""
    layer = 4 * (d * d + d) + 2 * d + d * wide + wide + wide * d + d + 2 * d
    head = labels * d + labels
    total = (vocabulary + positions + types) * d + 2 * d + layers * layer + d * d + d + head
    lora = layers * 4 * d
    found = re.search(r"all parameters\s+([\d,]+)", outcome.out)
    if found is None or int(found[1].replace(",", "")) not in (total + lora, total):
        return f"all parameters: {found and found[1]}, not {total} and {lora}"
    return ""


def tokenizer(world: World, folder: Path, rng: random.Random) -> Case:
    """The tokenizer's files: loaded and scored with."""
    base = _copied(world.base, folder / "base")
    _mutate_json(base / rng.choice(("tokenizer.json", "tokenizer_config.json")), rng)
    return Case(["eval", str(world.run), f"model={base}"], lambda outcome: "")


def data(world: World, folder: Path, rng: random.Random) -> Case:
    """Rows to score: each format, its bytes or its values."""
    place = folder / "data"
    place.mkdir()
    shutil.copy(world.data / "train.csv", place)
    suffix = rng.choice((".csv", ".csv", ".tsv", ".jsonl", ".json", ".parquet", ".csv.gz", ".jsonl.gz"))
    path = place / f"validation{suffix}"
    rows = [
        {"text": " ".join(rng.choices(WORDS, k=rng.randrange(1, 6))), "label": rng.choice(CLASSES)} for _ in range(7)
    ]
    path.write_bytes(_written(rows, suffix, rng))
    arguments = ["eval", str(world.run), f"data.path={place}"]
    return Case(arguments, lambda outcome: _scores(world, path, outcome))


def _written(rows: list[dict[str, str]], suffix: str, rng: random.Random) -> bytes:
    import gzip
    import io

    if suffix.startswith(".json"):
        whole = mutations.changed(rows, rng) if rng.random() < 0.5 else rows
        lines = whole if isinstance(whole, list) else [whole]
        text = hostile.spelled(whole) if suffix == ".json" else "\n".join(map(hostile.spelled, lines)) + "\n"
        content = text.encode()
    elif suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        out = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), out)
        return mutations.damaged(out.getvalue(), rng)
    else:
        mark = "\t" if suffix == ".tsv" else ","
        content = "".join(mark.join(line) + "\n" for line in [("text", "label"), *(r.values() for r in rows)]).encode()
    if rng.random() < 0.6:
        content = mutations.damaged(content, rng)
    if not suffix.endswith(".gz"):
        return content
    packed = gzip.compress(content)
    return mutations.damaged(packed, rng) if rng.random() < 0.5 else packed


def _scores(world: World, path: Path, outcome: Outcome) -> str:
    """Compare the printed accuracy and loss with those of the merged model on an independent reading of the file."""
    read = tables.rows(path)
    texts = [row["text"] for row in read]
    accuracy, loss = _independent(world, texts, [CLASSES.index(_class(row["label"])) for row in read])
    found = re.search(r"validation \(\d+ examples?\): .*?accuracy ([\d.]+).*?loss ([\d.]+)", outcome.out)
    if found is None or abs(float(found[1]) - accuracy) > 1e-3 or abs(float(found[2]) - loss) > 1e-2:
        return f"printed {outcome.out!r}, and {len(texts)} rows score {accuracy:.4f} at a loss of {loss:.4f}"
    return ""


def _class(value: Any) -> str:
    return str(value).strip()


def _independent(world: World, texts: list[str], labels: list[int]) -> tuple[float, float]:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(world.merge).eval()
    reader = transformers.AutoTokenizer.from_pretrained(world.base)
    batch = reader(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    truth = torch.tensor(labels)
    accuracy = (logits.argmax(-1) == truth).float().mean().item()
    return accuracy, torch.nn.functional.cross_entropy(logits, truth).item()


def prompts(world: World, folder: Path, rng: random.Random) -> Case:
    """Prompts to measure decoding with."""
    path = folder / rng.choice(("prompts.jsonl", "prompts.txt"))
    content = (world.root / "prompts.jsonl").read_bytes()
    if rng.random() < 0.5:
        rows = [json.loads(line) for line in content.splitlines()]
        content = "\n".join(hostile.spelled(mutations.changed(row, rng)) for row in rows).encode()
    else:
        content = mutations.damaged(content, rng)
    path.write_bytes(content)
    options = ["--max-new-tokens", "2", "--repeats", "1", "--gamma", "2", "--json", "bench.json"]

    def check(outcome: Outcome) -> str:
        lines = [line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
        result = json.loads((folder / "bench.json").read_text())
        found = len(result["prompts"]) + len(result["skipped"])  # the latter are longer than the model's context
        return "" if found == len(lines) else f"{found} prompts measured or skipped, the file has {len(lines)}"

    return Case(["draft", "bench", "--target", str(world.llama), "--prompts", path.name, *options], check)


def images(world: World, folder: Path, rng: random.Random) -> Case:
    """Images of prompts and conversations: damaged files, and parts of messages that are none."""
    parts = pictures.damaged(folder, rng)
    pictures.write_rows(folder, parts, world.sees)
    arguments = rng.choice(list(pictures.commands(world.sees, parts).values()))

    def check(outcome: Outcome) -> str:
        from PIL import Image

        named = [path for option, path in pairwise(arguments) if option == "--image"]
        if not named:
            written = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])
            parts = written["messages"][0]["content"]
            named = [part["path"] for part in parts if part.get("type") == "image"]
        for path in named:
            with Image.open(folder / path) as image:
                if arguments[0] != "validate":  # which reads no pixels
                    image.load()  # an error here: what was accepted is no image
        return ""

    return Case(arguments, check, (folder / "out",))


def heads(world: World, folder: Path, rng: random.Random) -> Case:
    """Medusa heads, drafting: whatever they are, the text is the target's own."""
    place = _copied(world.heads, folder / "heads")
    if rng.random() < 0.7:
        _mutate_json(place / "config.json", rng)
    else:
        _mutate_tensors(place / "model.safetensors", rng)

    def check(outcome: Outcome) -> str:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(world.llama)
        reader = transformers.AutoTokenizer.from_pretrained(world.llama)
        ids = reader("the film was", return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        text = reader.decode(new, skip_special_tokens=True)
        return "" if text.split() == outcome.out.split() else f"wrote {outcome.out!r}, the target alone {text!r}"

    options = ["--draft", "heads", "--prompt", "the film was", "--max-new-tokens", "5", "--gamma", "2"]
    return Case(["generate", "--target", str(world.llama), *options], check)


def report(world: World, folder: Path, rng: random.Random) -> Case:
    """``merge.json`` of a merged directory, unmerged."""
    merged = _copied(world.merge, folder / "merged")
    _mutate_json(merged / "merge.json", rng)
    out = folder / "base"

    def check(outcome: Outcome) -> str:
        return tensors.difference(out, tensors.read_directory(world.base))

    return Case(["unmerge", "merged", "--base", str(world.base), "-o", "base"], check, (out,))


def mark(world: World, folder: Path, rng: random.Random) -> Case:
    """A ``peftlab.json`` that lists what peftlab did not write: overwriting must not remove the user's own files."""
    merged = _copied(world.merge, folder / "merged")
    names = ["mine.txt", "notes/mine.csv", "model-mine.safetensors.txt"]
    (merged / "notes").mkdir()
    for name in names:
        (merged / name).write_text("mine")
    path = merged / "peftlab.json"
    values = json.loads(path.read_text())
    listed = next(key for key, value in values.items() if isinstance(value, list))
    values[listed] += rng.sample(
        ["*", "**", "*.txt", "notes/*", "*/*", "mine.txt", "./mine.txt", "../merged/*", *names], 3
    )
    path.write_text(json.dumps(values))
    if rng.random() < 0.5:
        _mutate_json(path, rng)

    command = ["merge", str(world.adapter("lora")), "--base", str(world.base), "-o", "merged", "--no-verify"]
    return Case([*command, "--overwrite"], lambda outcome: "", kept=tuple(merged / name for name in names))


def paths(world: World, folder: Path, rng: random.Random) -> Case:
    """Something that is no plain file or directory where one is expected."""
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    odd = [
        "fifo",
        "loop",
        "dangling",
        "file/x",
        "empty",
        "file",
        "a\x00b",
        "n" * 300,
        "/dev/zero",
        "/dev/null",
        "",
        ".",
        "/",
    ]
    odd += [os.fsdecode(b"\xff.yaml"), "x\ny", "~nobody/x", "package:", "package:numpy/..", "-", "*"]
    name = rng.choice(odd)
    if rng.random() < 0.4:  # the odd thing is one of the files of a directory
        place, file = rng.choice(
            [(world.base, "config.json"), (world.base, "model.safetensors"), (world.base, "tokenizer.json"),
             (world.adapter("lora"), "adapter_config.json"), (world.adapter("lora"), "adapter_model.safetensors"),
             (world.sharded, "model.safetensors.index.json"), (world.base, "tokenizer_config.json")]
        )  # fmt: skip
        copied = _copied(place, folder / "copy")
        (copied / file).unlink()
        kind = rng.choice(("fifo", "directory", "loop", "zero"))
        if kind == "fifo":
            os.mkfifo(copied / file)
        elif kind == "directory":
            (copied / file).mkdir()
        else:
            (copied / file).symlink_to(file if kind == "loop" else "/dev/zero")
        adapter, base = (
            (str(copied), str(world.base)) if "adapter" in file else (str(world.adapter("lora")), str(copied))
        )
        return Case(["merge", adapter, "--base", base, "-o", "merged"], lambda outcome: "", (folder / "merged",))
    lora = str(world.adapter("lora"))
    commands = [
        ["validate", name], ["run", name], ["resume", name], ["eval", name], ["inspect", name], ["merge", name],
        ["merge", lora, "--base", name, "-o", "merged"], ["merge", lora, "-o", name], ["unmerge", name, "-o", "out"],
        ["unmerge", str(world.merge), "-o", name], ["merge", name, f"{name}:0.5", "-o", "merged"],
        ["eval", str(world.run), f"data.path={json.dumps(name)}"], ["recipes", "copy", "quickstart", "--to", name],
        ["eval", str(world.run), "--recipe", name], ["eval", str(world.run), f"model={json.dumps(name)}"],
        ["draft", "bench", "--target", name, "--prompts", str(world.root / "prompts.jsonl")],
        ["draft", "bench", "--target", str(world.llama), "--prompts", name],
        ["generate", "--target", str(world.llama), "--draft", name, "--prompt", "a"],
    ]  # fmt: skip
    return Case([argument.replace("\x00", "\\0") for argument in rng.choice(commands)], lambda outcome: "")


def _copied(source: Path, destination: Path) -> Path:
    shutil.copytree(source, destination)
    return destination


def _mutate_json(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.4:
        path.write_bytes(mutations.damaged(path.read_bytes(), rng))
    else:
        path.write_text(hostile.spelled(mutations.changed(json.loads(path.read_text()), rng)))


def _mutate_tensors(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.4:
        path.write_bytes(mutations.damaged(path.read_bytes(), rng))
    else:
        header, content = tensors.header_and_data(path)
        tensors.write(path, hostile.spelled(mutations.changed(header, rng)), content)


# class -> its share of the inputs
CLASSES_OF_INPUT: dict[str, tuple[Callable[[World, Path, random.Random], Case], float]] = {
    "recipe": (recipe, 0.27),
    "adapter config": (adapter_config, 0.14),
    "adapter weights": (adapter_weights, 0.12),
    "base weights": (base_weights, 0.09),
    "model config": (model_config, 0.12),
    "tokenizer": (tokenizer, 0.04),
    "data": (data, 0.12),
    "prompts": (prompts, 0.02),
    "heads": (heads, 0.03),
    "merge report": (report, 0.02),
    "run": (run, 0.02),
    "paths": (paths, 0.03),
    "images": (images, 0.03),
    "mark": (mark, 0.02),
}
