"""Replacement of a pretrained Hugging Face model's self-attention by megasparse mechanisms.

The mechanisms are the submodule `megasparse` of every self-attention; transformers calls them through `attend`. Hooks
pass the layer's input and the random state on as keyword arguments, so that recomputation of a checkpointed layer uses
the same values.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, Cache, PretrainedConfig, PreTrainedModel

from megasparse.attention.contract import Attention, Targets
from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.messages import show
from megasparse.config.schema import ModelConfig, kinds
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.replaced_layer import (
    NAME,
    IndexedLayer,
    InterfaceCall,
    Mechanisms,
    ReplacedPass,
    cache_name,
    share_of_batch,
)
from megasparse.hub.tensor_file import ADAPTER, TensorFile, appearing, load_stored
from megasparse.hub.versions import USE_TESTED
from megasparse.model.build import initialise
from megasparse.model.embedding import lengthened
from megasparse.ops.operator import device_of
from megasparse.ops.random import drawn_step
from megasparse.settings.checks import require
from megasparse.settings.load import build_model_config

ENTRY = "megasparse_attention"
"""Key of config.json with the arguments of the replacement: {"attention", "max_length", "seed"}."""
DRAWS, TARGETS = "megasparse_draws", "megasparse_targets"
"""Arguments of a replaced model's forward, for training loops: an RngContext that replaces the model's seed and pass
number, and labels (B,) in a model without a head. With the first one, the training loop calls the mechanisms'
`after_step`.
"""
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
"""`model_type` of the encoders whose attention can be replaced."""
HINT = f"Use a decoder such as Llama, Qwen or Gemma, or one of {', '.join(ENCODERS)}"


def replace_attention(
    model: PreTrainedModel, attention: dict[str, Any] | AttentionConfig, *, max_length: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """Replace the self-attention of a pretrained Hugging Face model in place and return the model.

    Supports BERT, RoBERTa, XLM-RoBERTa, DistilBERT, and every decoder that calls transformers' attention interface with
    causal attention of queries, keys and values (Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-2, ...), with any output.
    A pass over two tokens checks this. If sliding-window layers alternate with full attention, only full layers change.
    Pretrained queries, keys (rotated by the model) and values are unchanged. In training `outputs.loss` includes the
    mechanisms' auxiliary losses; otherwise `auxiliary_loss` returns them.

    Args:
        model: The pretrained model.
        attention: `{"kind": "lha", "chunk": 64}`, one mechanism and its settings, or the keys of `model.attention`
            with a `pattern` of layers and heads. LSH has separate queries and keys unless `shared_qk` is set.
        max_length: Longest input in tokens, which determines the number of buckets; by default the model's maximum. A
            larger value extends an encoder's positions.
        seed: Seed of new parameters and of all draws.

    Raises:
        HubError: The architecture is not supported.
        ConfigError: The settings do not fit.

    Examples:
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> bert = transformers.BertModel(config)
        >>> bert = megasparse.replace_attention(bert, {"kind": "yoso"}, max_length=4096)
        >>> bert(torch.zeros(1, 4096, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 4096, 32])
    """
    calls = _interface_calls(model)
    full = [number for number, call in enumerate(calls) if call.sliding_window is None] or list(range(len(calls)))
    config = _model_config(model, calls[full[0]], attention, positions(model) if max_length is None else max_length)
    if config.kind == "decoder":
        _require_length(model, config.max_length, calls[full[0]].sliding_window)
    base: Any = model.base_model
    modules = [calls[number].module for number in full]
    layers = [Mechanisms(config, number) for number in full]
    _require_decodable(layers)
    initialise(nn.ModuleList(layers), config, seed)
    for layer in layers:
        for mechanism in mechanisms(layer):
            mechanism.start_from_pretrained()  # pretrained projections are unchanged
    if config.max_length > positions(model):
        extend_positions(model, config.max_length)
    for attention_module, layer in zip(modules, layers, strict=True):
        if not hasattr(attention_module, NAME):
            attention_module.register_forward_pre_hook(_hand_over_input, with_kwargs=True)
        dtype = next(attention_module.parameters()).dtype
        attention_module.add_module(NAME, layer.to(device_of(attention_module), dtype).train(attention_module.training))
    whole: Any
    for whole in {base, model}:
        if not hasattr(whole, "_megasparse_hooked"):
            whole.register_forward_pre_hook(_begin, with_kwargs=True)
            whole.register_forward_hook(_finish, with_kwargs=True)
            whole._megasparse_hooked = True
    base._megasparse = _State(seed)
    model.set_attn_implementation(NAME)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True  # a compiled pass would be compiled again for every length
    for key, value in replacement(config, seed).items():
        setattr(model.config, key, value)
    if config.kind == "decoder" and config.max_length > 1:
        _require_same_step(model, min(4, config.max_length))
    return model


def replacement(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Return the keys of config.json of a model with the attention of `config`."""
    used = {kind: getattr(config.attention, kind).model_dump(mode="json") for kind in kinds(config)}
    common = config.attention.model_dump(mode="json", include={"pattern"})
    if config.attention.dropout > 0.0:
        common["dropout"] = config.attention.dropout
    entry = {"attention": common | used, "max_length": config.max_length, "seed": seed}
    return {ENTRY: entry, "attn_implementation": NAME}  # so that transformers without megasparse rejects the folder


