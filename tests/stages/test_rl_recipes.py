"""Wrong recipes of reinforcement stages get one sentence: what is wrong, where, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemma.core.errors import UserError
from lemma.recipe import load_recipe

# The stage, and the sentence it gets after the file and the line.
STAGES: dict[str, tuple[str, str]] = {
    "unknown algorithm": ("algorithm: grpoo", "'stages.rl.algorithm' cannot be 'grpoo'; did you mean 'grpo'?"),
    "unknown algorithm with options": (
        "algorithm: {name: ppp}",
        "'stages.rl.algorithm.name' cannot be 'ppp'; did you mean 'ppo'?",
    ),
    "algorithm without a name": (
        "algorithm: {group_size: 4}",
        "'stages.rl.algorithm' does not say its name; add `name:` and one of: cispo, dapo, ",
    ),
    "unknown option of an algorithm": (
        "algorithm: {name: grpo, groupsize: 4}",
        "unknown key 'stages.rl.algorithm.groupsize'; did you mean 'group_size'?",
    ),
    "option of another algorithm": (
        "algorithm: {name: grpo, value_clip: 0.2}",
        "unknown key 'stages.rl.algorithm.value_clip'; remove it: it is an option of ppo",
    ),
    "option of another kind of stage": (
        "packing: stream",
        "unknown key 'stages.rl.packing'; remove it: it is an option of supervised",
    ),
    "no samples": (
        "algorithm: {name: grpo, group_size: 0}",
        "'stages.rl.algorithm.group_size' cannot be 0; write a whole number of at least 1",
    ),
    "several updates without a ratio": (
        "algorithm: {name: reinforce, epochs: 2}",
        "stages.rl.algorithm: reinforce does not correct for samples of an older policy, so a batch is used once; "
        "write `epochs: 1` and `mini_batches: 1`, or use grpo",
    ),
    "rewards to normalise that are not there": (
        "algorithm: {name: grpo, each_reward: {acuracy: 1}}",
        "stages.rl: algorithm.each_reward names 'acuracy', which is not in rewards; did you mean 'accuracy'?",
    ),
    "rewards that are left out of those to normalise": (
        "algorithm: {name: grpo, each_reward: {accuracy: 1}}, rewards: [accuracy, format]",
        "stages.rl: algorithm.each_reward leaves out 'format', which is in rewards; add `format: 1` to each_reward, "
        "or 0 to log it only",
    ),
    "two weights of a reward": (
        "algorithm: {name: grpo, each_reward: {accuracy: 1}}, rewards: [{name: accuracy, weight: 2}]",
        "stages.rl: algorithm.each_reward has the weight of 'accuracy', and the one in rewards has no effect; "
        "write `accuracy: 2` in each_reward and remove weight",
    ),
    "a penalty that is never learnt": (
        "algorithm: {name: ppo, compat: {missing_eos_penalty: 1}}, truncated: mask",
        "stages.rl: algorithm.compat.missing_eos_penalty needs the samples that `truncated: mask` leaves out; "
        "write `truncated: keep`, or remove compat.missing_eos_penalty",
    ),
    "a score that is never learnt": (
        "algorithm: {name: ppo, compat: {missing_eos_score: -1}}, truncated: mask",
        "stages.rl: algorithm.compat.missing_eos_score needs the samples that `truncated: mask` leaves out; ",
    ),
    "a file without a function": (
        "rewards: [right.py]",
        "stages.rl.rewards.0: 'right.py' does not name a function; write `path/to/file.py:function`",
    ),
    "a KL of tokens that are gone": (
        "algorithm: {name: rloo, reward_kl: 0.1}, truncated: mask",
        "stages.rl: algorithm.reward_kl needs the samples that `truncated: mask` leaves out; "
        "write `truncated: keep`, or remove reward_kl",
    ),
    "an option without effect": (
        "algorithm: {name: grpo, kl_estimator: k1}",
        "stages.rl.algorithm: kl_estimator has no effect with `kl: 0`; remove it, or write for example `kl: 0.04`",
    ),
    "options without effect": (
        "algorithm: {name: luffy, prefix: {samples: 0, min: 0.5, strategy: fixed}}",
        "stages.rl.algorithm.prefix: min and strategy have no effect with `samples: 0`; remove them, or write "
        "`samples: 1`",
    ),
    "a constant of another reshaping": (
        "algorithm: {name: luffy, off_policy: {reshape: pow, gamma: 0.2}}",
        "stages.rl.algorithm.off_policy: gamma has no effect with `reshape: pow`; remove it, or write "
        "`reshape: p_div_p`",
    ),
    "nothing but traces": (
        "algorithm: {name: luffy, prefix: {samples: -1}}",
        "stages.rl.algorithm: samples that are all the whole trace have the same reward, and every advantage "
        "is 0; write `prefix: {samples: 1}`, or a prefix.min below 1",
    ),
    "imitation without a weight": (
        "algorithm: {name: luffy, sft_weight: 0}",
        "'stages.rl.algorithm.sft_weight' cannot be 0; write a number above 0",
    ),
    "a group of one": (
        "algorithm: {name: grpo, group_size: 1}",
        "stages.rl.algorithm: grpo compares the samples of a problem, and with `group_size: 1` every advantage is 0; "
        "write for example `group_size: 8`",
    ),
    "unknown reward": ("rewards: [accurracy]", "'stages.rl.rewards.0' cannot be 'accurracy'; did you mean 'accuracy'?"),
    "unknown option of a reward": (
        "rewards: [{name: accuracy, wieght: 2}]",
        "unknown key 'stages.rl.rewards.0.wieght'; did you mean 'weight'?",
    ),
    "no rewards": ("rewards: []", "'stages.rl.rewards' cannot be []; write a list of one of: accuracy, "),
    "unknown option": ("rollouts: {}", "unknown key 'stages.rl.rollouts'; did you mean 'rollout'?"),
    "unknown option of rollouts": (
        "rollout: {max_token: 3}",
        "unknown key 'stages.rl.rollout.max_token'; did you mean 'max_tokens'?",
    ),
    "unknown engine": ("rollout: {engine: vlm}", "'stages.rl.rollout.engine' cannot be 'vlm'; did you mean 'vllm'?"),
    "min_tokens above max_tokens": (
        "rollout: {max_tokens: 4, min_tokens: 5}",
        "stages.rl: rollout.min_tokens is above rollout.max_tokens; lower it",
    ),
    "greedy rollouts": (
        "rollout: {temperature: 0}",
        "'stages.rl.rollout.temperature' cannot be 0; write a number above 0",
    ),
    "repetition penalty": (
        "rollout: {repetition_penalty: 1.1}",
        "stages.rl.rollout: a repetition penalty is for inference only; leave repetition_penalty out of rollout",
    ),
    "more mini-batches than problems": (
        "algorithm: {name: grpo, mini_batches: 9}, batch: {problems: 8}",
        "stages.rl: 8 problems cannot be dealt out to 9 mini-batches; lower algorithm.mini_batches",
    ),
    "dead groups with a critic": (
        "algorithm: ppo, replace_dead: 2",
        "stages.rl: ppo learns from groups whose rewards do not differ as well: there are no dead ones to replace; "
        "leave replace_dead out",
    ),
    "two lengths": ("steps: 3, epochs: 2", "stages.rl: give epochs or steps, not both"),
    "truncated": ("truncated: penalise", "'stages.rl.truncated' cannot be 'penalise'; write one of: keep, mask"),
    "unknown benchmark": (
        "eval: {benchmarks: [mth500]}",
        "stages.rl.eval.benchmarks: there is no benchmark 'mth500'; did you mean 'math500'?",
    ),
}


def sentence(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    return str(error.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize("name", STAGES)
def test_a_wrong_stage_gets_one_sentence(name: str, tmp_path: Path) -> None:
    stage, wanted = STAGES[name]
    found = sentence(tmp_path, f"stages:\n  rl: {{kind: rl, {stage}}}\n")
    assert found.startswith(f"recipe.yaml:2: {wanted}") and "\n" not in found


def test_dropout_of_an_adapter_is_refused(tmp_path: Path) -> None:
    """Samples are drawn without it, so what would be learnt is not what was sampled."""
    found = sentence(tmp_path, "model: {lora: {r: 4, dropout: 0.1}}\nstages:\n  rl: {kind: rl}\n")
    wanted = "stage rl learns from samples that are drawn without dropout; write `model.lora.dropout: 0`"
    assert found == f"recipe.yaml:1: {wanted}"
    path = tmp_path / "recipe.yaml"
    found = sentence(
        tmp_path, "model: {lora: {dora: true}}\nstages:\n  rl: {kind: rl, rollout: {engine: vllm, max_tokens: 8}}\n"
    )
    wanted = "vLLM cannot run DoRA adapters, and stage rl samples with it; write `engine: native` there"
    assert wanted in found
    found = sentence(
        tmp_path,
        "model: {lora: {modules_to_save: [lm_head]}}\n"
        "stages:\n  sft: {steps: 1, eval: {benchmarks: [gsm8k], engine: vllm}}\n",
    )
    wanted = "vLLM cannot run adapters with layers that are trained whole, and stage sft evaluates with it; write `en"
    assert wanted in found
    path.write_text("model: {lora: {r: 4, dropout: 0.1}}\nstages:\n  sft: {steps: 1}\n")
    assert load_recipe(path).model.lora is not None, "a supervised stage may have it"
