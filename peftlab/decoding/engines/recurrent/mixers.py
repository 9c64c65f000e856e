"""The layers of state-space models over several tokens, with the state after each of them.

``transformers`` computes one token from a state, or many from none; verification reads several tokens from the state of
the accepted ones. All products but the recurrence itself are computed for the tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.untyped import KnownModel


class State(NamedTuple):
    """What a layer knows of the tokens that it has read.

    Attributes:
        window: [..., C, k], the last k inputs of the convolution.
        memory: [..., D, N] (Mamba) or [..., heads, D, N] (Mamba 2), in float32.
    """

    window: Tensor
    memory: Tensor


Mix = Callable[[KnownModel, Tensor, State], tuple[Tensor, State]]
"""(a layer's mixer, inputs [b, n, H], states before [b, ...]) -> outputs [b, n, H], states after each [b, n, ...]."""


def mix_of(model: PreTrainedModel) -> Mix | None:
    """Return what computes the layers of a state-space model; None for any other model."""
    return _FAMILIES.get(type(model).__name__)


def blank(mixer: KnownModel, dtype: torch.dtype, device: torch.device) -> State:
    """Return the state of a layer before the first token."""
    channels, kernel = mixer.conv1d.weight.shape[0], mixer.conv_kernel_size
    heads = (mixer.num_heads, mixer.head_dim) if hasattr(mixer, "num_heads") else (mixer.intermediate_size,)
    return State(
        torch.zeros(channels, kernel, dtype=dtype, device=device),
        torch.zeros(*heads, mixer.ssm_state_size, device=device),
    )


def _mamba(mixer: KnownModel, x: Tensor, before: State) -> tuple[Tensor, State]:
    """Mamba (Gu and Dao 2023, arXiv 2312.00752), and FalconMamba, which norms B, C and the time step."""
    mixed, gate = mixer.in_proj(x).chunk(2, -1)
    mixed, windows = _convolved(mixer, mixed, before.window)
    size = mixer.ssm_state_size
    step, b, c = mixer.x_proj(mixed).split([mixer.time_step_rank, size, size], -1)
    if hasattr(mixer, "dt_layernorm"):
        step, b, c = mixer.dt_layernorm(step), mixer.b_layernorm(b), mixer.c_layernorm(c)
    step = F.softplus(F.linear(step, mixer.dt_proj.weight) + mixer.dt_proj.bias.float())[..., None]  # [b, n, D, 1]
    decay = torch.exp(step * -torch.exp(mixer.A_log.float()))
    memories = _recurrence(before.memory, decay, step * b[..., None, :].float() * mixed[..., None].float())
    y = (memories.to(c.dtype) @ c[..., None])[..., 0] + mixed * mixer.D.float()
    return mixer.out_proj((y * F.silu(gate)).to(x.dtype)), State(windows, memories)


def _mamba2(mixer: KnownModel, x: Tensor, before: State) -> tuple[Tensor, State]:
    """Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): one decay for each head, B and C shared by groups of heads."""
    heads, size, groups = mixer.num_heads, mixer.ssm_state_size, mixer.n_groups
    gate, mixed, step = mixer.in_proj(x).split([mixer.intermediate_size, mixer.conv_dim, heads], -1)
    mixed, windows = _convolved(mixer, mixed, before.window)
    values, b, c = mixed.float().split([mixer.intermediate_size, groups * size, groups * size], -1)
    b, c = (z.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, -2) for z in (b, c))  # [b, n, heads, N]
    values = values.unflatten(-1, (heads, -1))  # [b, n, heads, D]
    step = F.softplus(step + mixer.dt_bias).clamp(*mixer.time_step_limit).float()
    decay = torch.exp(step * -torch.exp(mixer.A_log.float()))[..., None, None]
    memories = _recurrence(before.memory, decay, (step[..., None] * values)[..., None] * b[..., None, :])
    y = (memories @ c[..., None])[..., 0] + values * mixer.D[:, None]
    return mixer.out_proj(mixer.norm(y.flatten(-2), gate).to(x.dtype)), State(windows, memories)


_FAMILIES: dict[str, Mix] = {
    "MambaForCausalLM": _mamba,
    "FalconMambaForCausalLM": _mamba,
    "Mamba2ForCausalLM": _mamba2,
}


def _convolved(mixer: KnownModel, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activated convolution of inputs [b, n, C] after a window [b, C, k], and the window after each."""
    convolution = mixer.conv1d
    inputs = torch.cat((window, x.mT), -1)  # [b, C, k + n]
    windows = inputs.unfold(-1, window.shape[-1], 1)[:, :, 1:]  # [b, C, n, k]
    out = F.conv1d(inputs[..., 1:], convolution.weight, convolution.bias, groups=len(convolution.weight))
    return mixer.act(out).mT, windows.transpose(1, 2)


def _recurrence(memory: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """Return m_t = decay_t m_{t-1} + added_t for each t, [b, n, ...], with m_0 = ``memory`` [b, ...]."""
    memories = []
    for factor, new in zip(decay.unbind(1), added.unbind(1), strict=True):
        memory = torch.addcmul(new, factor, memory)
        memories.append(memory)
    return torch.stack(memories, 1)
