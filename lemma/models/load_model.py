"""Models and tokenizers by folder, hub name, run folder, adapter folder or GGUF file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from lemma.core.errors import UserError, nearest
from lemma.core.hub_access import notice_offline
from lemma.core.random import key
from lemma.models.attention import NAME
from lemma.models.loading_checks import (
    AGAIN,
    NO_TOKENIZER,
    check_tokenizer_files,
    check_vocabulary,
    check_weights,
    loading,
    repair,
)
from lemma.models.lora_targets import check_targets, whole_layers
from lemma.models.merging import merge
from lemma.models.model_options import LoraOptions, ModelOptions, Precision
from lemma.models.places import TINY, base_of_adapter, lasting, resolve
from lemma.models.policy import Policy, PolicyOrigin
from lemma.models.quantised import WORDS, compute_in_one_way, quantising

transformers_logging.disable_progress_bar()  # a run has a bar of its own

# Fewer tokens than the digits: transformers makes a tokenizer without a vocabulary where a folder holds none.
LEAST_TOKENS = 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("the device is cuda, but torch finds no GPU", fix="write `auto` instead, or run `lemma doctor`")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def pick_precision(wanted: Precision | None, device: torch.device) -> Precision:
    return wanted or ("bf16" if device.type == "cuda" else "fp32")


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, with a pad token (the end-of-sequence token where it has none of its own)."""
    if path == TINY:
        from lemma.models.tiny import tiny_tokenizer

        return tiny_tokenizer()
    from transformers import AutoTokenizer

    is_bare = (Path(path).expanduser() / "tokenizer_config.json").is_file()
    folder = str(Path(path).expanduser()) if is_bare else resolve(path)
    base = base_of_adapter(folder)
    if base is not None and not (Path(folder) / "tokenizer_config.json").is_file():
        return load_tokenizer(base, revision, trust_remote_code)
    if Path(folder).is_file():
        from lemma.plugins.gguf import gguf

        with loading("tokenizer", path):
            tokenizer = gguf.load_tokenizer(Path(folder))
    else:
        if not Path(folder).exists():
            notice_offline()
        check_tokenizer_files(path, Path(folder))
        with loading("tokenizer", path):
            tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path} has no end-of-sequence token", fix="set one in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if len(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)) < LEAST_TOKENS:
        raise UserError(f"the tokenizer of {path} knows hardly a token: its files are missing", fix=NO_TOKENIZER)
    return tokenizer


def build_policy(options: ModelOptions, device: torch.device, seed: int, start_from: Path | None = None) -> Policy:
    """The model of a recipe, ready to train. `start_from` (the model of the stage before) replaces `path`."""
    from lemma.models import installing

    precision = pick_precision(options.precision, device)
    source = str(start_from) if start_from is not None else options.path
    tokenizer = _tokenizer(options, source)
    causal = _causal(options, source, tokenizer, precision, device, seed)
    for parameter in causal.parameters():
        parameter.requires_grad_(options.lora is None and parameter.is_floating_point())
    installing.install(causal, options.fused)
    if options.checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    module = causal if options.lora is None else _with_lora(causal, options.lora, source, seed)
    whole = options.model_copy(update={"quantize": None})
    policy = Policy(module, tokenizer, lambda: _causal(whole, source, tokenizer, precision, torch.device("cpu"), seed))
    policy.origin = PolicyOrigin(options, seed, start_from)
    policy.probe()
    _give_back(device)
    return policy


def _tokenizer(options: ModelOptions, source: str) -> Any:
    if options.tokenizer is None and source == TINY:
        from lemma.models.tiny import tiny_tokenizer

        return tiny_tokenizer(options.tiny.words)
    return load_tokenizer(options.tokenizer or source, options.revision, options.trust_remote_code)


def _causal(
    options: ModelOptions,
    source: str,
    tokenizer: Any,
    precision: Precision,
    device: torch.device,
    seed: int,
    attention: str | None = NAME,
) -> Any:
    if source == TINY:
        return _tiny(options, tokenizer, precision, device, seed, attention)
    folder = resolve(source)
    base = base_of_adapter(folder)
    if base is not None:
        model = _causal(options, base, tokenizer, precision, device, seed, attention)
        return _merged(model, folder)
    arguments: dict[str, Any] = {"attn_implementation": attention, "dtype": DTYPES[precision]}
    if options.quantize:
        arguments |= quantising(options.quantize, DTYPES[precision], device)
    if Path(folder).is_file():
        model = _from_gguf(Path(folder), options, arguments, tokenizer)
    else:
        model = _from_pretrained(folder, options, arguments)
    check_vocabulary(source, model, tokenizer)
    if attention is None and getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # what transformers picks by itself leaves the cap out
    if options.quantize:
        compute_in_one_way(model)
        return model
    return model.to(device)


def _tiny(
    options: ModelOptions, tokenizer: Any, precision: Precision, device: torch.device, seed: int, attention: str | None
) -> Any:
    from lemma.models.tiny import tiny_config, tiny_model

    if options.quantize:
        raise UserError(f"the built-in model cannot be held in {WORDS[options.quantize]}", fix="remove model.quantize")
    with loading("model", TINY, options.override):
        config = tiny_config(options.tiny, tokenizer)
        _apply_override(config, options.override)
        model = tiny_model(config, seed)
    if attention is not None:
        model.set_attn_implementation(attention)
    for parameter in model.parameters():  # weights only: the frequencies of the rotary embedding stay in float32
        parameter.data = parameter.data.to(DTYPES[precision])
    model.config.dtype = DTYPES[precision]
    return model.to(device)


