"""The self-attention of a pretrained model of HuggingFace's, computed by one of our mechanisms.

The mechanisms are the submodule `megasparse` of every self-attention, see replaced_layer.py; transformers calls
them by `attend` of replaced_attention.py. What else they need, the layer's input and what its draws depend on, is
handed down by hooks as keyword arguments, so a checkpointed layer is recomputed from the very same.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from megasparse.attention.contract import Attention, Targets
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.attention import AttentionConfig
from megasparse.config.messages import as_config_error, show
from megasparse.config.model_checks import check_model
from megasparse.config.pattern import kinds
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.lengthen import extend_positions, positions
from megasparse.hub.replaced_attention import NAME, Pass
from megasparse.hub.replaced_layer import Mechanisms, ReplacedCacheLayer
from megasparse.model.build import initialise

ENTRY = "megasparse_attention"
"""Key of config.json that says what replaced the attention: {"attention", "max_length", "seed"}."""
DRAWS, TARGETS = "megasparse_draws", "megasparse_targets"
"""Arguments of a replaced model's forward by which a training loop gives the RngContext of a pass, instead of the
model's seed and number of passes, and the labels (B,) that mechanisms may learn from where the model has no head. Who
gives the first one moves what moves once a step (`after_step`) itself.
"""
ENCODERS = {
    "bert": "BertSelfAttention",
    "roberta": "RobertaSelfAttention",
    "xlm-roberta": "XLMRobertaSelfAttention",
    "distilbert": "DistilBertSelfAttention",
}
DECODERS = {
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "gpt2": "GPT2Attention",
}
SELF_ATTENTION = ENCODERS | DECODERS
"""model_type -> the class of its self-attention."""


def replace_attention(
    model: PreTrainedModel, attention: dict[str, Any] | AttentionConfig, *, max_length: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """Let every self-attention of a BERT, RoBERTa, XLM-RoBERTa, DistilBERT, Llama (SmolLM is one), Mistral, Qwen2,
    Qwen3 or GPT-2, with whatever head, be computed by our mechanisms, in place, on its pretrained queries, keys and
    values, as the model has rotated them. Returns the model.

    attention: {"kind": "lha", "chunk": 64}, a kind of attention for all heads and its settings; or what
    `model.attention` of a run's configuration holds, with `pattern` for layers and heads. LSH has separate queries and
    keys here, as the model has, unless shared_qk is given.
    max_length: tokens of the longest input, on which numbers of buckets depend; the model's own where left out. More
    than it has positions for extends them, in encoders.
    seed: of new parameters and of all draws. A training pass draws anew, evaluation always the same.

    What mechanisms learn beside the task (LHA's hashes, Smart Bird's sketch) is part of `outputs.loss` in training,
    else `auxiliary_loss` gives it. Dropout of attention probabilities is what `attention` says (`dropout`, 0 by
    default); all other dropout stays. Replacing again starts from new parameters. Raises HubError for another
    architecture, and ConfigError for settings that do not fit.

    >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    >>> bert = transformers.BertModel(config)
    >>> bert = megasparse.replace_attention(bert, {"kind": "yoso"}, max_length=4096)
    >>> bert(torch.zeros(1, 4096, dtype=torch.long)).last_hidden_state.shape
    torch.Size([1, 4096, 32])
    """
    _require_known(model)
    config = _model_config(model, attention, positions(model) if max_length is None else max_length)
    if config.kind == "decoder":
        _require_length(model, config.max_length)
    base: Any = model.base_model
    places: list[nn.Module] = [
        module for module in base.modules() if isinstance(module, _self_attention(model.config.model_type))
    ]
    layers = [Mechanisms(config, layer) for layer in range(len(places))]
    _require_decodable(layers)
    _initialise(layers, config, seed)
    if config.max_length > positions(model):
        extend_positions(model, config.max_length)
    for place, layer in zip(places, layers, strict=True):
        if not hasattr(place, NAME):
            place.register_forward_pre_hook(_hand_over_input, with_kwargs=True)
        like = next(place.parameters())
        place.add_module(NAME, layer.to(like.device, like.dtype).train(place.training))
    whole: Any
    for whole in {base, model}:
        if not hasattr(whole, "_megasparse_hooked"):
            whole.register_forward_pre_hook(_begin, with_kwargs=True)
            whole.register_forward_hook(_finish, with_kwargs=True)
            whole._megasparse_hooked = True
    base._megasparse = _State(seed)
    model.set_attn_implementation(NAME)
    used = {kind: getattr(config.attention, kind).model_dump(mode="json") for kind in kinds(config)}
    common = config.attention.model_dump(mode="json", include={"pattern", "full_below"})
    if config.attention.dropout > 0.0:
        common["dropout"] = config.attention.dropout
    setattr(model.config, ENTRY, {"attention": common | used, "max_length": config.max_length, "seed": seed})
    return model


def auxiliary_loss(model: PreTrainedModel) -> Tensor:
    """Loss that the mechanisms learn from in the last training pass, to be added to an objective of one's own: scalar.

    0 where it is in `outputs.loss` already, as with labels, and where nothing is to be learned.
    """
    pending = _state(model).pending
    return torch.zeros((), device=model.device) if pending is None else pending


def mechanisms(model: nn.Module) -> list[Attention]:
    """Every mechanism of a replaced model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@dataclass
