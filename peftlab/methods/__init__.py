"""What is put into a model: one file a method, and the table that lists them."""

from peftlab.methods.injection import (
    count_parameters,
    disabled,
    inject,
    inject_bitfit,
    inject_houlsby,
    inject_lora,
    injection,
    is_injected,
    make_config,
    merge,
    print_trainable_parameters,
    remove,
    trainable_parameters,
    unmerge,
)
from peftlab.methods.modes import eval_mode
from peftlab.methods.table import METHODS

__all__ = [
    "METHODS",
    "count_parameters",
    "disabled",
    "eval_mode",
    "inject",
    "inject_bitfit",
    "inject_houlsby",
    "inject_lora",
    "injection",
    "is_injected",
    "make_config",
    "merge",
    "print_trainable_parameters",
    "remove",
    "trainable_parameters",
    "unmerge",
]