def _merged(model: Any, adapter: str) -> Any:
    """A model with an adapter added in."""
    from peft import PeftModel

    with loading("adapter", adapter):
        return merge(PeftModel.from_pretrained(model, adapter))


def _from_pretrained(path: str, options: ModelOptions, arguments: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    if not Path(path).exists():
        notice_offline()
    with without_tables(), loading("model", path, options.override):
        config = AutoConfig.from_pretrained(path, **hub)
        _apply_override(config, options.override)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **hub, **arguments
        )
    check_weights(path, info, repair(options.override, AGAIN))
    if not _is_sound(model.generation_config):
        model.generation_config.do_sample = True
    if not _is_sound(model.generation_config):
        ends = {
            name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        model.generation_config = GenerationConfig(**ends)
    return model


@contextmanager
def without_tables() -> Iterator[None]:
    """Within `with`, transformers prints no table of what does not fit: here that is an error."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _from_gguf(file: Path, options: ModelOptions, arguments: dict[str, Any], tokenizer: Any) -> Any:
    """A model of the kind that its folder in the Hugging Face format would give: dense, and saved as such a folder."""
    from transformers import AutoModelForCausalLM

    from lemma.plugins.gguf import gguf

    config, tensors = gguf.load_weights(file, arguments["dtype"])
    with loading("model", str(file), options.override):
        _apply_override(config, options.override)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    with without_tables(), loading("model", str(file), options.override):
        model, info = kind.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True,
                                            ignore_mismatched_sizes=True, **arguments)  # fmt: skip
    check_weights(str(file), info, repair(options.override, AGAIN))
    gguf.set_ends(model, tokenizer, file)
    return model


def _is_sound(settings: Any) -> bool:
    """Whether transformers would save these settings for generation: it refuses a whole model for contradictory ones,
    such as a temperature without `do_sample`, which published folders hold."""
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True


# Options of rotary positions, which newer configurations keep together.
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# Options that other ones are computed from, once.
UNREAD = ("use_sliding_window", "max_window_layers")


def _apply_override(config: Any, override: dict[str, Any]) -> None:
    """Replace values of a configuration; rope_theta also where newer configurations keep it, in rope_parameters."""
    for name, value in override.items():
        rope = getattr(config, "rope_parameters", None)
        by_layer = isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())
        if name in ROPE[:2] and by_layer:
            raise UserError(f"model.override cannot set {name}: {type(config).__name__} has one for each of "
                            + ", ".join(rope or ()),
                            fix="write all of them as `rope_parameters`")  # fmt: skip
        if name in UNREAD:
            raise UserError(f"model.override sets {name}, which is read when a configuration is made and has no effect "
                            "afterwards", fix="write `sliding_window` and `layer_types`")  # fmt: skip
        if name == "rope_theta" and isinstance(rope, dict):
            rope[name] = value
        elif name in ROPE and isinstance(rope, dict) and isinstance(value, dict):
            config.rope_parameters = {**rope, **value}
        elif hasattr(config, name):
            setattr(config, name, value)
        else:
            raise UserError(f"model.override names '{name}', which {type(config).__name__} does not have",
                            fix=nearest(name, config.to_dict()))  # fmt: skip


def _with_lora(causal: Any, options: LoraOptions, source: str, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    whole, trains_both = whole_layers(causal, options.modules_to_save)
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.dora,
        target_modules=options.targets,
        modules_to_save=whole or None,
        ensure_weight_tying=trains_both,
        task_type="CAUSAL_LM",
        base_model_name_or_path=source,
    )
    check_targets(causal, options.targets)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*base_model_name_or_path.*")
        torch.manual_seed(key(seed, "lora"))
        module = get_peft_model(causal, config, autocast_adapter_dtype=False)
    for name, layer in causal.named_modules():
        if hasattr(layer, "get_delta_weight") and not hasattr(layer.get_base_layer(), "weight"):
            fix = "name the attention layers, such as `targets: [q_proj, k_proj, v_proj, o_proj]`"
            raise UserError(f"model.lora.targets adapts {name}, which could not be merged again", fix=fix)
    module.peft_config["default"].base_model_name_or_path = lasting(source)
    return module


def load_for_inference(path: str, device: str = "auto", precision: Precision | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer for plain transformers generation, with whatever attention transformers picks."""
    where = pick_device(device)
    options = ModelOptions(path=path, precision=precision)
    tokenizer = load_tokenizer(path)
    model = _causal(options, path, tokenizer, pick_precision(precision, where), where, seed=0, attention=None)
    return model.eval(), tokenizer


def load_policy(path: str, device: str = "auto", precision: Precision | None = None, *, plain: bool = False) -> Policy:
    """A model to speak with. `plain` takes it as transformers makes it; then only the transformers engine serves it."""
    from lemma.models import installing

    where = pick_device(device)
    options = ModelOptions(path=path, precision=precision)
    tokenizer = load_tokenizer(path)
    attention = None if plain else NAME
    causal = _causal(options, path, tokenizer, pick_precision(precision, where), where, seed=0, attention=attention)
    if not plain:
        installing.install(causal)
        _give_back(where)
    return Policy(causal.eval(), tokenizer)


def _give_back(device: torch.device) -> None:
    """Joining layers and probing leave memory behind, which the allocator would keep for tensors of the same sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
