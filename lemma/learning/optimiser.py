"""The optimiser: fp32 master weights under low-precision compute weights, schedules, loss scaling, and its state.

Low-precision parameters keep their addresses: after a step the masters are copied into them in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.core.ranks import sum_over_ranks, world_size
from lemma.learning.learning_options import OptimOptions

SCALE_START, SCALE_GROWTH, SCALE_PATIENCE = 2.0**16, 2.0, 2000


def learning_rate(optim: OptimOptions, step: int, total: int) -> float:
    """The rate of step `step` (counted from 0) of `total`: linear warm-up, then the schedule down to final_lr."""
    warmup = optim.warmup if optim.warmup >= 1 else optim.warmup * total
    if step < warmup:
        return optim.lr * min(1.0, (step + 1) / warmup)
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr + (1.0 - optim.final_lr) * shape)


class LossScaler:
    """Keeps fp16 gradients in range: halves the scale when one overflows, doubles it after many that did not."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.scale = SCALE_START if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / SCALE_GROWTH)
        elif self.good_steps % SCALE_PATIENCE == 0:
            self.scale *= SCALE_GROWTH

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


class Optimiser:
    """AdamW over master weights. Gradients add up in `masters[name].grad`, in float32 or better, until `step`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: OptimOptions):
        self.options = options
        self.parameters = dict(parameters)
        self.masters: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype in (torch.float32, torch.float64):
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float()
                self.masters[name].grad = torch.zeros_like(self.masters[name])
                parameter.register_post_accumulate_grad_hook(self._collector(self.masters[name]))
                if parameter.is_cuda:  # products add their gradients there themselves (lemma.models.products)
                    parameter.lemma_sink = self.masters[name].grad
        self.scaler = LossScaler(any(p.dtype == torch.float16 for p in self.parameters.values()))
        self.adamw = _make_adamw(self.masters, options)

    @staticmethod
    def _collector(master: torch.Tensor) -> Any:
        """Move a low-precision gradient into the master's as soon as it is complete, so that none is kept."""

        def collect(parameter: torch.Tensor) -> None:
            assert master.grad is not None and parameter.grad is not None
            master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect

    def zero(self) -> None:
        """Forget all gradients; the buffers under low-precision parameters keep their addresses."""
        for name, master in self.masters.items():
            if master is self.parameters[name]:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()
                self.parameters[name].grad = None

    @torch.no_grad()
    def step(self, rate: float) -> tuple[float, bool]:
        """Sum gradients over ranks, unscale, clip, update, copy into the compute weights.

        Returns the norm of the gradient before clipping, and whether it was finite; if not, nothing is updated.
        """
        if world_size() > 1:  # a rank without work takes part in every sum
            for master in self.masters.values():
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        for grad in grads:
            sum_over_ranks(grad)
        if self.scaler.enabled:
            torch._foreach_mul_(grads, 1.0 / self.scaler.scale)
        norm = torch.nn.utils.get_total_norm(grads, foreach=True) if grads else torch.zeros(())
        size = norm.item()
        finite = math.isfinite(size)
        self.scaler.update(finite)
        if finite and grads:
            if self.options.clip and size > self.options.clip:
                torch._foreach_mul_(grads, self.options.clip / size)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            self._publish()
        self.zero()
        return size, finite

    def _publish(self) -> None:
        pairs = [(self.parameters[n], m) for n, m in self.masters.items() if m is not self.parameters[n]]
        if pairs:
            torch._foreach_copy_([p.data for p, _ in pairs], [m for _, m in pairs])

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All weights and moments by name, and what is not a tensor."""
        tensors = {f"weight/{name}": master.detach() for name, master in self.masters.items()}
        plain: dict[str, Any] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimiser/{name}/{key}"] = value
                else:
                    plain[f"{name}/{key}"] = value
        return tensors, {"plain": plain, "scaler": self.scaler.state()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Put a saved state back, in place; a state of another model is refused before anything changes."""
        for name, master in self.masters.items():
            saved = tensors.get(f"weight/{name}")
            if saved is None or saved.shape != master.shape:
                shape = "no such tensor" if saved is None else f"shape {tuple(saved.shape)}"
                raise UserError(
                    f"the checkpoint is of another model: {name} is {tuple(master.shape)} here and {shape} there",
                    fix="start anew with --fresh, or give the run another folder",
                )
        for name, master in self.masters.items():
            master.copy_(tensors[f"weight/{name}"])
            prefix = f"optimiser/{name}/"
            state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
            state |= {k.rpartition("/")[2]: v for k, v in extra["plain"].items() if k.rpartition("/")[0] == name}
            on_device = {k: self._placed(k, v, master) for k, v in state.items()}
            self.adamw.state.pop(master, None)
            if on_device:
                self.adamw.state[master] = on_device
        self._publish()
        self.scaler.load(extra["scaler"])

    def _placed(self, key: str, value: Any, master: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        stays = key == "step" and not self.adamw.param_groups[0].get("fused")
        return value.clone() if stays else value.to(master.device, copy=True)


def _make_adamw(masters: Mapping[str, torch.Tensor], options: OptimOptions) -> torch.optim.Optimizer:
    """Weight decay acts on matrices only."""
    groups = [
        {"params": [m for m in masters.values() if m.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [m for m in masters.values() if m.ndim < 2], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    filled = [group for group in groups if group["params"]]
    if options.name == "adamw":
        return torch.optim.AdamW(filled, fused=True, **settings)
    try:
        import bitsandbytes
    except ImportError as error:
        fix = "install it with `pip install lemma-reasoning[quant]`, or write `name: adamw`"
        raise UserError("optim.name: adamw_8bit needs bitsandbytes", fix=fix) from error
    return bitsandbytes.optim.AdamW8bit(filled, **settings)
