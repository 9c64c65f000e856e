"""The configurations of the methods, and the table that names the code of each; no torch is imported.

A new method is a ``MethodConfig`` here, a file beside this one with its ``plan``, and a row of ``METHODS``. Another
distribution adds its row by an entry point of the group ``peftlab.methods`` (see ``peftlab.registry``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from peftlab.errors import PeftlabError
from peftlab.patterns import matching
from peftlab.registry import Registry, Section, Texts, resolve

if TYPE_CHECKING:
    import peft

T = TypeVar("T")


class MethodConfig(Section):
    """Base of the methods' configurations; ``name``, a ``Literal`` in each, selects the method in a recipe."""

    name: str
    modules_to_save: Texts | None = Field(
        default=None,
        description="Further modules to train and save whole, by name suffix; the task head always is.",
    )
    first_layer: SkipJsonSchema[int | None] = Field(  # recipes say train.layers.from, for any method
        default=None,
        ge=0,
        description="Only the layers from this one on (from 0), the task head and modules_to_save train.",
    )

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return what in the configuration contradicts the shapes of an adapter's tensors; "" where nothing does.

        Checked before anything is allocated, so that a wrong size in a file costs no memory.

        Args:
            shapes: the shape of each of the adapter's tensors, by name.
        """
        return ""


ALL_LINEAR, QUERY_AND_VALUE = "all-linear", "query-value"
Start = Literal["pissa", "olora"]
"""The initialisations that take the leading part of the base's weight."""
Rank = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LoraConfig(MethodConfig):
    """LoRA's fields, named as peft names them."""

    name: Literal["lora"] = "lora"
    r: Rank = Field(default=8, description="Rank of the update.")
    lora_alpha: Positive = Field(default=16, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of the low-rank branch.")
    target_modules: list[str] | str | None = Field(
        default=None,
        description="Name suffixes, one full-match regular expression, all-linear, or query-value (attention's "
        "projections, by architecture); null: all-linear for language models, query-value for others.",
    )
    exclude_modules: list[str] | str | None = Field(default=None, description="Of the targets, those to leave out.")
    layers_to_transform: list[int] | int | None = Field(default=None, description="Only the targets in these layers.")
    layers_pattern: list[str] | str | None = Field(
        default=None,
        description="Of which list layers_to_transform gives numbers: names or regular expressions; null: the first.",
    )
    rank_pattern: dict[str, Rank] = Field(default={}, description="Rank by name suffix or regular expression.")
    alpha_pattern: dict[str, Positive] = Field(
        default={}, description="lora_alpha by name suffix or regular expression."
    )
    use_rslora: bool = Field(default=False, description="Scale by lora_alpha / sqrt(r) (rank-stabilised).")
    use_dora: bool = Field(default=False, description="Train each output row's norm apart from its direction (DoRA).")
    target_parameters: Texts | None = Field(
        default=None,
        description="Expert weights: 3-D parameters by name suffix; without target_modules, these alone.",
    )
    ensure_weight_tying: bool = Field(
        default=True,
        description="Modules of modules_to_save stay tied to those they share weights with; false: they train a copy.",
    )
    train_head: bool = Field(default=True, description="Train the task head too.")
    trainable_token_indices: list[Token] | dict[str, Annotated[list[Token], Field(min_length=1)]] | None = Field(
        default=None,
        description="Tokens whose embeddings train: of the input embedding, and whatever shares its weight; or by "
        "module name suffix.",
    )
    loraplus_lr_ratio: float | None = Field(
        default=None, gt=0, description="LoRA+: multiple of the learning rate for B."
    )
    lora_bias: bool = Field(default=False, description="Train a bias beside each B, scaled as B is.")
    bias: Literal["none", "lora_only", "all"] = Field(default="none", description="Which biases train too.")
    init_lora_weights: Literal[True, "gaussian", "pissa", "olora"] = Field(
        default=True,
        description="true: A Kaiming uniform, B zero; gaussian: A normal; pissa, olora: A and B the leading part "
        "of W by SVD or QR, with W kept and the start subtracted (embeddings start as with true).",
    )

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _not_empty(cls, value: list[str] | str | None) -> list[str] | str | None:
        if value is not None and (not value or (not isinstance(value, str) and "" in value)):
            raise ValueError("names no module")
        return value

    @model_validator(mode="after")
    def _pattern_of_layers(self) -> LoraConfig:
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern: says which numbers layers_to_transform means; give that too")
        return self

    @model_validator(mode="after")
    def _within_layers(self) -> LoraConfig:
        if self.first_layer is not None and (self.bias == "all" or self.trainable_token_indices):
            what = "bias: all" if self.bias == "all" else "trainable_token_indices"
            raise ValueError(f"{what} trains outside the layers from {self.first_layer} on (train.layers.from)")
        return self

    @property
    def start(self) -> Start | None:
        """The start that takes part of the base's weight, if it is one."""
        start = self.init_lora_weights
        return start if start == "pissa" or start == "olora" else None

    def rank(self, module: str) -> int:
        """Return the rank at ``module``."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def alpha(self, module: str) -> float:
        """Return α at ``module``."""
        return float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))

    def scale(self, module: str, rank: int | None = None) -> float:
        """Return the factor of B·A at ``module``: α/r, or α/√r with ``use_rslora``.

        Args:
            module: its name, for ``rank_pattern`` and ``alpha_pattern``.
            rank: None: the rank at ``module``.
        """
        r, alpha = rank or self.rank(module), self.alpha(module)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        for name, shape in shapes.items():
            found = re.fullmatch(r"(.+?)[._]lora_(?:embedding_)?A", name)
            if found is None:
                continue
            rank = self.rank(self.name_in_patterns(found[1], shapes))
            rows = shape[0] if shape else 0
            experts = name.endswith("_lora_A") and rows > 0 and rows % rank == 0
            if rows != rank and not experts:
                return f"rank {rank} for {found[1]}, whose factors have rank {rows}"
        return ""

    @staticmethod
    def name_in_patterns(module: str, tensors: Container[str]) -> str:
        """Return the name by which a module's rank and alpha are found: an attention's for its output projection.

        Args:
            module: the module that has factors. tensors: the names of the adapter's tensors.
        """
        attention = module.removesuffix(".out_proj")
        return attention if f"{attention}.lora_A" in tensors else module


def _by_pattern(patterns: dict[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that is ``module``'s name or the end of it."""
    for pattern, value in patterns.items():
        if matching(rf"(.*\.)?({pattern})", [module], what="rank_pattern/alpha_pattern"):
            return value
    return default


class HoulsbyConfig(MethodConfig):
    """The bottleneck adapters' fields."""

    name: Literal["houlsby"] = "houlsby"
    bottleneck: int | None = Field(
        default=None, ge=1, description="Width m of the bottleneck; 64 where reduction_factor is not given either."
    )
    reduction_factor: float | None = Field(
        default=None, ge=1, description="Instead of bottleneck: m = width // factor."
    )
    non_linearity: Literal[
        "gelu", "gelu_new", "leakyrelu", "relu", "sigmoid", "silu", "swish", "tanh"
    ] = Field(default="gelu", description="Activation inside the bottleneck.")  # fmt: skip
    init_scale: float = Field(
        default=1e-2,
        gt=0,
        description="Standard deviation of W_down's initial values, from a normal distribution truncated at two; "
        "W_up starts at zero.",
    )
    placement: Literal["houlsby", "pfeiffer", "parallel"] = Field(
        default="houlsby",
        description="houlsby: after attention and after the FFN; pfeiffer: after the FFN; parallel: beside the FFN.",
    )
    skip_layers: list[int] | int | None = Field(
        default=None, description="Layers without adapters: their numbers, or how many of the first (AdapterDrop)."
    )
    train_layer_norms: bool = Field(default=True, description="Train all LayerNorms (RMSNorms) too.")
    train_head: bool = Field(default=True, description="Train the task head too.")

    @field_validator("skip_layers")
    @classmethod
    def _counted_from_zero(cls, value: list[int] | int | None) -> list[int] | int | None:
        if any(number < 0 for number in ([value] if isinstance(value, int) else value or [])):
            raise ValueError("layers are counted from 0")
        return value

    @model_validator(mode="after")
    def _one_width(self) -> HoulsbyConfig:
        if self.bottleneck is not None and self.reduction_factor is not None:
            raise ValueError("give bottleneck or reduction_factor, not both")
        return self

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        widths = {shape[0] for name, shape in shapes.items() if name.endswith("adapter_down.weight") and shape}
        if self.bottleneck is not None and widths - {self.bottleneck}:
            return f"bottleneck {self.bottleneck}, and the adapters' width is {min(widths - {self.bottleneck})}"
        return ""

    def width(self, d: int) -> int:
        """Return the bottleneck's width m for activations of width ``d``."""
        if self.reduction_factor is not None:
            return max(1, int(d // self.reduction_factor))
        return self.bottleneck or 64


class BitFitConfig(MethodConfig):
    """BitFit's field."""

    name: Literal["bitfit"] = "bitfit"
    biases: Literal["all", "sparse"] | list[str] = Field(
        default="all",
        description="all; sparse: the query's and the FFN's first bias (the paper's small variant); "
        "or the modules whose biases train, by name suffix.",
    )

    @field_validator("biases")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and "" in value):
            raise ValueError("names no module")
        return value


class FullConfig(MethodConfig):
    """Full finetuning: every parameter trains."""

    name: Literal["full"] = "full"


class HeadConfig(MethodConfig):
    """Linear probe: the task head trains, the body is frozen."""

    name: Literal["head"] = "head"


@dataclass(frozen=True)
class Method:
    """A row of the table of methods; classes and functions are named as ``"module:attribute"``.

    Attributes:
        config: its ``MethodConfig``, in a module without torch; ``name: Literal[...]`` is the name of the row.
        plan: function from the model and the configuration to the ``Plan``; changes nothing.
        folds: whether what it trains can be folded into plain weights.
        lr_ratio: function from the configuration to multiples of the learning rate by a parameter's last name; None:
            every parameter trains at the learning rate itself.
        default_lr: peak learning rate of recipes that state none.
        from_peft: function from a configuration object of peft, whose ``peft_type`` is the row's name in capitals, to
            the configuration; None: peft has no such method, or it is not read.
    """

    config: str
    plan: str
    folds: bool = True
    lr_ratio: str | None = None
    default_lr: float = 1e-3
    from_peft: str | None = None


METHODS: Registry[Method] = Registry(
    "method",
    "peftlab.methods",
    Method,
    {
        "lora": Method(
            config="peftlab.methods.config:LoraConfig",
            plan="peftlab.methods.lora.plan:plan",
            lr_ratio="peftlab.methods.lora.plan:lr_ratio",
            default_lr=5e-4,
            from_peft="peftlab.methods.config:lora_from_peft",
        ),
        "houlsby": Method(
            config="peftlab.methods.config:HoulsbyConfig", plan="peftlab.methods.houlsby:plan", folds=False
        ),
        "bitfit": Method(
            "peftlab.methods.config:BitFitConfig", "peftlab.methods.in_place:plan_bitfit", default_lr=3e-3
        ),
        "full": Method("peftlab.methods.config:FullConfig", "peftlab.methods.in_place:plan_full", default_lr=5e-5),
        "head": Method("peftlab.methods.config:HeadConfig", "peftlab.methods.in_place:plan_head", default_lr=5e-3),
    },
)


def config_class(method: str) -> type[MethodConfig]:
    """Return the configuration class of a method.

    Raises:
        PeftlabError: an unknown method, or a row whose configuration is not a ``MethodConfig`` of that name.
    """
    reference = METHODS.find(method).config
    found = resolve(reference)
    if not (isinstance(found, type) and issubclass(found, MethodConfig)):
        raise PeftlabError(f"method {method}: {reference} is not a subclass of peftlab.methods.config.MethodConfig")
    if get_args(found.model_fields["name"].annotation) != (method,):
        raise PeftlabError(f'method {method}: {reference} has no field `name: Literal["{method}"] = "{method}"`')
    return found


def own_config(config: object) -> MethodConfig:
    """Return ``config`` itself if it is a method's, or the configuration that an object of peft's describes.

    Raises:
        PeftlabError: neither, or of a method of peft's that is not supported.
    """
    if isinstance(config, MethodConfig):
        return config
    kind = getattr(config, "peft_type", None)
    kind = getattr(kind, "value", kind)
    row = METHODS.get(str(kind).lower())
    if row is None or row.from_peft is None:
        of_peft = f", of peft_type {kind}" if kind is not None else ""
        raise PeftlabError(
            f"a {type(config).__name__}{of_peft} is no configuration of a method: give one of peftlab's, such as "
            "peftlab.LoraConfig, or peft's LoraConfig"
        )
    return resolve(row.from_peft)(config)


def lr_ratio(config: MethodConfig) -> dict[str, float]:
    """Return the multiples of the learning rate that ``config``'s method asks for, by a parameter's last name."""
    reference = METHODS.find(config.name).lr_ratio
    return {} if reference is None else resolve(reference)(config)


# Fields of peft's LoraConfig that do not change what is computed, or that are not needed here.
PEFT_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ephemeral_gpu_offload", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
# Fields of adapters that no LoRA on the base as it is can express, or that need what the file does not contain.
PEFT_REFUSED = {
    "alora_invocation_tokens": "aLoRA adds to the tokens from its invocation tokens on and not to those before: the "
    "update depends on the position, so that it folds into no weight, and each call needs the place of those tokens; "
    "serve it with vLLM, or train plain LoRA",
    "layer_replication": "it makes another, deeper model of the base, in which layers share weights; no config.json "
    "and no engine knows such a model. Copy the layers first (mergekit's passthrough), and train on the result",
    "kasa_config": "KaSA takes the smallest singular values out of the base's weights, so that the adapter is none of "
    "the base that it names; merge it with peft",
    "use_bdlora": "the factors of BD-LoRA are stored as blocks of their diagonals, for vLLM; convert it with peft's "
    "convert_to_lora",
    "arrow_config": "Arrow routes every token through several adapters that are not in the file",
    "use_qalora": "QA-LoRA acts on averages of the input of a GPTQ model",
    "megatron_config": "it adapts layers of Megatron, not of transformers",
}
_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # task types whose head peft trains
_STARTS = ("True", "gaussian", "pissa", "olora")


def lora_from_peft(peft_config: peft.LoraConfig) -> LoraConfig:
    """Return the configuration that an instance of peft's ``LoraConfig`` describes.

    The task head trains if the task type says so: SEQ_CLS, TOKEN_CLS or QUESTION_ANS.

    Raises:
        PeftlabError: a field is set that is not supported, or has a value that is out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(peft_config)}
    known = set(LoraConfig.model_fields) - {"name", "train_head", "loraplus_lr_ratio"}
    for name in fields.keys() - known - PEFT_IGNORED:
        if getattr(peft_config, name) != _default(fields[name]):
            reason = f": {PEFT_REFUSED[name]}" if name in PEFT_REFUSED else ""
            raise PeftlabError(
                f"peft.LoraConfig: {name}={_plain(getattr(peft_config, name))!r} is not supported{reason}"
            )
    start = peft_config.init_lora_weights
    if str(start) not in _STARTS:
        raise PeftlabError(
            f"peft.LoraConfig: init_lora_weights={start!r} is not computed here; one of {', '.join(_STARTS)}"
        )
    values = {name: _plain(getattr(peft_config, name)) for name in fields.keys() & known}
    values = {name: value for name, value in values.items() if value is not None and value != []}
    if "target_parameters" not in values:  # peft's own default, for language models too
        values.setdefault("target_modules", QUERY_AND_VALUE)
    try:
        return LoraConfig.model_validate({**values, "train_head": _plain(peft_config.task_type) in _HEADS})
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"peft.LoraConfig: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _default(field: dataclasses.Field[object]) -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _plain(value: object) -> object:
    """Return a set as a sorted list, and a member of an enumeration as its value."""
    if isinstance(value, (set, tuple)):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
