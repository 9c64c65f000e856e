"""Types that annotations cannot state, each with the reason: the one module that names ``Any``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")

Named: TypeAlias = Any
"""What ``"module:attribute"`` names: a class or a function whose type is known only once it is imported. The rows'
docstrings say what each one is."""

Function: TypeAlias = Callable[..., ResultT]
"""A function of a library, or a table's, that is called with arguments that its caller chooses; mypy counts the ``...``
as ``Any``."""

Unwrapped: TypeAlias = Any
"""The module inside the one that accelerate wraps it in: a wrapper's type does not say what it contains."""

AutogradContext: TypeAlias = Any
"""``ctx`` of a ``torch.autograd.Function``, whose attributes are what its forward pass stores there."""

Parameters: TypeAlias = dict[str, Any]
"""A module's ``_parameters`` for one call of its forward: tensors too, where torch's annotation wants parameters."""

Attributes: TypeAlias = dict[str, Any]
"""A dataclass's or a function's arguments by name, for a call with ``**``: mypy knows one type for all of them."""

Unpickled: TypeAlias = Any
"""The contents of a pickle of tensors, numbers, texts and containers: their types are known to its writer alone."""

JsonObject: TypeAlias = Mapping[str, Any]
"""An object within a results.json: the types of its values are known to its writer alone."""

Converter: TypeAlias = Any
"""One of transformers' weight converters: its methods take tensors too, where their annotations want futures."""

TokenizerJson: TypeAlias = dict[str, Any]
"""A tokenizer.json: what each of its sections contains depends on the types that they name."""

LoadedKeys: TypeAlias = Any
"""The missing and unexpected keys that peft's loading returns: its annotation, ``namedtuple``, is not a type."""

Schema: TypeAlias = dict[Any, Any] | Callable[..., Any]
"""The JSON schema of a tool, as transformers' chat templates take it."""

KnownModel: TypeAlias = Any
"""A model or module whose class was chosen by its name: to mypy, each of its attributes is a tensor or a module."""

Operator: TypeAlias = Any
"""One of torch's operators as a dispatch mode receives it: called with any arguments, and named by an attribute."""

Compiled: TypeAlias = Any
"""A decorator of numba's that makes a function of the compiler one of compiled code, which takes other arguments."""

Processor: TypeAlias = Any
"""A tokenizer, an image processor, or a processor of texts and images: transformers' classes of them share no base."""

Tokenised: TypeAlias = Any
"""What a tokenizer returns for a batch of texts: transformers' class of it is a dictionary of any values."""