def auxiliary_loss(model: PreTrainedModel) -> Tensor:
    """Return the mechanisms' auxiliary loss of the last training pass, a scalar to add to your objective: 0 if
    `outputs.loss` includes it.
    """
    pending = _state(model).pending
    return torch.zeros((), device=device_of(model)) if pending is None else pending


def mechanisms(model: nn.Module) -> list[Attention]:
    """Return all mechanisms of a replaced model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@dataclass
class _State:
    """State of a replaced model. pending: see `auxiliary_loss`."""

    seed: int
    pending: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}  # a tensor with a graph cannot be copied


def _interface_calls(model: PreTrainedModel) -> list[InterfaceCall]:
    """Record the calls of transformers' attention interface, one per layer, in a pass over two tokens. Raises HubError
    unless they ask for plain attention.
    """
    _require_plain(model)
    base, calls, name = cast(Any, model.base_model), list[InterfaceCall](), type(model).__name__
    implementation = model.config._attn_implementation
    run = ReplacedPass(model, 0, 0, None, calls=calls)
    options = {} if model.config.model_type in ENCODERS else {"use_cache": False}
    try:
        model.set_attn_implementation(NAME)
        with evaluating(model), torch.no_grad():
            base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device_of(model)), megasparse_pass=run, **options)
    except HubError:
        raise HubError(name, "does not pass keyword arguments to its attention", HINT) from None
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        problem = f"cannot process two tokens through transformers' attention interface ({show(str(error))})"
        raise HubError(name, problem, HINT) from None
    finally:
        model.set_attn_implementation(implementation)
    if not calls or len(calls) != model.config.num_hidden_layers:
        problem = f"uses transformers' interface in {len(calls)} of its {model.config.num_hidden_layers} layers"
        raise HubError(name, problem, HINT)
    if model.config.model_type not in ENCODERS and "position_ids" not in inspect.signature(base.forward).parameters:
        problem = f"takes no position_ids with transformers {transformers.__version__}, which separate packed documents"
        raise HubError(name, problem, USE_TESTED)
    for call in calls:
        _require_attention(model, call, calls[0])
    return calls


def _require_same_step(model: PreTrainedModel, length: int) -> None:
    """Raise HubError unless a token read with a cache gets the output of a whole pass: how transformers passes caches
    to attention layers is private to it.
    """
    base: Any = model.base_model
    tokens = torch.arange(length, device=device_of(model))[None] % model.config.vocab_size
    with evaluating(model), torch.no_grad():
        whole = base(input_ids=tokens, use_cache=False)[0][:, -1]
        name, before = cache_name(base), base(input_ids=tokens[:, :-1], use_cache=True, return_dict=True)
        step = base(input_ids=tokens[:, -1:], use_cache=True, **{name: getattr(before, name)})[0][:, -1]
    exact = whole.dtype in (torch.float32, torch.float64)  # else rounding can change which keys are selected
    tolerance = 0.05 if whole.is_cuda else 1e-3  # TF32 keeps 11 bits of each factor
    if exact and (step - whole).abs().max() > tolerance * whole.abs().max():
        problem = f"decodes from a cache unlike its whole pass with transformers {transformers.__version__}"
        raise HubError(type(model).__name__, problem, USE_TESTED)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, and each of its modules back to its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _require_plain(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise HubError(name, "is not a model of Hugging Face transformers", HINT)
    hf = model.config
    if hf.is_encoder_decoder or getattr(hf, "add_cross_attention", False):
        raise HubError(name, "has cross-attention (config.add_cross_attention)", "Use a decoder without it")
    if hf.model_type in ENCODERS and getattr(hf, "is_decoder", False):
        raise HubError(name, f'is a decoder of type "{hf.model_type}" (config.is_decoder)', HINT)
    sides = {"is_causal": getattr(hf, "is_causal", None) is False}
    sides["use_bidirectional_attention"] = bool(getattr(hf, "use_bidirectional_attention", False))
    if hf.model_type not in ENCODERS and (keys := [key for key, both in sides.items() if both]):
        hint = "Use a causal decoder: a replaced one attends only to earlier tokens"
        raise HubError(name, f"attends in both directions (config.{keys[0]})", hint)
    others = {*(getattr(hf, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if others:
        raise HubError(name, f"has layers of another attention (config.layer_types: {min(others)})", HINT)
    if any(getattr(hf, key, None) is None for key in ("max_position_embeddings", "num_hidden_layers", "hidden_size")):
        problem = f'is of type "{hf.model_type}", without max_position_embeddings, num_hidden_layers or hidden_size'
        raise HubError(name, problem, HINT)


def _require_attention(model: PreTrainedModel, call: InterfaceCall, first: InterfaceCall) -> None:
    """Raise HubError unless a call asks for plain attention of the first layer's shape. Names of arguments are private
    to transformers: a tensor or number under another name is an error.
    """
    name, encoder = type(model).__name__, model.config.model_type in ENCODERS
    values = {key for key, x in call.others.items() if isinstance(x, Tensor | int | float) and not isinstance(x, bool)}
    if (cap := call.others.get("softcap")) is not None:
        problem = f"caps its scores (attn_logit_softcapping = {cap}), which no mechanism supports"
        raise HubError(name, problem, "Set it to null in config.json, then fine-tune, because the scores change")
    if extra := sorted(values - {"dropout", "position_ids"}):
        raise HubError(name, f"its attention has {extra[0]} next to queries, keys and values", USE_TESTED)
    if call.attention_mask is not None:
        raise HubError(name, "adds its own mask or bias to its scores", HINT)
    if encoder == getattr(call.module, "is_causal", not encoder) or (encoder and call.sliding_window is not None):
        raise HubError(name, f'is of type "{model.config.model_type}", whose attention is not causal', HINT)
    if call.query.shape != first.query.shape or not call.key.shape == call.value.shape == first.key.shape:
        raise HubError(name, "has layers, or keys and values, of several shapes", HINT)
    if call.query.shape[3] != call.key.shape[3]:
        raise HubError(name, "has queries and keys of different sizes", HINT)


def _require_length(model: PreTrainedModel, max_length: int, window: int | None) -> None:
    name = type(model).__name__
    if max_length > positions(model):
        problem = f"has {positions(model)} positions, fewer than max_length = {max_length}"
        hint = "Set max_position_embeddings and rope_parameters (linear, yarn, llama3) of its config.json first"
        raise HubError(name, problem, hint if "rope_parameters" in model.config.to_dict() else "Use a smaller one")
    if window is not None and window < max_length:
        problem = f"its sliding_window of {window} tokens is below max_length = {max_length}"
        raise HubError(name, problem, f"Use max_length = {window}, or set sliding_window to null")


def _require_decodable(layers: list[Mechanisms]) -> None:
    """Raise ConfigError for decoder mechanisms that leak later tokens or need inputs that transformers lacks."""
    for layer in layers:
        for kind, mechanism in layer.items() if layer.causal else ():
            attention, key, hint = cast(Attention, mechanism), f"attention.{kind}", "Choose another kind or setting"
            require(
                (attention.leak is not None, key, f"a decoder would attend to later tokens: {attention.leak}",
                 "Change that setting"),
                (attention.changes_keys, key,
                 "it adds positions to keys or normalises them, but the cache contains the model's keys",
                 "Change sinusoidal_positions, normalize or kind"),
                (not attention.rotated, key,
                 "it attends without rotary positions, but transformers passes rotated queries and keys", hint),
                (attention.reads_tokens, key, "it reads token ids, which transformers does not pass to attention",
                 hint),
            )  # fmt: skip


def _model_config(
    model: PreTrainedModel, call: InterfaceCall, attention: dict[str, Any] | AttentionConfig, max_length: int
) -> ModelConfig:
    """Return a megasparse configuration with the same heads and `attention`."""
    hf = model.config
    values: dict[str, Any] = {
        "kind": "encoder" if hf.model_type in ENCODERS else "decoder",
        "vocabulary": hf.vocab_size,
        "max_length": max_length,
        "layers": hf.num_hidden_layers,
        "d_model": hf.hidden_size,
        "heads": call.query.shape[1],
        "head_dim": call.query.shape[3],
        "blocks": "ordinary",
        "activations": "stored",
        "positions": {"kind": "learned"},
        "attention": _sections(attention),
    }
    return build_model_config(values)


def _sections(attention: dict[str, Any] | AttentionConfig) -> dict[str, Any]:
    if isinstance(attention, AttentionConfig):
        return attention.model_dump(mode="json")
    if "kind" in attention:
        settings = dict(attention)
        if not isinstance(kind := settings.pop("kind"), str) or kind not in MECHANISMS:
            raise ConfigError("attention.kind", f"unknown mechanism {show(kind)}", did_you_mean(str(kind), MECHANISMS))
        attention = {"pattern": [kind], kind: settings}
    if "pattern" not in attention:
        raise ConfigError("attention", "contains neither kind nor pattern", 'Add "kind": "ranked", for example')
    lsh = attention.get("lsh", {})
    return {**attention, "lsh": {"shared_qk": False, **lsh} if isinstance(lsh, dict) else lsh}


def _state(model: nn.Module) -> _State:
    state = getattr(getattr(model, "base_model", model), "_megasparse", None)
    if not isinstance(state, _State):
        raise HubError(type(model).__name__, "its attention is not replaced", "Call replace_attention first")
    return state


Arguments = tuple[object, ...]


def _cache_among(args: Arguments, kwargs: dict[str, Any]) -> Cache | None:
    """Return the generation cache among a module's arguments, whose name depends on the version."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def _hand_over_input(module: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
    """Pass a self-attention's input and cache on. A forward pre-hook."""
    x, layer = args[0] if args else kwargs["hidden_states"], getattr(module, NAME)
    cache = _cache_among(args, kwargs)
    kwargs = {**kwargs, "megasparse_input": x}
    if cache is not None and layer.causal and not module.training and kwargs.get("megasparse_pass") is not None:
        if module.config._attn_implementation == NAME:
            IndexedLayer.of(cache, layer.layer, not layer.attends_fully)
        kwargs["megasparse_cache"] = cache
    return args, kwargs


