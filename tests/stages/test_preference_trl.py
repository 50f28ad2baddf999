"""One step of each algorithm beside TRL on the same model, data and reference: the same loss, the same gradients."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars

from lemma.algorithms.preference import PREFERENCE_ALGORITHMS, PreferenceAlgorithm
from lemma.core.types import Demonstration
from lemma.data import arithmetic
from lemma.data.data_options import ArithmeticOptions
from lemma.formats.r1_zero import R1Zero
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.models.tiny import tiny_config, tiny_model
from lemma.objectives.preference import KahnemanTversky
from lemma.stages.preference.examples import Example, built_in
from lemma.stages.preference.preference_loop import PairScorer, as_trajectories
from lemma.stages.preference.scores import mismatched, precompute
from tests.models.small import CPU, SHAPE

FORMAT = R1Zero(preamble=False)
PAIRS = 6
STEP: list[Any] = [
    pytest.param("dpo", {"beta": 0.2}, {"loss_type": ["sigmoid"]}, id="dpo"),
    pytest.param("dpo", {"loss": "ipo"}, {"loss_type": ["ipo"]}, id="dpo-ipo"),
    pytest.param("dpo", {"loss": "aot"}, {"loss_type": ["aot"]}, id="dpo-aot"),
    pytest.param(
        "dpo",
        {"loss": {"sigmoid": 0.8, "bco": 0.2}, "shift": False, "nll": 1.0},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        id="dpo-mpo",
    ),
    pytest.param("dpo", {"weighting": True}, {"use_weighting": True}, id="dpo-wpo"),
    pytest.param("dpo", {"length_alpha": 0.3}, {"ld_alpha": 0.3}, id="dpo-ld"),
    pytest.param("kto", {"wanted_weight": 1.3}, {"desirable_weight": 1.3}, id="kto"),
    pytest.param("cpo", {"nll": 0.7}, {"cpo_alpha": 0.7}, id="cpo"),
    pytest.param(
        "simpo",
        {"alpha": 0.2},
        {"loss_type": "simpo", "simpo_gamma": 1.0, "alpha": 0.2, "cpo_alpha": 0.0},
        id="simpo",
    ),
    pytest.param("orpo", {}, {}, id="orpo"),
]
TRAINERS = {
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "cpo": ("trl.experimental.cpo", "CPO"),
    "simpo": ("trl.experimental.cpo", "CPO"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
}


def policy_of(seed: int) -> Policy:
    """Larger weights than at the start of training, so that the two models disagree."""
    policy = build_policy(ModelOptions(tiny=SHAPE), CPU, seed)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return policy


def plain_copy(policy: Policy) -> Any:
    """The same weights in a model as transformers makes it."""
    model = tiny_model(tiny_config(SHAPE, policy.tokenizer), 0)
    model.load_state_dict(policy.causal.state_dict())
    return model


def solutions() -> list[tuple[Demonstration, Demonstration]]:
    """Right and wrong ones; every other wrong one is longer by a step."""
    found = arithmetic.generate(ArithmeticOptions(operations=3), "train", count=PAIRS)
    longer = arithmetic.generate(ArithmeticOptions(operations=4), "train", count=PAIRS)
    wrong = [
        arithmetic.mistaken(right)
        if number % 2
        else Demonstration(right.problem, reasoning=longer[number].reasoning, answer=longer[number].answer)
        for number, right in enumerate(found)
    ]
    return list(zip(found, wrong, strict=True))


def theirs(name: str, options: dict[str, Any], policy: Policy, reference: Policy, folder: Path) -> tuple[Any, Any]:
    """TRL's loss of one step and its gradients by name."""
    place, prefix = TRAINERS[name]
    module = importlib.import_module(place)
    disable_progress_bars()
    rows: dict[str, list[Any]] = {
        "prompt": [FORMAT.prompt(right.problem, policy.tokenizer) for right, _ in solutions()]
    }
    both = [(FORMAT.target(right), FORMAT.target(wrong)) for right, wrong in solutions()]
    if name == "kto":
        rows["completion"] = [pair[number % 2] for number, pair in enumerate(both)]
        rows["label"] = [number % 2 == 0 for number in range(PAIRS)]
    else:
        rows |= {"chosen": [right for right, _ in both], "rejected": [wrong for _, wrong in both]}
    arguments = getattr(module, f"{prefix}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=PAIRS,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        disable_dropout=True,
        **options,
    )
    given = {"ref_model": plain_copy(reference)} if name in ("dpo", "kto") else {}
    trainer = getattr(module, f"{prefix}Trainer")(
        model=plain_copy(policy),
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=policy.tokenizer,
        **given,
    )
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return loss.item(), {key: parameter.grad for key, parameter in trainer.model.named_parameters()}


def ours(algorithm: PreferenceAlgorithm, policy: Policy, reference: Policy, folder: Path) -> tuple[Any, Any]:
    """One step of the learner on what the stage makes of the same rows."""
    pairs = [built_in(FORMAT, right, policy.tokenizer) for right, _ in solutions()]
    wrong = [built_in(FORMAT, item, policy.tokenizer).responses[0] for _, item in solutions()]
    pairs = [
        Example(pair.prompt, (pair.responses[0], response), (1, -1))
        for pair, response in zip(pairs, wrong, strict=True)
    ]
    examples = pairs if algorithm.paired else [pair.single()[number % 2] for number, pair in enumerate(pairs)]
    learner = Learner(policy, OptimOptions(lr=0.0, clip=0), token_budget=96, total_steps=1)
    known = None
    if algorithm.needs_reference:
        wanted = as_trajectories(examples, algorithm)
        wanted += mismatched(examples, 128) if algorithm.needs_baseline else []
        judge = Learner(reference, OptimOptions(), token_budget=96, total_steps=1)
        known = precompute(reference, judge, wanted, folder, lambda done, total: None)
    batch, objective = PairScorer(algorithm, policy, learner, known, 128).ready(examples)
    if algorithm.needs_baseline:
        assert isinstance(objective, KahnemanTversky)
        assert objective.baseline > 0.1, "at 0 the mismatched pairs would not be compared"
    grads: dict[str, torch.Tensor] = {}
    update = learner.optimiser.step

    def recorded(rate: float) -> tuple[float, bool]:
        grads.update({key: master.grad.clone() for key, master in learner.optimiser.masters.items()})
        return update(rate)

    learner.optimiser.step = recorded  # type: ignore[method-assign]
    return learner.step(batch, objective).loss, grads


@pytest.mark.parametrize(("name", "mine", "options"), STEP)
def test_one_step_equals_trl(name: str, mine: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    policy, reference = policy_of(1), policy_of(0)  # this way round, KTO's reference point is above 0
    algorithm = PREFERENCE_ALGORITHMS[name](**mine)
    their_loss, their_grads = theirs(name, {"beta": algorithm.beta, **options}, policy, reference, tmp_path / "trl")
    loss, grads = ours(algorithm, policy, reference, tmp_path / "cache")
    assert abs(loss - their_loss) < 1e-5 * max(1.0, abs(their_loss))
    size = torch.cat([grad.flatten() for grad in their_grads.values()]).norm()
    assert size > 1e-3
    for key, grad in their_grads.items():
        assert (grads[key] - grad).norm() < 1e-4 * max(grad.norm(), 0.01 * size), key
