"""The self-attention of a pretrained encoder of HuggingFace's, computed by one of our mechanisms.

transformers looks up by name what computes a model's attention, and what makes its mask. Ours is called "megasparse":
the mask stays a mask of the keys, (B, L), and the layer's q, k and v, projected by the pretrained weights, go to our
mechanisms, which are the submodule `megasparse` of every self-attention. What else they need, the layer's input and
what its draws depend on, is handed down as keyword arguments, so a checkpointed layer is recomputed from the very same.

B batch, L length, H heads, D head dim, E width.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaSelfAttention

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, Targets
from megasparse.attention.heads import Padding, build_mechanism, split_heads_by_mechanism
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.attention import AttentionConfig
from megasparse.config.messages import as_config_error, show
from megasparse.config.model_checks import check_model
from megasparse.config.pattern import heads_of_layer, kinds
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.lengthen import extend_positions, positions
from megasparse.model.build import initialise
from megasparse.ops.random import RngContext

NAME = "megasparse"
ENTRY = "megasparse_attention"
"""Key of config.json that says what replaced the attention: {"attention", "max_length", "seed"}."""
DRAWS, TARGETS = "megasparse_draws", "megasparse_targets"
"""Arguments of a replaced model's forward by which a training loop gives the RngContext of a pass, instead of the
model's seed and number of passes, and the labels (B,) that mechanisms may learn from where the model has no head. Who
gives the first one moves what moves once a step (`after_step`) itself.
"""
SELF_ATTENTION: dict[str, type[nn.Module]] = {
    "bert": BertSelfAttention,
    "roberta": RobertaSelfAttention,
    "xlm-roberta": XLMRobertaSelfAttention,
    "distilbert": DistilBertSelfAttention,
}


def replace_attention(
    model: PreTrainedModel, attention: dict[str, Any] | AttentionConfig, *, max_length: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """Let every self-attention of a BERT, RoBERTa, XLM-RoBERTa or DistilBERT, with whatever head, be computed by our
    mechanisms, in place, on its pretrained queries, keys and values. Returns the model.

    attention: {"kind": "lha", "chunk": 64}, a kind of attention for all heads and its settings; or what
    `model.attention` of a run's configuration holds, with `pattern` for layers and heads. LSH has separate queries and
    keys here, as the model has, unless shared_qk is given.
    max_length: tokens of the longest input, on which numbers of buckets depend; the model's own where left out. More
    than it has positions for extends them.
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
    _require_encoder(model)
    config = _model_config(model, attention, positions(model) if max_length is None else max_length)
    base: Any = model.base_model
    places: list[nn.Module] = [
        module for module in base.modules() if isinstance(module, SELF_ATTENTION[model.config.model_type])
    ]
    layers = [Mechanisms(config, layer) for layer in range(len(places))]
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


class Mechanisms(nn.ModuleDict):
    """The mechanisms of one layer, by kind, each of some of its heads."""

    def __init__(self, config: ModelConfig, layer: int):
        split = heads_of_layer(config, layer)
        super().__init__({kind: build_mechanism(kind, config, heads) for kind, heads in split.items()})
        self.config, self.layer, self.split = config, layer, split

    def with_full_attention(self) -> "Mechanisms":
        """Full attention in the same place."""
        return Mechanisms(self.config.model_copy(update={"attention": AttentionConfig(pattern=["full"])}), self.layer)

    def split_heads_by_mechanism(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, context: AttentionContext
    ) -> Iterator[tuple[Attention, AttentionInputs, AttentionContext]]:
        """Each mechanism, its share of all heads (B, H, L, D), and its context."""
        made = {kind: cast(Attention, self[kind]) for kind in self.split}
        each = zip(k.split(list(self.split.values()), dim=1), made.values(), strict=True)
        keyed = [keys for keys, mechanism in each if not mechanism.shared_qk]
        k = torch.cat(keyed, dim=1) if keyed else k[:, :0]
        for kind, heads, own in split_heads_by_mechanism(
            made, self.split, (q, k, v), Padding(key_mask), False, context
        ):
            yield made[kind], heads, own


@dataclass
class _State:
    """State of one replaced model. step: training passes so far. pending: see `auxiliary_loss`."""

    seed: int
    step: int = 0
    pending: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}  # a tensor with a history cannot be copied