def _begin(model: PreTrainedModel, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]] | None:
    """Start one pass. A forward pre-hook of the model and, within its call, of its base model."""
    if "megasparse_pass" in kwargs:
        return None
    state = _state(model)
    state.pending = None
    kwargs = dict(kwargs)
    draws, targets = kwargs.pop(DRAWS, None), kwargs.pop(TARGETS, None)
    named = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    positions_given = named.get("position_ids", kwargs.get("position_ids"))
    cache = _cache_among(args, kwargs)
    if cache is not None and model.config._attn_implementation == NAME:
        IndexedLayer.of_static(cache)
    step, targets = 0, targets or _targets(model, named)
    if model.training and draws is None:
        step = drawn_step()
        for module in model.modules():
            if isinstance(module, Mechanisms):
                module.use_statistics(True)
    run = ReplacedPass(model, state.seed, step, targets, positions_given, draws)
    return args, {**kwargs, "megasparse_pass": run}


def _finish(model: PreTrainedModel, args: Arguments, kwargs: dict[str, Any], output: Any) -> object:
    """Add the auxiliary losses to the loss, if the output contains one. A forward hook of the model."""
    run = kwargs["megasparse_pass"]
    if run.owner is not model or not run.losses:
        return None
    auxiliary = torch.stack(run.losses).sum()
    learns = any(weight.requires_grad for mechanism in mechanisms(model) for weight in mechanism.parameters())
    if torch.is_grad_enabled() and not auxiliary.requires_grad and learns:
        problem = "gradient checkpointing with use_reentrant=True drops the gradient of auxiliary losses"
        hint = 'Call gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        raise HubError(type(model).__name__, problem, hint)
    task = output.get("loss") if isinstance(output, dict) else output[0] if output[0].dim() == 0 else None
    if task is None:
        _state(model).pending = auxiliary
        return None
    auxiliary = auxiliary * share_of_batch(kwargs.get("labels"), kwargs.get("num_items_in_batch"))
    loss = min(mechanism.task_weight for mechanism in mechanisms(model)) * task + auxiliary
    if not isinstance(output, dict):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def _targets(model: PreTrainedModel, named: dict[str, Any]) -> Targets | None:
    """Return the labels of tokens or of sequences; None for other tasks. For a causal language model, shift them to the
    next tokens. named: arguments of its forward.
    """
    labels = named.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    if labels.dim() == 1:
        return Targets(labels, None)
    if model.config.model_type not in ENCODERS and model.get_output_embeddings() is not None:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return Targets(labels.clamp_min(0), labels >= 0) if labels.dim() == 2 else None


