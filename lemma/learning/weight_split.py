"""Weights that are split over the ranks (FSDP2): every rank holds its rows of each one, in fp32 where it learns.

A block's weights are whole, in compute precision, only while it is computed; embedding, head and last norm for a whole
pass. So everything that reads weights happens within one forward of the root module (`Policy.logprobs`), and every rank
makes that pass at the same time. Gradients come back summed over the ranks, each row to the rank that holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.core.rank_objects import in_step
from lemma.core.ranks import carrier, is_leader
from lemma.models.critic import Critic
from lemma.models.policy import PackModel, Policy

T = TypeVar("T")
HALF = (torch.bfloat16, torch.float16)


class Whole(nn.Module):
    """The root: within its forward all weights can be read, each while its module is computed."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def split_weights(policy: PackModel, device: torch.device | None = None) -> None:
    """Leave each rank its rows of every weight, on `device`. One block after the other is moved there and cut, so the
    device never holds the whole model. A model that is split already stays as it is."""
    if policy.is_split:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = device or policy.device
    compute = _compute_precision(policy.backbone)
    mesh = DeviceMesh.from_group(carrier(), device.type)
    mixed = MixedPrecisionPolicy(
        param_dtype=compute if compute in HALF else None,
        reduce_dtype=torch.float32 if compute in HALF else None,
        cast_forward_inputs=False,
    )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    root = Whole(policy.module)
    _separate_products(root)
    for block in _blocks(policy.backbone):
        fully_shard(_widened(block), mesh=mesh, mp_policy=mixed)
    if isinstance(policy, Critic):  # its head is never narrowed
        fully_shard(policy.head, mesh=mesh, mp_policy=exact)
    fully_shard(_widened(root), mesh=mesh, mp_policy=mixed)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, and not a mean
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to leave out the division

    def gather(work: Callable[[], T]) -> T:
        result = root(work)
        if not torch.is_grad_enabled():
            root.reshard()  # otherwise the next update would not reach the root's weights
        return result

    policy.use_split(gather, compute, device)


def _compute_precision(backbone: nn.Module) -> torch.dtype:
    kinds = {parameter.dtype for parameter in backbone.parameters()}
    if len(kinds) != 1:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise UserError(
            f"cluster.shard: weights needs weights of one precision, and this model has {names}",
            fix="write `shard: gradients`",
        )
    return kinds.pop()


def _blocks(backbone: nn.Module) -> list[nn.Module]:
    return [block for stack in backbone.children() if isinstance(stack, nn.ModuleList) for block in stack]


def _separate_products(root: nn.Module) -> None:
    """Let go of joint weights, which would stay whole, and multiply by each layer's own."""
    for module in root.modules():
        if hasattr(module, "lemma_joint"):
            del module.lemma_joint
        if hasattr(module, "lemma_jointly"):
            module.lemma_jointly = False


def _widened(module: nn.Module) -> nn.Module:
    """The module with fp32 masters of what it learns; what is split already is wide."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALF:
            parameter.data = parameter.data.float()
    return module


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor whose rows may be on several ranks; then every rank calls this."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


@torch.no_grad()
def whole_policy(policy: Policy) -> Policy | None:
    """A copy with all of the weights in the host's memory of the first rank, in compute precision; None on the others.
    Tensor after tensor is brought together, by all ranks."""
    state: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    with in_step("the weights of all ranks"):
        for name, tensor in policy.causal.state_dict(keep_vars=True).items():
            if id(tensor) not in same:
                gathered = whole_tensor(
                    tensor.detach().to(policy.dtype) if tensor.is_floating_point() else tensor.detach()
                )
                same[id(tensor)] = gathered.cpu() if is_leader() else gathered.new_empty(0)
            state[name] = same[id(tensor)]
    if not is_leader():
        return None
    with torch.device("meta"):
        model = type(policy.causal)(copy.deepcopy(policy.causal.config))
        module = _with_adapter(model, policy) if policy.is_adapter else model
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = policy.causal.generation_config
    return Policy(module, policy.tokenizer)


def _with_adapter(model: nn.Module, policy: Policy) -> nn.Module:
    """The model under an adapter like that of the policy."""
    from peft import get_peft_model

    return get_peft_model(model, policy.peft.peft_config["default"], autocast_adapter_dtype=False)
