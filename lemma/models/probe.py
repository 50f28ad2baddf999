"""Does Lemma compute what a model means, up to rounding?

Two computations of one model never agree to the last bit, and how far they are apart depends on the model: the peaked
distributions of trained weights differ by ten times as much in bf16 as the flat ones of random weights. So there are
two questions. In float32, with every layer widened while it works, Lemma's numbers and the model's own must be equal:
that finds a wrong computation. As the model is, Lemma's numbers may be off from the wide ones by little more than the
model's own are: that finds a kernel that loses precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.models import installing
from lemma.models.packing import Segments

if TYPE_CHECKING:
    from lemma.models.policy import Policy

# Tokens of the text below that a probe looks at, and how many of the likeliest next ones it compares at each.
TOKENS = 64
CANDIDATES = 8
TEXT = (
    "A farmer has 48 apples in April and picks half as many in May. To see how many there are altogether, first find "
    'half of 48, which is 24, and then add: 48 + 24 = 72. "That is more than last year", says her son, who counted '
    "only 65 of them. If each crate holds 12 apples, they need 72 / 12 = 6 crates, and the market pays $3.50 for every "
    "one of these. So the family earns 6 * 3.50 = 21 dollars; the rest of the story is about x and f(x) = 2x - 1."
)
# Log-probabilities that differ by less are equal: float32 stays below it.
FLOOR = 1e-4
# How many times its rounding a computation may be off: typically, and in the root of the mean square.
TYPICAL_LIMIT = 3.0
LARGE_LIMIT = 6.0
# The relative difference of hidden states in float32 from which on a layer is named as the first that is wrong.
WRONG_STATES = 1e-3
TROUBLE = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, UserError)


def is_trouble(error: Exception) -> bool:
    """Whether a model that does not fit raises such errors. Triton's own are of no common kind: a kernel that asks for
    more memory than a processor of the GPU has, or that a compiler refuses."""
    return isinstance(error, TROUBLE) or type(error).__module__.startswith("triton.")


@dataclass(frozen=True, slots=True)
class ProbeComparison:
    """Log-probabilities of the same tokens from the model's own forward in float32, from its own forward as it is, and
    from Lemma, in float32 and as it is."""

    exact: torch.Tensor
    own: torch.Tensor
    wide: torch.Tensor
    mine: torch.Tensor

    @property
    def rounding(self) -> float:
        """How far the model's own forward is off on average: the noise of this model in this precision."""
        return _mean(self.own - self.exact)

    @property
    def fault(self) -> str | None:
        """Why this is more than rounding, or None."""
        if not bool(torch.isfinite(self.exact).all() & torch.isfinite(self.own).all()):
            return "its own log-probabilities are not finite numbers; its weights may be damaged, or fp16 too narrow"
        if not is_rounding(self.wide, self.exact, self.exact):
            return f"computed in fp32, its log-probabilities are off by {_mean(self.wide - self.exact):.2g} on average"
        if not is_rounding(self.mine, self.own, self.exact):
            error = _mean(self.mine - self.exact)
            return (
                f"its log-probabilities are off by {error:.2g} on average, where rounding explains {self.rounding:.2g}"
            )
        return None


def _mean(difference: torch.Tensor) -> float:
    return float(difference.abs().mean())