# Folders of replaced models

CARD = """# A model with attention by megasparse: {kinds}

    from megasparse.hub import load_replaced
    model = load_replaced(FOLDER)

transformers itself loads the original model with full attention: `from_pretrained(FOLDER, attn_implementation="sdpa")`.
The tensors in {adapter} choose the keys.
"""


def save_replaced(model: PreTrainedModel, directory: str | Path, tokenizer: Any = None) -> None:
    """Save a model atomically, the mechanisms' tensors in a separate file. Raises HubError if the folder exists."""
    with appearing(Path(directory)) as folder:
        weights = {name: tensor for name, tensor in model.state_dict().items() if f".{NAME}." not in name}
        model.save_pretrained(folder, state_dict=weights)
        adapter = {name: x.contiguous() for name, x in _base_state(model).items()}
        save_file(adapter, folder / ADAPTER, {"format": "pt"})
        pattern = getattr(model.config, ENTRY)["attention"].keys() - {"pattern", "dropout"}
        card = CARD.format(kinds=", ".join(sorted(pattern)), adapter=ADAPTER)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def load_replaced(
    directory: str | Path, model_class: type[PreTrainedModel] | None = None, **settings: Any
) -> PreTrainedModel:
    """Load a model that `save_replaced`, or `save_pretrained` of a replaced model, wrote.

    Args:
        directory: The folder.
        model_class: For another head, such as transformers.BertForSequenceClassification; by default the saved class.
        settings: Arguments of transformers' from_pretrained, such as num_labels.

    Raises:
        HubError: The folder contains no such model, or a tensor is missing, unexpected or wrong-shaped.
    """
    TensorFile.open(directory)
    replacement_of(directory)
    loader, new_head = model_class or _saved_class(Path(directory)), model_class is not None
    settings = {"attn_implementation": NAME, **settings}
    return load_whole(loader, directory, new_head, **settings)


