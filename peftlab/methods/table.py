"""The table of methods: adding one is a file beside this module, its configuration, and a row here.

Another distribution adds one by an entry point of the group. A row names its code (see ``peftlab.registry``), so that
reading the table, and the configurations, imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from peftlab.errors import PeftlabError
from peftlab.methods.config import MethodConfig
from peftlab.registry import Registry, resolve

if TYPE_CHECKING:
    from torch import nn

    from peftlab.methods.targets import Plan


@dataclass(frozen=True)
class Method:
    """One method; classes and functions are named as ``"module:attribute"``.

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
            config="peftlab.methods.lora.config:LoraConfig",
            plan="peftlab.methods.lora.plan:plan",
            lr_ratio="peftlab.methods.lora.plan:lr_ratio",
            default_lr=5e-4,
            from_peft="peftlab.methods.lora.config:from_peft",
        ),
        "houlsby": Method(
            config="peftlab.methods.config:HoulsbyConfig",
            plan="peftlab.methods.houlsby:plan",
            folds=False,
            default_lr=1e-3,
        ),
        "bitfit": Method(
            config="peftlab.methods.config:BitFitConfig",
            plan="peftlab.methods.bitfit:plan",
            default_lr=3e-3,
        ),
        "full": Method(
            config="peftlab.methods.config:FullConfig",
            plan="peftlab.methods.full:plan",
            default_lr=5e-5,
        ),
        "head": Method(
            config="peftlab.methods.config:HeadConfig",
            plan="peftlab.methods.head:plan",
            default_lr=5e-3,
        ),
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
    """Return a method's configuration: ``config`` itself, or what a configuration object of peft describes.

    Raises:
        PeftlabError: neither, or of a method of peft's that is not supported.
    """
    if isinstance(config, MethodConfig):
        return config
    kind = getattr(config, "peft_type", None)
    row = METHODS.get(str(getattr(kind, "value", kind)).lower())
    if row is None or row.from_peft is None:
        of_peft = f", of peft_type {getattr(kind, 'value', kind)}" if kind is not None else ""
        raise PeftlabError(
            f"a {type(config).__name__}{of_peft} is no configuration of a method: give one of peftlab's, such as "
            "peftlab.LoraConfig, or peft's LoraConfig"
        )
    return resolve(row.from_peft)(config)


def plan(model: nn.Module, config: MethodConfig) -> Plan:
    """Return what ``config``'s method would change in ``model``, in the layers that it names; changes nothing."""
    found: Plan = resolve(METHODS.find(config.name).plan)(model, config)
    if config.first_layer is None:
        return found
    from peftlab.methods.targets import from_layer, fully_trained

    return from_layer(model, found, config.first_layer, fully_trained(model, config.modules_to_save))


def lr_ratio(config: MethodConfig) -> dict[str, float]:
    """Return the multiples of the learning rate that ``config``'s method asks for, by a parameter's last name."""
    reference = METHODS.find(config.name).lr_ratio
    return {} if reference is None else resolve(reference)(config)
