"""megasparse models with the interface of Hugging Face models. Parameter names are megasparse's with a prefix `model.`.

B batch, n length of the input, S length of a source, E width, V vocabulary.

Hugging Face's logits at position t predict token t + 1. A megasparse decoder's output at position t predicts token t,
and a learned start vector is the input of position 0. An input of n tokens therefore needs n + 1 positions, and the
last n outputs are returned. An empty input (B, 0) returns the first token's logits (B, 1, V). In an encoder–decoder,
the start vector replaces the embedding of Hugging Face's start token.

Padding (attention_mask) may be on the left or right: positions count from the first real token. Random hashes depend
only on the run's seed in evaluation, and in training on torch's generator too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from megasparse.attention.contract import Targets
from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig, predicts
from megasparse.hub.aligned_rows import AlignedRows, MegasparseCache, refuse_shape, refuse_unsupported
from megasparse.hub.formats import TASKS
from megasparse.hub.replaced_layer import IGNORED, share_of_batch
from megasparse.model.build import empty_model, initialise
from megasparse.ops.random import EVALUATION_STEP, RngContext, drawn_step
from megasparse.settings.checks import check_model


class MegasparseConfig(PretrainedConfig):
    """Configuration of an exported model.

    model: the `model` section of the run's configuration. seed: of its hashes. tokenizer: `bytes`, `pixels`, or the
    name of the tokenizer whose file is in the folder.
    """

    model_type = "megasparse"

    def __init__(
        self, model: dict[str, Any] | None = None, seed: int = 0, tokenizer: str = "bytes", **kwargs: Any
    ) -> None:
        self.model, self.seed, self.tokenizer = model or {}, seed, tokenizer
        source = self.model.get("source")
        shared = source is not None and source.get("shared_embedding", True)
        kwargs["tie_word_embeddings"] = shared or self.model.get("tied_embeddings", False)
        kwargs["is_encoder_decoder"] = source is not None
        if source is not None:
            padding = self.model.get("padding_token")
            kwargs = {"pad_token_id": padding, "decoder_start_token_id": padding or 0, **kwargs}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get("vocabulary", ModelConfig.model_fields["vocabulary"].default))

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.model = {**self.model, "vocabulary": value}

    @property
    def hidden_size(self) -> int:
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.model["layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["heads"])

    @property
    def is_decoder(self) -> bool:
        return bool(self.model.get("kind", "decoder") == "decoder")

    @is_decoder.setter
    def is_decoder(self, value: bool) -> None:
        if value != self.is_decoder and self.model.get("kind") != "encoder_decoder":  # which contains a decoder
            raise ValueError(f"is_decoder cannot be {value}: the model is of kind {self.model.get('kind', 'decoder')}")

    @property
    def max_position_embeddings(self) -> int:
        """Longest input in tokens, of a decoder without its start vector."""
        return int(self.model["max_length"]) - self.is_decoder


class MegasparsePreTrainedModel(PreTrainedModel):
    config_class = MegasparseConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = "text"
    supports_gradient_checkpointing = True
    _no_split_modules: Any = ("Block",)  # its branches read the weights of their parts
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "encoder")

    def __init__(self, config: MegasparseConfig):
        super().__init__(config)
        self.settings: Any = ModelConfig.model_validate(config.model)
        kind, source = self.settings.kind, self.settings.source
        if kind not in self.kinds:
            raise ValueError(f"this model is of kind {kind}: load it with AutoModel{TASKS[kind]}")
        self._tied_weights_keys = {}
        if self.settings.tied_embeddings:
            self._tied_weights_keys["model.head.weight"] = "model.embedding.weight"
        if source is not None and source.shared_embedding:
            self._tied_weights_keys["model.encoder.embedding.weight"] = "model.embedding.weight"
        self.model: Any = empty_model(self.settings)
        self.add_head()
        self.post_init()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = {name: getattr(self.config, name, None) for name in ("output_hidden_states", "output_attentions")}
        refuse_unsupported(config | {name: value for name, value in kwargs.items() if value is not None})
        return super().__call__(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that embeds input_ids and adds positions and a start vector. Its weight is (V, E)."""
        embedding: nn.Module = (self.model if self.settings.source is None else self.model.encoder).embedding
        return embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise NotImplementedError("set_input_embeddings: copy the weights into get_input_embeddings().weight instead")

    def set_output_embeddings(self, value: nn.Module) -> None:
        raise NotImplementedError("set_output_embeddings: copy the weights into model.head instead")

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize embeddings, head and its bias in place. Called by `resize_token_embeddings` of transformers."""
        rows = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        rows += -rows % (pad_to_multiple_of or 1)
        settings = self.settings.changed(vocabulary=rows)
        check_model(settings)  # raises an error if special tokens would be removed
        self.settings = settings
        for name, weight in self.model.named_parameters():
            if name == "head.bias":
                weight.data = F.pad(weight.data, (0, rows - len(weight)))
            elif name in ("head.weight", "embedding.weight", "encoder.embedding.weight"):
                matrix = nn.Embedding(len(weight), weight.shape[1], device="meta")
                matrix.weight = weight
                self._get_resized_embeddings(matrix, rows, mean_resizing=mean_resizing)
        return self.get_input_embeddings()

    def add_head(self) -> None:
        """Create the layers of a task, if it has any."""

    def initialize_weights(self) -> None:
        """Initialise weights that were not loaded as a megasparse run does: by the run's seed."""
        super().initialize_weights()
        values = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        loaded = {name: x.detach().clone() for name, x in values.items() if getattr(x, "_is_hf_initialized", False)}
        if len(loaded) < len(values):
            initialise(self.model, self.settings, self.config.seed)
            with torch.no_grad():
                for name, x in loaded.items():
                    values[name].copy_(x)

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """Keep the names of missing weights that are tied, which transformers removes in code outside its package."""
        missing = {*loading_info.missing_keys}
        super().mark_tied_weights_as_initialized(loading_info)
        loading_info.missing_keys = missing

    def run(self, rows: AlignedRows, targets: Targets | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the final streams, (B, n, E), or (B, n + 1, E) for a decoder, and the auxiliary losses."""
        self.check_length(rows.tokens.shape[1])
        rng, padding = self.rng(len(rows.tokens)), Padding(rows.key_mask(start=self.config.is_decoder))
        if bool((ends := self._document_ends(rows)).any()):
            before = ends.long().cumsum(1)  # a decoder's position i predicts token i, an encoder's reads it
            segments = F.pad(before, (1, 0)) if self.config.is_decoder else before - ends.long()
            padding = Padding(padding.key_mask, segments)
        streams, auxiliary, _ = self.model.streams(rows.tokens, rng, padding, targets)
        return streams, auxiliary

    def _document_ends(self, rows: AlignedRows) -> Tensor:
        """Return the mask of real tokens that end a document, (B, n) bool."""
        if (separator := self.settings.document_separator) is None:
            return torch.zeros_like(rows.tokens, dtype=torch.bool)
        ends = rows.tokens == separator
        return ends if rows.real is None else ends & rows.real

    def rng(self, batch: int) -> RngContext:
        if not self.training:
            return RngContext.evaluation(self.config.seed, batch)
        return RngContext(self.config.seed, drawn_step(), torch.arange(batch), training=True)

    def check_length(self, length: int) -> None:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens are more than the model's maximum of {longest}")

    def objective(
        self, loss: Tensor | None, auxiliary: Tensor, labels: Tensor | None, accumulated: Tensor | int | None
    ) -> Tensor | None:
        """Return the training objective, in evaluation only the task's loss; None without labels. accumulated: see
        `share_of_batch`.
        """
        if not self.training or loss is None:
            return loss
        return self.model.task_weight * loss + auxiliary * share_of_batch(labels, accumulated)

    def refuse_leaks(self) -> None:
        if leaks := self.model.leaks:
            raise ValueError(f"not strictly causal, so it cannot use a cache ({'; '.join(leaks)}): set use_cache=False")

    def from_cache(self, input_ids: Tensor, cache: MegasparseCache, name: str, mask: Tensor | None) -> Tensor:
        """Append tokens (B, n) to the cache. Return the logits (B, n, V) of the token after each. name, mask: of the
        new tokens or of all. Raises ValueError if it hides tokens.
        """
        count = input_ids.shape[1]
        if mask is not None:
            if mask.shape != input_ids.shape:
                refuse_shape(name, mask, (len(input_ids), cache.length + count))
            cached, new = (mask != 0).split([mask.shape[1] - count, count], dim=1)
            hidden = [cached[rows].sum(1) < part.position - self.config.is_decoder for rows, part in cache.groups]
            if not new.all() or (cached.shape[1] and torch.cat(hidden).any()):
                raise ValueError(f"{name}: a cache cannot contain padding: set use_cache=False")
        length = max(part.position for _, part in cache.groups) - self.config.is_decoder
        self.check_length(length + count)
        logits = self._empty_logits(input_ids)
        for column in range(count):
            for numbers, part in cache.groups:
                logits[numbers, column] = self.model.decode(input_ids[numbers, column], part)
        cache.length += count
        return logits

    def _empty_logits(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.zeros(*tokens.shape, self.config.vocab_size, dtype=dtype, device=tokens.device)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes the cache


class MegasparseModel(MegasparsePreTrainedModel):
    """The bare model. last_hidden_state: the final streams, concatenated, before the output norm: (B, n, E or 2·E)."""

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        rows = AlignedRows(input_ids, attention_mask, positions=kwargs.get("position_ids"))
        streams, _ = self.run(rows, None)
        hidden = torch.cat(streams, dim=-1)[:, int(self.config.is_decoder) :]
        return BaseModelOutput(last_hidden_state=rows.restore(hidden))


class MegasparseWriter(MegasparsePreTrainedModel, GenerationMixin):
    """Base class of models that generate text."""

    _is_stateful = True  # a cache cannot drop its last tokens
    read_as = "input_ids"
    """The argument of forward for the tokens so far."""
    handed_on: tuple[str, ...] = ("attention_mask", "use_cache")

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        refuse_unsupported({"inputs_embeds": inputs_embeds, **kwargs})
        past_key_values = kwargs.get("cache", past_key_values)  # its name since transformers 5.24
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        options = {"attention_mask": attention_mask, **kwargs}
        inputs = {self.read_as: input_ids, "past_key_values": past_key_values, "logits_to_keep": 1}
        return {**inputs, **{name: options.get(name) for name in self.handed_on}}


class MegasparseForCausalLM(MegasparseWriter):
    """A decoder: logits at position t predict token t + 1."""

    kinds = ("decoder",)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens.

        labels: (B, n), a copy of the input with -100 for ignored tokens; the first one is not used. past_key_values:
        returned by an earlier call; input_ids are then the tokens after it. logits_to_keep: number of last positions; 0
        keeps all.
        """
        past_key_values = kwargs.get("cache", past_key_values)  # its name since transformers 5.24
        if past_key_values is not None:
            logits = self.from_cache(input_ids, past_key_values, "attention_mask", attention_mask)
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        rows = AlignedRows(input_ids, attention_mask, positions=kwargs.get("position_ids"))
        if use_cache and labels is None and not self.training:
            return self._into_cache(rows, logits_to_keep)
        targets = None if labels is None else self._targets(rows, labels)
        streams, auxiliary = self.run(rows, targets)
        length = rows.tokens.shape[1]
        streams = tuple(x[:, min(1, length) :] for x in streams)
        if not length:
            return CausalLMOutputWithPast(logits=self.model.logits(streams))
        streams = tuple(rows.restore(x)[:, -logits_to_keep:] for x in streams)
        logits = self.model.logits(streams)
        if labels is None:
            return CausalLMOutputWithPast(logits=logits)
        if logits_to_keep:
            raise ValueError("labels need the logits of all positions: omit logits_to_keep")
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        objective = self.objective(loss, auxiliary, labels, kwargs.get("num_items_in_batch"))
        return CausalLMOutputWithPast(loss=objective, logits=logits)

    def _targets(self, rows: AlignedRows, labels: Tensor) -> Targets:
        """Return the targets of n + 1 positions: the first token, ..., the one after the input."""
        values = F.pad(rows.align(labels), (0, 1), value=IGNORED)
        values = values.index_fill(1, torch.zeros(1, dtype=torch.long, device=values.device), IGNORED)
        counted = values != IGNORED
        if rows.real is not None:
            counted = counted & F.pad(rows.real, (0, 1), value=False)
        return Targets(values.masked_fill(~counted, 0), counted)

    @torch.no_grad()  # with gradients, streams would not fill the caches
    def _into_cache(self, rows: AlignedRows, keep: int) -> CausalLMOutputWithPast:
        """Fill one cache per length. Rows keep their indices in the batch, because random draws may depend on them."""
        self.refuse_leaks()
        self.check_length(rows.tokens.shape[1])
        if bool(self._document_ends(rows).any()):
            raise ValueError("input_ids contain several documents, a cache only one: set use_cache=False")
        groups, width = [], rows.tokens.shape[1]
        logits = self._empty_logits(rows.tokens if width else F.pad(rows.tokens, (0, 1)))
        for length in sorted(set(rows.lengths)):
            numbers = torch.tensor([row for row, group in enumerate(rows.lengths) if group == length])
            group = self.model.new_cache(len(numbers), self.config.seed)
            group.rng = RngContext(self.config.seed, EVALUATION_STEP, numbers, training=False)
            numbers = numbers.to(rows.tokens.device)
            streams = self.model.fill(rows.tokens[numbers, :length], group)
            predicted = self.model.logits(tuple(x[:, min(1, length) :] for x in streams))
            logits[numbers, : predicted.shape[1]] = predicted
            groups.append((numbers, group))
        logits = rows.restore(logits)[:, -keep:]
        cache: Any = MegasparseCache(groups, width)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


@dataclass
class SourceOutput(BaseModelOutput):
    """Output of the encoder: last_hidden_state (B, S, E)."""

    attention_mask: Tensor | None = None
    """(B, S), 0 for padding; None without padding."""


class SourceReader(nn.Module):
    """The encoder of an encoder–decoder with Hugging Face's interface."""

    def __init__(self, owner: "MegasparseForSeq2SeqLM"):
        super().__init__()
        self.encoder, self._read = owner.model.encoder, owner.read

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> SourceOutput:
        refuse_unsupported(kwargs)
        if input_ids is None:
            raise ValueError("the encoder needs input_ids")
        return self._read(input_ids, attention_mask)


class MegasparseForSeq2SeqLM(MegasparseWriter):
    """An encoder–decoder. Logits at position t predict the target's token t. decoder_input_ids are the start token and
    the target without its last token.

    Beam search is Hugging Face's: beams are ranked by log-probability / length**length_penalty, and beams cut off by
    max_length are complete. megasparse's divides by ((5 + length)/6)**penalty and returns incomplete beams only if none
    is complete.
    """

    kinds = ("encoder_decoder",)
    read_as = "decoder_input_ids"
    handed_on = ("attention_mask", "encoder_outputs", "decoder_attention_mask", "use_cache")

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        return SourceReader(self)

    def read(self, input_ids: Tensor, attention_mask: Tensor | None) -> SourceOutput:
        """Encode sources (B, S). Without a mask, only the model's padding token is padding."""
        return self._encoded(input_ids, attention_mask, self.rng(len(input_ids)))[0]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the start token and all labels except the last; ignored labels become the start token."""
        start = self.config.decoder_start_token_id
        return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1] == IGNORED, (1, 0)), start)

    @can_return_tuple
    def forward(  # noqa: PLR0913  (names that transformers passes)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Predict the target's tokens. The loss is the mean nats per label, in training with label smoothing.

        labels: (B, n), targets with their end token; -100 and the padding token are ignored. num_items_in_batch:
        divisor of the loss, by default the number of labels. encoder_outputs: result of `get_encoder`; the loss then
        excludes the encoder's auxiliary losses. decoder_attention_mask: right padding. past_key_values, logits_to_keep:
        as in a decoder.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("an encoder-decoder needs decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        past_key_values = kwargs.get("cache", past_key_values)  # its name since transformers 5.24
        if past_key_values is not None:
            mask = decoder_attention_mask
            logits = self.from_cache(decoder_input_ids, past_key_values, "decoder_attention_mask", mask)
            return Seq2SeqLMOutput(logits=logits, past_key_values=past_key_values)
        start = self.config.decoder_start_token_id
        if not decoder_input_ids.shape[1] or bool((decoder_input_ids[:, 0] != start).any()):
            raise ValueError(f"decoder_input_ids must start with the start token {start}")
        self.check_length(decoder_input_ids.shape[1])
        refuse_shape("decoder_attention_mask", decoder_attention_mask, decoder_input_ids.shape)
        if labels is not None and logits_to_keep:
            raise ValueError("labels need the logits of all positions: omit logits_to_keep")
        rng, auxiliary = self.rng(len(decoder_input_ids)), torch.zeros((), device=decoder_input_ids.device)
        targets = None
        if labels is not None:
            counted = (labels != IGNORED) & (labels != self._padding)
            targets = Targets(labels.masked_fill(~counted, 0), counted)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("an encoder-decoder needs input_ids or encoder_outputs")
            encoder_outputs, auxiliary = self._encoded(input_ids, attention_mask, rng, targets)
        source = self._source(encoder_outputs, attention_mask)
        real = self._real_targets(decoder_attention_mask, targets)
        if use_cache and labels is None and not self.training:
            if real is not None:
                raise ValueError("decoder_attention_mask: a cache cannot contain padding: set use_cache=False")
            filled = self._into_cache(decoder_input_ids, source, logits_to_keep)
            return Seq2SeqLMOutput(**filled, encoder_last_hidden_state=encoder_outputs[0])
        streams, decoder_loss, _ = self.model.streams(
            decoder_input_ids[:, 1:], rng, Padding(real), targets, source=source
        )
        logits = self.model.logits(tuple(x[:, -logits_to_keep:] for x in streams))
        loss = None
        if targets is not None:
            loss = self._loss(logits, targets, num_items_in_batch)
            loss = self.objective(loss, auxiliary + decoder_loss, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=encoder_outputs[0])

    @property
    def _padding(self) -> int:
        """The padding token, -100 if there is none."""
        token: int | None = self.settings.padding_token
        return IGNORED if token is None else token

    def _encoded(
        self, tokens: Tensor, mask: Tensor | None, rng: RngContext, targets: Targets | None = None
    ) -> tuple[SourceOutput, Tensor]:
        """Return the encoder's output, in the order of the input, and its auxiliary losses."""
        longest = self.settings.source.length
        if tokens.shape[1] > longest:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the encoder's maximum of {longest}")
        mask = tokens != self._padding if mask is None else mask
        rows = AlignedRows(tokens, mask, self.settings.padding_token or 0)
        answer = targets and targets._replace(answer=True)
        states, auxiliary, _ = self.model.encoder(rows.tokens, rng, rows.real, answer)
        return SourceOutput(rows.restore(states), attention_mask=mask if rows.padded else None), auxiliary

    def _source(self, encoder_outputs: Any, mask: Tensor | None) -> EncoderOutput:
        """Reorder the encoder's output: real tokens first."""
        states = encoder_outputs[0]
        mask = getattr(encoder_outputs, "attention_mask", None) if mask is None else mask
        rows = AlignedRows(torch.zeros(states.shape[:2], dtype=torch.long, device=states.device), mask)
        return EncoderOutput(rows.align(states), rows.real)

    def _real_targets(self, mask: Tensor | None, targets: Targets | None) -> Tensor | None:
        """Return the mask of the target's real positions (B, n), up to the last label without a
        mask; None if all are.
        """
        if mask is not None:
            real = mask != 0
            if bool((real[:, 1:] & ~real[:, :-1]).any()):
                raise ValueError("decoder_attention_mask: padding must be on the right of the tokens")
        elif targets is not None and targets.counted is not None:
            real = targets.counted.flip(1).cumsum(1).flip(1) > 0
        else:
            return None
        real = real | (torch.arange(real.shape[1], device=real.device) == 0)
        return None if bool(real.all()) else real

    def _loss(self, logits: Tensor, targets: Targets, divisor: Tensor | int | None) -> Tensor:
        values, counted = targets.values, targets.counted
        assert counted is not None
        smoothing = self.settings.label_smoothing if self.training else 0.0
        labels = values.masked_fill(~counted, IGNORED).flatten()
        total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum", label_smoothing=smoothing)
        return total / (counted.sum().clamp_min(1) if divisor is None else divisor)

    @torch.no_grad()  # with gradients, streams would not fill the caches
    def _into_cache(self, read: Tensor, source: EncoderOutput, keep: int) -> dict[str, Any]:
        self.refuse_leaks()
        cache = self.model.new_cache(len(read), self.config.seed, memory=source)
        streams = self.model.fill(read[:, 1:], cache)
        logits = self.model.logits(tuple(x[:, -keep:] for x in streams))
        numbers = torch.arange(len(read), device=read.device)
        return {"logits": logits, "past_key_values": MegasparseCache([(numbers, cache)], cache.position)}


class MegasparseForMaskedLM(MegasparsePreTrainedModel):
    """An encoder. Logits at position t predict the masked token at t."""

    kinds = ("encoder",)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> MaskedLMOutput:
        """Predict the masked tokens. labels: (B, n), -100 for ignored tokens."""
        rows = AlignedRows(input_ids, attention_mask, positions=kwargs.get("position_ids"))
        targets = None
        if labels is not None:
            values = rows.align(labels)
            targets = Targets(values.masked_fill(values == IGNORED, 0), values != IGNORED)
        streams, auxiliary = self.run(rows, targets)
        logits, loss = self.model.logits(tuple(rows.restore(x) for x in streams)), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        objective = self.objective(loss, auxiliary, labels, kwargs.get("num_items_in_batch"))
        return MaskedLMOutput(loss=objective, logits=logits)


class MegasparseForSequenceClassification(MegasparsePreTrainedModel):
    """Sequence classification by a linear layer on the normalised final streams: an encoder's mean over real tokens, a
    decoder's at its last real token.
    """

    def add_head(self) -> None:
        self.settings = self.settings.changed(document_separator=None)  # inputs are a text or a pair
        streams = 2 if self.settings.blocks == "reversible" else 1
        self.classifier = nn.Linear(streams * self.settings.d_model, self.config.num_labels or 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: None = None,  # an argument of that name lets prefix tuning of peft fail in one line
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Predict classes or numbers. labels: (B,) classes, or numbers to regress on if config.num_labels is 1."""
        rows = AlignedRows(input_ids, attention_mask, positions=kwargs.get("position_ids"))
        targets = None
        if labels is not None and predicts(self.settings, "pooled"):
            targets = Targets(labels, None)
        streams, auxiliary = self.run(rows, targets)
        hidden = torch.cat(streams, dim=-1)
        hidden = F.layer_norm(hidden, hidden.shape[-1:])
        lengths = torch.tensor(rows.lengths, device=hidden.device)
        if self.config.is_decoder:  # position p follows p tokens
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths]
        else:
            real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
            pooled = (hidden * real.unsqueeze(-1)).sum(1) / lengths[:, None].clamp_min(1)
        logits, loss = self.classifier(pooled.to(self.classifier.weight.dtype)).float(), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        objective = self.objective(loss, auxiliary, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(loss=objective, logits=logits)
