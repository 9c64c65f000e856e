"""Reading the LoRA cases of peft's own tests/test_custom_models.py: its table of cases and the models it names.

Only class definitions and the table are executed, so none of the file's imports for testing is needed.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers.pytorch_utils
from peft.tuners import lora
from torch import nn

from tests.peft_cases.cases import Case

GROUP = "peft's own cases"
_OTHER = {
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "use_qalora": "QALoRA",
}


def translated(file: Path) -> list[Case]:
    """Return the LoRA cases of ``file``, each as it is written."""
    body = ast.parse(file.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and _is_a_model(node)]
    names: dict[str, Any] = {**vars(peft), "peft": peft, "torch": torch, "nn": nn, "lora": lora}
    names |= {"Conv1D": transformers.pytorch_utils.Conv1D, **_configs()}
    exec(compile(ast.Module(classes, []), str(file), "exec"), names)
    table = next(node.value for node in body if isinstance(node, ast.Assign) and _targets(node) == ["TEST_CASES"])
    assert isinstance(table, ast.List)
    rows = [row for row in table.elts if isinstance(row, ast.Tuple) and ast.unparse(row.elts[2]) == "LoraConfig"]
    return [_case(eval(compile(ast.Expression(row), str(file), "eval"), names), names) for row in rows]


def _case(row: tuple[str, str, Any, dict[str, Any]], names: dict[str, Any]) -> Case:
    name, model, _, fields = row
    other = next((title for key, title in _OTHER.items() if fields.get(key)), "")
    return Case(GROUP, name, partial(_build, names["MockTransformerWrapper"], model), _numbers, fields, other)


def _build(models: Any, name: str) -> nn.Module:
    return models.from_pretrained(name).eval()


def _numbers() -> dict[str, Any]:
    return {"X": torch.arange(90).view(9, 10)}


def _configs() -> dict[str, Any]:
    from peft.tuners.lora import config, monteclora

    return {**vars(config), **vars(monteclora)}


def _is_a_model(node: ast.ClassDef) -> bool:
    return node.name == "MockTransformerWrapper" or [ast.unparse(base) for base in node.bases] == ["nn.Module"]


def _targets(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]