class _State:
    """State of one replaced model. step: training passes so far. pending: see `auxiliary_loss`."""

    seed: int
    step: int = 0
    pending: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}  # a tensor with a history cannot be copied


def _self_attention(kind: str) -> type[nn.Module]:
    module = kind.replace("-", "_")
    found: type[nn.Module] = getattr(
        importlib.import_module(f"transformers.models.{module}.modeling_{module}"), SELF_ATTENTION[kind]
    )
    return found


def _require_known(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = "Give an encoder or a decoder, such as a BertModel"
        raise HubError(name, "is no model of HuggingFace transformers", hint)
    kind = model.config.model_type
    if kind not in SELF_ATTENTION:
        known = ", ".join(SELF_ATTENTION)
        raise HubError(name, f'is of type "{kind}"', f"Attention can be replaced in these: {known}")
    if kind in ENCODERS and getattr(model.config, "is_decoder", False):
        known = ", ".join(DECODERS)
        raise HubError(
            name, f'is a decoder of type "{kind}" (config.is_decoder)', f"Give an encoder, or one of {known}"
        )
    if getattr(model.config, "add_cross_attention", False):
        raise HubError(name, "has cross-attention (config.add_cross_attention)", "Give a decoder without it")


def _require_length(model: PreTrainedModel, max_length: int) -> None:
    """Refuse a decoder whose own attention is no full attention of so many tokens."""
    name, window = type(model).__name__, getattr(model.config, "sliding_window", None)
    if max_length > positions(model):
        problem = f"has {positions(model)} positions, fewer than max_length = {max_length}"
        hint = "Set max_position_embeddings and rope_parameters (linear, yarn, llama3) of its config.json first"
        raise HubError(name, problem, hint if "rope_parameters" in model.config.to_dict() else "Ask for no more")
    if window is not None and window < max_length:
        problem = f"its sliding_window of {window} tokens is below max_length = {max_length}"
        raise HubError(name, problem, f"Ask for max_length = {window}, or set sliding_window to null")


def _require_decodable(layers: list[Mechanisms]) -> None:
    """Refuse mechanisms of decoders that see later tokens, or read what a model of transformers' does not hand on."""
    for layer in layers:
        for kind, mechanism in layer.items() if layer.causal else ():
            own = cast(Attention, mechanism)
            if own.leak is not None:
                problem = f"a decoder would see later tokens: {own.leak}"
                raise ConfigError(f"attention.{kind}", problem, "Change that setting")
            if own.reads_tokens:
                problem = "it reads the tokens themselves, which transformers hands to no attention"
                raise ConfigError(f"attention.{kind}", problem, "Choose another kind or setting")


def _model_config(model: PreTrainedModel, attention: dict[str, Any] | AttentionConfig, max_length: int) -> ModelConfig:
    """A model of ours with the same heads, as far as its attention is concerned. Raises ConfigError."""
    hf = model.config
    values = {
        "kind": "decoder" if hf.model_type in DECODERS else "encoder",
        "vocabulary": hf.vocab_size,
        "max_length": max_length,
        "layers": hf.num_hidden_layers,
        "d_model": hf.hidden_size,
        "heads": hf.num_attention_heads,
        "head_dim": getattr(hf, "head_dim", None),
        "blocks": "ordinary",
        "activations": "stored",
        "positions": {"kind": "learned"},
        "attention": _sections(attention),
    }
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        raise as_config_error(error, ModelConfig, values, prefix="model") from None
    check_model(config)
    if config.attention.output_dropout is not None:
        problem = f"{config.attention.output_dropout} is given, but the output's dropout is the pretrained model's own"
        raise ConfigError("attention.output_dropout", problem, "Leave it out")
    return config


def _sections(attention: dict[str, Any] | AttentionConfig) -> dict[str, Any]:
    if isinstance(attention, AttentionConfig):
        return attention.model_dump(mode="json")
    if "kind" in attention:
        settings = dict(attention)
        if (kind := settings.pop("kind")) not in MECHANISMS:
            raise ConfigError(
                "attention.kind", f"there is none named {show(kind)}", did_you_mean(str(kind), MECHANISMS)
            )
        attention = {"pattern": [kind], kind: settings}
    lsh = attention.get("lsh", {})
    return {**attention, "lsh": {"shared_qk": False, **lsh} if isinstance(lsh, dict) else lsh}


def _initialise(layers: list[Mechanisms], config: ModelConfig, seed: int) -> None:
    """Initialise as a model of ours, but YOSO's convolution at 0: the pretrained values stay as they are."""
    initialise(nn.ModuleList(layers), config, seed)
    for layer in layers:
        for mechanism in mechanisms(layer):
            mechanism.start_from_pretrained()


def _state(model: nn.Module) -> _State:
    state = getattr(getattr(model, "base_model", model), "_megasparse", None)
    if not isinstance(state, _State):
        raise HubError(type(model).__name__, "its attention is not replaced", "Call replace_attention first")
    return state


def _hand_over_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass its input on to a self-attention, and its cache, made where it is missing; a hook before its forward."""
    x = args[0] if args else kwargs["hidden_states"]
    kwargs, layer, cache = {**kwargs, "megasparse_input": x}, getattr(module, NAME), kwargs.get("past_key_values")
    run: Pass | None = kwargs.get("megasparse_pass")
    if run is not None and cache is not None and layer.causal and not (layer.attends_fully or module.training):
        kwargs["megasparse_cache"] = ReplacedCacheLayer.of(cache, layer.layer, layer, run.seed)
    return args, kwargs


def _begin(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Begin a pass; a hook before a forward of the model, of which its base model's is a part."""
    if "megasparse_pass" in kwargs:
        return None
    state = _state(model)
    state.pending = None
    kwargs = dict(kwargs)
    given, targets = kwargs.pop(DRAWS, None), kwargs.pop(TARGETS, None)
    named = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    run = Pass(model, state.seed, state.step, targets or _targets(model, named), given)
    if model.training and given is None:
        state.step += 1
        for mechanism in mechanisms(model):
            mechanism.after_step(True, lambda sums: sums)  # moves by what the pass before has seen
    return args, {**kwargs, "megasparse_pass": run}


def _finish(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    run = kwargs["megasparse_pass"]
    if run.owner is not model or not run.losses:
        return None
    auxiliary = torch.stack(run.losses).sum()
    if torch.is_grad_enabled() and not auxiliary.requires_grad and _learns(model):
        raise HubError(
            type(model).__name__,
            "gradient checkpointing with use_reentrant=True hides what its attention learns from",
            'Call gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        )
    task = output.get("loss") if isinstance(output, dict) else output[0] if output[0].dim() == 0 else None
    if task is None:
        _state(model).pending = auxiliary
        return None
    loss = min(mechanism.task_weight for mechanism in mechanisms(model)) * task + auxiliary
    if not isinstance(output, dict):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def _learns(model: nn.Module) -> bool:
    return any(parameter.requires_grad for each in mechanisms(model) for parameter in each.parameters())


def _targets(model: PreTrainedModel, named: dict[str, Any]) -> Targets | None:
    """The labels of tokens, without those that count for nothing (−100), or of sequences; None for other tasks. A
    causal language model's are those of the next tokens. named: arguments of its forward.
    """
    labels = named.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    if labels.dim() == 1:
        return Targets(labels, None)
    if model.config.model_type in DECODERS and model.get_output_embeddings() is not None:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return Targets(labels.clamp_min(0), labels >= 0) if labels.dim() == 2 else None