def is_rounding(mine: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `mine` is off from `exact` by about as much as `own`; never where a number is not finite.

    The geometric mean of the errors is not moved by a few that flip (a mixture's router); the root of the mean square
    is moved by errors of a few places only (one block of a cache).
    """
    mine_gap, own_gap = (mine - exact).abs(), (own - exact).abs()
    typical = ((mine_gap + FLOOR).log() - (own_gap + FLOOR).log()).mean().exp()
    large = (mine_gap.square().mean().sqrt() + FLOOR) / (own_gap.square().mean().sqrt() + FLOOR)
    return bool((typical <= TYPICAL_LIMIT) & (large <= LARGE_LIMIT))


def compare(
    policy: Policy, texts: list[torch.Tensor], compute: Callable[[torch.Tensor], torch.Tensor], last: int | None = None
) -> ProbeComparison:
    """Compare at the last places of some sequences (all of them, unless `last` says how many); `compute` gives Lemma's
    log-probability of each candidate, (M, K), from the candidates."""
    sides = [plain_logits(policy, ids, last) for ids in texts]
    exact, own = (torch.cat([side[which].double().log_softmax(-1) for side in sides]) for which in (0, 1))
    best = exact.topk(min(CANDIDATES, exact.shape[-1]), dim=-1).indices
    mine = wide = compute(best).double()
    if policy.is_narrow:
        with widened(policy):
            wide = compute(best).double()
    return ProbeComparison(exact.gather(-1, best), own.gather(-1, best), wide, mine)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Why neither the learner nor the native engine can take a model, or None; and how much it rounds."""

    reason: str | None
    rounding: float = 0.0


@torch.no_grad()
def examine(policy: Policy) -> ProbeReport:
    """Two sequences in one pack, scored by Lemma and by the model's own forward; and beyond a window, if it has one."""
    strange = policy.strangeness()
    if strange is not None:
        return ProbeReport(strange)
    ids = probe_ids(policy, min(TOKENS, policy.context))
    lengths = [len(ids) // 4, len(ids) - len(ids) // 4]
    parts = [part for part in ids.split(lengths) if len(part)]
    try:
        findings = compare(policy, parts, lambda best: _packed(policy, parts, best))
        reason = findings.fault
        if reason is not None:
            return ProbeReport(f"{reason}{_first_difference(policy, parts)}", findings.rounding)
        return ProbeReport(_beyond_window(policy), findings.rounding)
    except Exception as error:
        if not is_trouble(error):
            raise
        refuse_without_room(error)
        first = (str(error).strip().splitlines() or [""])[0]
        return ProbeReport(f"it does not take packed sequences ({type(error).__name__}: {first})")


def refuse_without_room(error: Exception) -> None:
    """Where memory ran out, say so: nothing was found out about the model."""
    if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
        raise UserError(
            "the model leaves too little memory on the device to try it on a few tokens",
            fix="end what else runs there, or take a smaller model or 4-bit weights (model.quantize)",
        ) from error


def _packed(policy: Policy, parts: list[torch.Tensor], best: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """Lemma's log-probabilities of the candidates at the last places of each sequence of a pack."""
    hidden = _hidden(policy, parts)
    if last:
        hidden = torch.cat([states[-last:] for states in hidden.split([len(part) for part in parts])])
    scores, _ = policy.score(hidden.repeat_interleave(best.shape[1], 0), best.flatten())
    return scores.view(best.shape)


def _hidden(policy: Policy, parts: list[torch.Tensor]) -> torch.Tensor:
    positions = torch.cat([torch.arange(len(part), device=policy.device) for part in parts])
    with evaluating(policy):
        return policy.hidden(torch.cat(parts), positions, Segments(tuple(map(len, parts)), policy.device))


def _beyond_window(policy: Policy) -> str | None:
    """What is wrong with the attention of tokens that do not see the first ones any more, in families whose windows
    Lemma does not know."""
    window = getattr(policy.causal.config.get_text_config(), "sliding_window", None)
    if not isinstance(window, int) or window >= policy.context or installing.knows(policy.causal):
        return None
    ids, last = probe_ids(policy, min(policy.context, window + TOKENS // 2)), TOKENS // 4
    findings = compare(policy, [ids], lambda best: _packed(policy, [ids], best, last), last)
    return None if findings.fault is None else f"beyond its window of {window} tokens {findings.fault}"


def _first_difference(policy: Policy, parts: list[torch.Tensor]) -> str:
    """Where Lemma's hidden states leave the model's own, in float32: the name of the first such layer, or the head."""
    with widened(policy):
        with as_it_came(policy), _outputs(policy.backbone) as theirs:
            for part in parts:
                policy.backbone(input_ids=part[None], use_cache=False)
        with _outputs(policy.backbone) as mine:
            _hidden(policy, parts)
    for name, states in mine.items():
        if name not in theirs:
            continue
        own = torch.cat(theirs[name])
        gap = (torch.cat(states) - own).norm() / own.norm().clamp_min(1e-12)
        if not gap <= WRONG_STATES:
            return f"; it begins in {name}"
    return "; it begins in its head, which makes logits of the last hidden states"


@contextmanager
def _outputs(backbone: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within `with`, collect what each layer and its parts put out, (T, width), in the order in which they finish."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if isinstance(states, torch.Tensor) and states.dim() == 3:
                outputs.setdefault(name, []).append(states[0].float())

        return hook

    named = [(name, module) for name, module in backbone.named_modules() if name and name.count(".") <= 2]
    handles = [module.register_forward_hook(keep(name)) for name, module in named]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def probe_ids(policy: Policy, count: int) -> torch.Tensor:
    """Tokens to look at: the text's, where the tokenizer makes enough of it, or from all over the vocabulary."""
    vocabulary = policy.head.weight.shape[0]
    scattered = (torch.arange(count) * 7919 + 13) % vocabulary
    if policy.tokenizer is None:
        return scattered.to(policy.device)
    ids = torch.tensor(policy.tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=torch.long)
    sound = len(ids) >= count and len(ids.unique()) > count // 4 and int(ids.max()) < vocabulary
    return (ids[:count] if sound else scattered).to(policy.device)


@contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Within `with`, the model is in evaluation mode."""
    training = policy.module.training
    policy.module.eval()
    try:
        yield
    finally:
        policy.module.train(training)


@contextmanager
def as_it_came(policy: Policy) -> Iterator[None]:
    """Within `with`, the model is in evaluation mode and none of Lemma's functions are installed on it."""
    with evaluating(policy), torch.no_grad(), installing.originals(policy.causal):
        yield


@contextmanager
def widened(policy: Policy) -> Iterator[None]:
    """Within `with`, the model computes in float32: the weights of a decoder layer are wide while that layer runs, so
    that no second copy of the model is needed. Every parameter keeps its own memory."""
    kept: dict[nn.Parameter, torch.Tensor] = {}

    def widen(unit: nn.Module, _: Any) -> None:
        for parameter in unit.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def narrow(unit: nn.Module, *_: Any) -> None:
        for parameter in unit.parameters():
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    units = _units(policy.causal)
    handles = [unit.register_forward_pre_hook(widen) for unit in units]
    handles += [unit.register_forward_hook(narrow, always_call=True) for unit in units]
    four_bit = {module: module.compute_dtype for module in policy.causal.modules() if hasattr(module, "compute_dtype")}
    policy.is_wide = True
    try:
        for module in four_bit:
            module.compute_dtype = torch.float32
        yield
    finally:
        policy.is_wide = False
        for module, dtype in four_bit.items():
            module.compute_dtype = dtype
        for handle in handles:
            handle.remove()
        # Torch calls no hook where a layer is interrupted from the keyboard.
        for parameter, data in kept.items():
            parameter.data = data


def _units(model: nn.Module) -> list[nn.Module]:
    """Decoder layers, and the smallest modules around them that hold weights of their own."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {part for stack in stacks for layer in stack for part in layer.modules() if part is not layer}
    layers = [layer for stack in stacks if stack not in inner for layer in stack]
    covered = {part for layer in layers for part in layer.modules()}
    around = [m for m in model.modules() if m not in covered and next(m.parameters(recurse=False), None) is not None]
    return layers + around


def plain_logits(policy: Policy, ids: torch.Tensor, last: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own logits at the last places of one sequence (all of them, unless `last` says how many): in float32,
    and as it is."""
    takes_last = last is not None and "logits_to_keep" in inspect.signature(policy.causal.forward).parameters
    # Of all places of a long sequence, the logits of a large vocabulary would need more memory than the model.
    fewer = {"logits_to_keep": last} if takes_last else {}

    def logits() -> torch.Tensor:
        own_logits = policy.causal(input_ids=ids[None], use_cache=False, **fewer).logits[0]
        return own_logits if last is None else own_logits[-last:]

    with as_it_came(policy):
        own = logits()
        if not policy.is_narrow:
            return own, own
        with widened(policy):
            return logits(), own