@dataclass
class _Pass:
    """One forward pass of the model that was called, `owner`."""

    owner: nn.Module
    seed: int
    step: int
    targets: Targets | None
    given: RngContext | None = None
    """Draws to use in place of those of the model's own seed and passes."""
    losses: list[Tensor] = field(default_factory=list)

    def rng(self, batch: int, training: bool) -> RngContext:
        if self.given is not None:
            return self.given
        if not training:
            return RngContext.evaluation(self.seed, batch)
        return RngContext(self.seed, self.step, torch.arange(batch), training=True)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    megasparse_pass: _Pass | None = None,
    megasparse_input: Tensor | None = None,
    output_attentions: bool = False,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it. query, key, value: (B, H, L, D). Returns (B, L, H, D).

    attention_mask: (B, L) bool or None, as `key_mask` made it. Raises HubError for what no mechanism can do.
    """
    name = type(module).__name__
    if not isinstance(layer := getattr(module, NAME, None), Mechanisms) or megasparse_pass is None:
        raise HubError(name, "its attention is not replaced", "Call megasparse.hub.replace_attention on the model")
    assert megasparse_input is not None
    if output_attentions:
        raise HubError(name, "there is no matrix of attention weights to give", "Leave output_attentions out")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise HubError(name, f"attention_mask has the shape {shape}", "Give one of the tokens, (batch, length)")
    batch, _, length, _ = query.shape
    if length > layer.config.max_length:
        problem = f"{length} tokens are more than the {layer.config.max_length} its attention was made for"
        raise HubError(name, problem, "Call replace_attention with that max_length")
    run = megasparse_pass
    targets = run.targets if module.training and run.targets and len(run.targets.values) == batch else None
    context = AttentionContext(layer.layer, run.rng(batch, module.training), targets=targets)
    outs = []
    for mechanism, heads, own in layer.split_heads_by_mechanism(query, key, value, attention_mask, context):
        out, loss, _ = mechanism(megasparse_input, heads, own)
        outs.append(out)
        if loss is not None:
            run.losses.append(loss)
    return torch.cat(outs, dim=1).transpose(1, 2).contiguous(), None


def key_mask(*, attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
    """Mask of a model, as transformers calls it: (B, L) bool, true for real tokens, or None where all are."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, key_mask)


def _require_encoder(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise HubError(name, "is no model of HuggingFace transformers", "Give an encoder, such as a BertModel")
    kind = model.config.model_type
    if kind not in SELF_ATTENTION:
        known = ", ".join(SELF_ATTENTION)
        raise HubError(name, f'is of type "{kind}"', f"Attention can be replaced in these: {known}")
    if getattr(model.config, "is_decoder", False):
        raise HubError(name, "is a decoder (config.is_decoder)", "Attention can be replaced in encoders")


def _model_config(model: PreTrainedModel, attention: dict[str, Any] | AttentionConfig, max_length: int) -> ModelConfig:
    """A model of ours with the same heads, as far as its attention is concerned. Raises ConfigError."""
    hf = model.config
    values = {
        "kind": "encoder",
        "vocabulary": hf.vocab_size,
        "max_length": max_length,
        "layers": hf.num_hidden_layers,
        "d_model": hf.hidden_size,
        "heads": hf.num_attention_heads,
        "blocks": "ordinary",
        "activations": "stored",
        "positions": {"kind": "learned"},
        "attention": _sections(attention),
    }
    try:
        config = ModelConfig.model_validate_json(json.dumps(values))
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
    """Pass its input on to a self-attention; a hook before its forward."""
    x = args[0] if args else kwargs["hidden_states"]
    return args, {**kwargs, "megasparse_input": x}


def _begin(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Begin a pass; a hook before a forward of the model, of which its base model's is a part."""
    if "megasparse_pass" in kwargs:
        return None
    state = _state(model)
    state.pending = None
    kwargs = dict(kwargs)
    given, targets = kwargs.pop(DRAWS, None), kwargs.pop(TARGETS, None)
    run = _Pass(model, state.seed, state.step, targets or _targets(model, args, kwargs), given)
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


def _targets(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Targets | None:
    """The labels of tokens, without those that count for nothing (−100), or of sequences; None for other tasks."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    labels = given.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    if labels.dim() == 1:
        return Targets(labels, None)
    return Targets(labels.clamp_min(0), labels >= 0) if labels.dim() == 2 else None