def _base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: x for name, x in model.base_model.state_dict().items() if f".{NAME}." in name}


def load_whole(loader: Any, folder: str | Path, new_head: bool = False, **settings: Any) -> PreTrainedModel:
    """Load the model of a folder, and replace its attention if config.json specifies that. See `load_stored`."""
    model: PreTrainedModel = load_stored(loader, folder, new_head, **settings)
    restore_attention(model, folder)
    return model


def restore_attention(model: PreTrainedModel, directory: str | Path) -> None:
    """Replace the attention of a model that transformers has loaded from a folder, if its config.json specifies that.
    Raises HubError if a tensor is missing or unknown.
    """
    implementation = model.config._attn_implementation
    if not hasattr(model.config, ENTRY) and implementation != NAME:
        return
    entry = entry_of(model.config, directory)
    file = TensorFile.open(directory)
    replace_attention(model, entry["attention"], max_length=entry["max_length"], seed=entry["seed"])
    prefix = f"{model.base_model_prefix}."
    saved = {tensor.removeprefix(prefix): tensor for tensor in file.names() if f".{NAME}." in tensor}
    with torch.no_grad():
        for tensor_name, tensor in _base_state(model).items():
            tensor.copy_(file.read(saved.pop(tensor_name, tensor_name), tensor.shape, tensor.dtype))
    if saved:
        problem = f"contains a tensor {next(iter(saved.values()))}, unknown to its {ENTRY}"
        raise HubError(file.path, problem, "Use a model with its original config.json")
    model.set_attn_implementation(implementation)


