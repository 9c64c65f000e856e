"""Cells and sweeps: which recipes they are, and what is said of mistakes, where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peftlab.errors import PeftlabError
from peftlab.methods.config import METHODS
from peftlab.recipe.load import Cell, dump_recipe, load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from peftlab.training.config import TrainConfig

TABLE = """\
kind: table
model: x/y
tasks: [glue/cola, glue/mrpc, glue/mnli]
rows:
  lora: {method: {name: lora, r: 8}, train: {lr: 1e-4}}
  full: {method: {name: full}}
per_task:
  glue/cola: {train: {epochs: 80, lr: 2e-4}, data: {max_train_examples: 9}}
init: {glue/mrpc: glue/mnli}
seeds: [3, 1]
train: {batch_size: 16}
output_dir: runs/t
"""
ONE = "model: x/y\ntask: glue/cola\nmethod: {name: lora, r: 4}\ntrain: {lr: 1e-3, seed: 2}\noutput_dir: runs/one\n"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(TABLE)
    Path("one.yaml").write_text(ONE)


def cells(name: str, *overrides: str) -> dict[str, Cell]:
    recipe = load_recipe(name, overrides)
    assert isinstance(recipe, TableRecipe)
    return {cell.directory.name: cell for cell in table_cells(recipe)}


def complaint(name: str, *overrides: str) -> list[str]:
    with pytest.raises(PeftlabError) as caught:
        load_recipe(name, overrides)
    return str(caught.value).splitlines()


def test_cells_are_whole_recipes_in_the_order_they_run() -> None:
    found = cells("t.yaml")
    assert list(found)[:6] == [f"{task}-{row}-seed3" for task in ("cola", "mnli", "mrpc") for row in ("lora", "full")]
    assert len(found) == 12
    cola = found["cola-lora-seed1"].recipe
    assert (cola.train.epochs, cola.train.lr, cola.train.batch_size, cola.train.seed) == (80, 1e-4, 16, 1)
    assert found["cola-full-seed1"].recipe.train.lr == 2e-4, "a row's own key wins over the task's"
    assert (cola.data.max_train_examples, cola.merge, cola.method.r) == (9, False, 8)  # type: ignore[attr-defined]
    assert found["mrpc-full-seed3"].recipe.init_from == "runs/t/cells/mnli-full-seed3"
    assert found["mnli-full-seed3"].recipe.init_from is None


def test_a_rows_own_keys_for_a_task_win_over_all_others() -> None:
    per_task = "rows.lora.per_task={glue/cola: {train: {lr: 3e-4}, data: {max_train_examples: 5}}, glue/rte: {}}"
    found = cells("t.yaml", per_task, "rows.full.init_from=null", "rows.full.model=a/b")
    cola = found["cola-lora-seed1"].recipe
    assert (cola.train.lr, cola.train.epochs, cola.data.max_train_examples) == (3e-4, 80, 5)
    assert found["mrpc-lora-seed1"].recipe.train.lr == 1e-4
    assert found["mrpc-lora-seed1"].recipe.init_from == "runs/t/cells/mnli-lora-seed1"
    assert found["mrpc-full-seed1"].recipe.init_from is None, "a row may start afresh where the table does not"
    assert (found["cola-full-seed1"].recipe.model, cola.model) == ("a/b", "x/y")


def test_where_a_cell_starts_from_is_what_its_task_says() -> None:
    found = cells("t.yaml", "rows.lora.per_task={glue/mrpc: {init_from: null}}", "per_task.glue/mrpc.init_from=runs/x")
    assert found["mrpc-lora-seed1"].recipe.init_from is None
    assert found["mrpc-full-seed1"].recipe.init_from == "runs/x"


def test_a_setting_that_is_swept_twice() -> None:
    with pytest.raises(PeftlabError, match=r"train\.lr: swept twice; give all values in one list"):
        load_recipe("one.yaml", ["sweep.lr=[1e-4, 5e-4]", "sweep.train.lr=[1e-3]"])


def test_what_has_no_fold_is_not_merged() -> None:
    merged = {"into": "dequantised", "verify": True, "latency": True}
    for override, expected in (("merge=true", True), ("merge={latency: true}", merged)):
        found = cells("t.yaml", override, "rows.adapters={method: {name: houlsby}}")
        values = {cell.row: cell.recipe.model_dump()["merge"] for cell in found.values()}
        assert values == {"lora": expected, "full": expected, "adapters": False}
    swept = cells("one.yaml", "merge={latency: true}", "sweep.method=[lora, houlsby]")
    assert [cell.recipe.model_dump()["merge"] for cell in swept.values()] == [merged, False]


def test_a_table_is_what_it_was_when_dumped_and_loaded() -> None:
    recipe = load_recipe("t.yaml")
    Path("again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("again.yaml") == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rows.lora.method.rank=3", "method.rank: unknown key (did you mean 'r'?)"),
        ("train.layers.frm=2", "train.layers.frm: unknown key (did you mean 'from'?)"),
        ("per_task.glue/cola.train.epoch=3", "train.epoch: unknown key (did you mean 'epochs'?)"),
        ("per_task.glue/cola.train.epochs=no", "train.epochs: expected number above 0, got 'no'"),
        ("per_task.glue/cole.train.lr=1", "per_task: unknown task 'glue/cole' (did you mean 'glue/cola'?)"),
        ("rows.full.train.seed=3", "rows.full.train.seed: a table's seeds are listed under seeds"),
        ("rows.full.task=glue/rte", "rows.full.task: the table sets it for all cells"),
        ("train.seed=3", "train.seed: a table's seeds are listed under seeds"),
        ("seeds=[1,1]", "seeds: 1 occurs twice"),
        ("rows.full.method=full", "method: expected keys below it, got 'full' (write {name: full})"),
        ("init.glue/cola=glue/rte", "init.glue/cola: glue/rte is not under tasks; "),
        ("init.glue/cola=glue/mrpc", "init.glue/cola: glue/mrpc is itself under init; "),
        (
            "rows.full.per_task.glue/cole.train.lr=1",
            "rows.full.per_task: unknown task 'glue/cole' (did you mean 'glue/cola'?",
        ),
        ("rows.full.per_task.glue/cola.train.epoch=1", "train.epoch: unknown key (did you mean 'epochs'?)"),
        ("rows.full.per_task.glue/cola.train.seed=1", "rows.full.per_task.glue/cola.train.seed: a table's seeds are"),
        ("rows.full.per_task.glue/cola.task=x", "rows.full.per_task.glue/cola.task: the table sets it for all cells"),
        ("rows.full.per_task=[glue/cola]", "rows.full.per_task: expected tasks, and keys below each"),
        ("data.path=a", ""),
        ("tasks=[glue/cola]", ""),
    ],
)
def test_mistakes_are_told_where_they_were_written(override: str, message: str) -> None:
    if not message:
        load_recipe("t.yaml", [override])
        return
    (line,) = complaint("t.yaml", override)
    assert line.startswith(f"override {override!r}: {message}")


def test_a_mistake_in_the_file_is_told_with_its_line() -> None:
    Path("t.yaml").write_text(TABLE.replace("epochs: 80", "epoch: 80").replace("name: full", "name: fall"))
    six, eight = complaint("t.yaml")
    assert six.startswith("t.yaml:6: method: unknown method 'fall' (did you mean 'full'?)") or six.startswith(
        "t.yaml:6: method.name: unknown method 'fall' (did you mean 'full'?)"
    )
    assert eight == "t.yaml:8: train.epoch: unknown key (did you mean 'epochs'?)"
    Path("t.yaml").write_text(TABLE.replace("  full:", "  lo/ra: {method: {name: head}}\n  lo_ra:"))
    assert complaint("t.yaml") == ["t.yaml:7: rows: 'lo_ra' and 'lo/ra' would have the same directories"]


def test_a_sweep_is_a_table() -> None:
    recipe = load_recipe("one.yaml", ["sweep.lr=[1e-4,5e-4]", "sweep.method.r=[2,16]", "sweep.seed=[0,1,2]"])
    assert isinstance(recipe, TableRecipe)
    assert (recipe.tasks, recipe.seeds, recipe.output_dir) == (["glue/cola"], [0, 1, 2], "runs/one-sweep")
    assert list(recipe.rows) == [f"lr={lr} r={r}" for lr in ("0.0001", "0.0005") for r in (2, 16)]
    found = {(cell.row, cell.seed): cell.recipe for cell in table_cells(recipe)}
    assert len(found) == 12
    one = found["lr=0.0005 r=2", 1]
    assert (one.train.lr, one.train.seed, json.loads(one.method.model_dump_json())["r"]) == (5e-4, 1, 2)
    assert one.model_copy(update={"output_dir": "o"}) == load_recipe(
        "one.yaml", ["train.lr=5e-4", "method.r=2", "train.seed=1", "merge=false", "output_dir=o"]
    )


def test_what_else_can_be_swept() -> None:
    assert list(cells("one.yaml", "sweep.seed=[0,1]")) == ["cola-lora-seed0", "cola-lora-seed1"]
    methods = cells("one.yaml", "sweep.r=[2,3]", "sweep.method=[{name: lora}]", "sweep.task=[glue/cola,glue/rte]")
    assert {cell.recipe.method.r for cell in methods.values()} == {2, 3}  # type: ignore[attr-defined]
    assert {cell.task for cell in methods.values()} == {"glue/cola", "glue/rte"}
    models = cells("one.yaml", "sweep.model=[a/b, c/d]", "model=e/f", "init_from=runs/mnli")
    assert [cell.recipe.model for cell in models.values()] == ["a/b", "c/d"]
    assert {cell.recipe.init_from for cell in models.values()} == {"runs/mnli"}
    names = cells("one.yaml", "sweep.target_modules=[[query],[query,value]]")
    assert list(names) == ["cola-target_modules=query-seed2", "cola-target_modules=query,value-seed2"]


def test_a_sweep_of_methods_gives_each_its_own_learning_rate() -> None:
    sweep = "sweep.method=[lora, bitfit, houlsby, head, full]"
    own = {cell.row: cell.recipe.train.lr for cell in cells("one.yaml", "~train.lr", sweep).values()}
    assert own == {f"method={name}": row.default_lr for name, row in METHODS.items()}
    assert own["method=full"] < own["method=lora"] < own["method=bitfit"]
    stated = cells("one.yaml", sweep)
    assert {cell.recipe.train.lr for cell in stated.values()} == {1e-3}, "a recipe's own rate is for all"
    # The recipe's own method keeps its settings; the others have their defaults.
    assert stated["cola-method=lora-seed2"].recipe.method == load_recipe("one.yaml").method  # type: ignore[union-attr]


def test_a_recipe_without_a_rate_has_its_methods_and_says_so(tmp_path: Path) -> None:
    recipe = load_recipe("one.yaml", ["~train.lr", "method=full"])
    assert recipe.train.peak_lr == recipe.train.lr == METHODS["full"].default_lr
    Path("again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("again.yaml") == recipe
    with pytest.raises(PeftlabError, match=r"train\.lr: missing"):
        TrainConfig().peak_lr  # noqa: B018


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.learning_rate=[1]", "learning_rate: unknown key (did you mean 'train.lr'?)"),
        ("sweep.train.lrr=[1]", "train.lrr: unknown key (did you mean 'lr'?)"),
        ("sweep.rank=[1]", "rank: unknown key (did you mean 'method.r'?)"),
        ("sweep.lrr=[1]", "lrr: unknown key (did you mean 'lr'?)"),
        ("sweep.bottleneck=[1]", "bottleneck: unknown key"),
        ("sweep.lr=1e-4", "lr: a sweep takes a list of values: sweep.lr=[value, value]"),
        ("sweep.lr=[]", "lr: a sweep takes a list of values: "),
        ("sweep.lr=[1,1]", "lr: a value occurs twice"),
        ("sweep.lr=[a]", "train.lr: expected number above 0 or null, got 'a'"),
        ("sweep.lr=[1", "not valid YAML: "),
        ("sweep.lr", "write sweep.key=[value, value]"),
        ("sweep.train=[1]", "train: is a section; sweep one of its keys"),
        ("sweep.method.rank_pattern.x=[1]", "method.rank_pattern: sweep it as a whole: sweep.method.rank_pattern=["),
        ("sweep.task=[glue/cole]", "task: unknown task 'glue/cole' (did you mean 'glue/cola'?)"),
        ("sweep.seed=[-1]", "seeds: expected list of whole number from 0"),
        ("sweep.output_dir=[a]", "rows.output_dir=a.output_dir: the table sets it for all cells"),
    ],
)
def test_mistakes_in_sweeps(override: str, message: str) -> None:
    (line,) = complaint("one.yaml", override)
    assert line.startswith(f"override {override!r}: {message}")


def test_a_table_is_not_swept() -> None:
    (line,) = complaint("t.yaml", "sweep.lr=[1]")
    assert line == "override 'sweep.lr=[1]': only recipes of kind finetune and draft are swept, this is a table"


def test_cells_of_a_recipe_made_in_code_are_checked_too() -> None:
    values: dict[str, Any] = {"kind": "table", "model": "m", "tasks": ["glue/ax"], "rows": {"a": {}}, "output_dir": "o"}
    with pytest.raises(PeftlabError, match="glue/ax has no training split"):
        table_cells(TableRecipe.model_validate(values))