def replacement_of(directory: str | Path) -> dict[str, Any]:
    """Return the entry of config.json that describes the replacement. Raises HubError if there is none."""
    return entry_of(_config(Path(directory)), directory)


def entry_of(config: Any, directory: str | Path) -> dict[str, Any]:
    entry = getattr(config, ENTRY, None)
    if not isinstance(entry, dict) or entry.keys() != {"attention", "max_length", "seed"}:
        raise HubError(directory, f"config.json contains no valid entry {ENTRY}", "Use megasparse replace-attention")
    return entry


def load_plain(directory: str | Path) -> PreTrainedModel:
    """Load the original model of a folder, with the saved class."""
    TensorFile.open(directory)
    return load_whole(_saved_class(Path(directory)), directory)


def _config(directory: Path) -> PretrainedConfig:
    damages, problem = (OSError, ValueError, KeyError, TypeError, AttributeError), "config.json cannot be read ({})"
    with HubError.instead_of(damages, directory, problem, "Use the folder of a model"):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _saved_class(directory: Path) -> type[PreTrainedModel]:
    config = _config(directory)
    name = (config.architectures or [""])[0]
    saved = getattr(transformers, name, None)
    if not (isinstance(saved, type) and issubclass(saved, PreTrainedModel) and saved.config_class is type(config)):
        problem = f'config.json specifies the architecture "{name}" of type "{config.model_type}"'
        raise HubError(directory, problem, HINT)
    return saved


# Longer inputs for a pretrained encoder: its table of positions is repeated (as in LHA and YOSO)


def position_offset(model: PreTrainedModel) -> int:
    """Return the row of the first token in the table of positions."""
    return model.config.pad_token_id + 1 if model.config.model_type in ("roberta", "xlm-roberta") else 0


def positions(model: PreTrainedModel) -> int:
    """Return the longest input in tokens that the model has positions for."""
    return int(model.config.max_position_embeddings) - position_offset(model)


@torch.no_grad()
def extend_positions(model: PreTrainedModel, length: int) -> None:
    """Extend a pretrained encoder to `length` tokens, in place: position i gets the embedding of position i mod P.
    Raises HubError if the model has more positions, or if they are offloaded.
    """
    old, offset = positions(model), position_offset(model)
    if length < old:
        problem = f"has {old} positions, more than the requested {length}"
        raise HubError(type(model).__name__, problem, f"Use {old} or more")
    embeddings: Any = model.base_model.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    if table.weight.is_meta:
        problem = f"has offloaded position embeddings, which cannot be extended to {length} tokens"
        raise HubError(type(model).__name__, problem, "Load it without device_map, save it replaced, and load that")
    longer = lengthened(table.weight, offset + length, offset)
    table.weight = nn.Parameter(longer, requires_grad=table.weight.requires_grad)
    table.num_embeddings = model.config.max_position_embeddings = len(longer)
    embeddings.position_ids = torch.arange(len(longer), device=longer.device).expand(1, -1)
    if hasattr(embeddings, "token_type_ids"):
        embeddings.token_type_ids = torch.zeros_like(embeddings.position_ids)
