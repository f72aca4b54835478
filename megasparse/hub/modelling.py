"""Models of megasparse behind HuggingFace's interface: the same modules, the same names of parameters below `model.`.

B batch, n length of the input, S length of a source, E width, V vocabulary.

HuggingFace's logits at position t predict token t + 1; a megasparse decoder's output at position t predicts token t,
the first one from a learned start vector. So an input of n tokens is n + 1 positions, of which the last n are given
back. An empty input (B, 0) gives (B, 1, V), the first token's logits, so that text can be generated from nothing. What
an encoder–decoder predicts begins with a start token, as HuggingFace has it: the start vector stands in its place.

Padding may stand left or right (attention_mask): a sequence is computed as if it stood alone, from position 0 on.
In evaluation random hashes depend on the run's seed alone; in training they are drawn anew every forward pass.
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
from megasparse.config.attention import predicts
from megasparse.config.schema import ModelConfig
from megasparse.hub.formats import TASKS
from megasparse.model.build import empty_model, initialise
from megasparse.model.decoder import DecodingCache
from megasparse.ops.random import EVALUATION_STEP, RngContext

IGNORED = -100
"""A label that does not count, as everywhere in HuggingFace's."""


class MegasparseConfig(PretrainedConfig):
    """Configuration of an exported model. model: the whole `model` section of the run's configuration. seed: of the
    run, on which its hashes depend.
    tokenizer: what a token id means: `bytes` of UTF-8, `pixels`, or the tokenizer of a file in the folder.
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
        return int(self.model["vocabulary"])

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

    @property
    def max_position_embeddings(self) -> int:
        """Longest input; of an encoder–decoder what its decoder reads, the start token among it. In a decoder one place
        is the start's, from which the first token is predicted.
        """
        return int(self.model["max_length"]) - self.is_decoder


class AlignedRows:
    """A batch with each row's real tokens moved to its beginning, and the way back."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, padding: int = 0):
        """Sort real tokens to the front. input_ids: (B, n). attention_mask: (B, n), 0 for padding, or None where
        there is none. padding: the token that `tokens` has there. Raises ValueError for a row of padding alone.
        """
        self.padded = attention_mask is not None and not bool((attention_mask != 0).all())
        if not self.padded or attention_mask is None:
            self.tokens, self.real, self.lengths = input_ids, None, [input_ids.shape[1]] * len(input_ids)
            return
        real = attention_mask != 0
        if not bool(real.any(1).all()):
            raise ValueError("attention_mask: a sequence is padding alone")
        self._order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        self.lengths = [int(length) for length in real.sum(1)]
        self.real = real.gather(1, self._order)
        self.tokens = input_ids.gather(1, self._order).masked_fill(~self.real, padding)

    def align(self, values: Tensor) -> Tensor:
        """(B, n) or (B, n, E) in the order of `tokens`."""
        return values.gather(1, self._like(values, self._order)) if self.padded else values

    def restore(self, values: Tensor) -> Tensor:
        """(B, n, E) in the order of the input."""
        return values.gather(1, self._like(values, self._order.argsort(dim=1))) if self.padded else values

    def key_mask(self, start: bool) -> Tensor | None:
        """The real positions, in a decoder behind the start: (B, n), or (B, n + 1)."""
        return F.pad(self.real, (1, 0), value=True) if start and self.real is not None else self.real

    @staticmethod
    def _like(values: Tensor, order: Tensor) -> Tensor:
        return order if values.dim() == 2 else order.unsqueeze(-1).expand(values.shape)


class MegasparseCache:
    """Cache of generation for a batch: one for the rows of each length, as a decoding cache has a single position."""

    is_compileable = False

    def __init__(self, groups: list[tuple[Tensor, DecodingCache]], length: int):
        """Make a cache of several groups of rows. groups: rows' numbers, and their cache. length: columns taken in."""
        self.groups, self.length = groups, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Becomes the cache of the rows `beam_idx`, (n,) int64 numbers of its own, repeats allowed."""
        groups = []
        for numbers, cache in self.groups:
            same = beam_idx.to(numbers.device).unsqueeze(1) == numbers
            rows = same.any(1).nonzero().squeeze(1)
            if len(rows):
                cache.select(same[rows].to(torch.int8).argmax(1))
                groups.append((rows, cache))
        self.groups = groups


class MegasparsePreTrainedModel(PreTrainedModel):
    config_class = MegasparseConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = "text"
    supports_gradient_checkpointing = False
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "encoder")
    """Kind of the models that a class is for."""

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
        self.passes = 0
        """Forward passes in training so far: their draws depend on the number."""
        self.add_head()
        self.post_init()

    def add_head(self) -> None:
        """Make the layers of a task, where it has some."""

    def initialize_weights(self) -> None:
        """Gives what was not loaded its initial weights: a function of the run's seed, as in a run of ours."""
        super().initialize_weights()
        values = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        loaded = {name: x.detach().clone() for name, x in values.items() if getattr(x, "_is_hf_initialized", False)}
        if len(loaded) < len(values):
            initialise(self.model, self.settings, self.config.seed)
            with torch.no_grad():
                for name, x in loaded.items():
                    values[name].copy_(x)

    def run(self, rows: AlignedRows, targets: Targets | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The final streams, (B, n, E) in the rows' order, in a decoder (B, n + 1, E); and the auxiliary losses."""
        self.check_length(rows.tokens.shape[1])
        rng, padding = self.rng(len(rows.tokens)), Padding(rows.key_mask(start=self.config.is_decoder))
        if bool((ends := self._document_ends(rows)).any()):
            before = ends.long().cumsum(1)  # a decoder's position i predicts token i, an encoder's reads it
            segments = F.pad(before, (1, 0)) if self.config.is_decoder else before - ends.long()
            padding = Padding(padding.key_mask, segments)
        streams, auxiliary, _ = self.model.streams(rows.tokens, rng, padding, targets)
        return streams, auxiliary

    def _document_ends(self, rows: AlignedRows) -> Tensor:
        """Real tokens that end a document, (B, n) bool."""
        if (separator := self.settings.document_separator) is None:
            return torch.zeros_like(rows.tokens, dtype=torch.bool)
        ends = rows.tokens == separator
        return ends if rows.real is None else ends & rows.real

    def rng(self, batch: int) -> RngContext:
        if not self.training:
            return RngContext.evaluation(self.config.seed, batch)
        self.passes += 1
        return RngContext(self.config.seed, self.passes - 1, torch.arange(batch), training=True)

    def check_length(self, length: int) -> None:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens are more than the {longest} that this model takes")

    def objective(self, loss: Tensor | None, auxiliary: Tensor) -> Tensor | None:
        """The loss that training minimises: in evaluation the task's alone. None without labels."""
        return self.model.task_weight * loss + auxiliary if self.training and loss is not None else loss

    def refuse_leaks(self) -> None:
        """Raise ValueError where a cache cannot give what whole sequences do."""
        if leaks := self.model.leaks:
            raise ValueError(f"not strictly causal, so it has no cache ({'; '.join(leaks)}): give use_cache=False")

    def from_cache(self, input_ids: Tensor, cache: MegasparseCache) -> Tensor:
        """Takes more tokens (B, n) into the cache. Returns the logits (B, n, V) of the token after each."""
        taken = max(part.position for _, part in cache.groups) - self.config.is_decoder
        self.check_length(taken + input_ids.shape[1])
        logits = torch.empty(*input_ids.shape, self.config.vocab_size, device=input_ids.device)
        for column in range(input_ids.shape[1]):
            for numbers, part in cache.groups:
                logits[numbers, column] = self.model.decode(input_ids[numbers, column], part)
        cache.length += input_ids.shape[1]
        return logits

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes the cache


class MegasparseModel(MegasparsePreTrainedModel):
    """The bare model: last_hidden_state is the final streams side by side, (B, n, E) or, reversible, (B, n, 2·E), fp32,
    before the output's norm.
    """

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        rows = AlignedRows(input_ids, attention_mask)
        streams, _ = self.run(rows, None)
        hidden = torch.cat(streams, dim=-1)[:, int(self.config.is_decoder) :]
        return BaseModelOutput(last_hidden_state=rows.restore(hidden))


class MegasparseWriter(MegasparsePreTrainedModel, GenerationMixin):
    """Base of the models that generate text."""

    _is_stateful = True  # a cache cannot be taken back by some tokens
    read_as = "input_ids"
    """The argument of forward that has the tokens so far."""
    handed_on: tuple[str, ...] = ("attention_mask", "use_cache")
    """Arguments of generate that each forward gets."""

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
        """Return the arguments of the next call. input_ids: of the decoder."""
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
        """Predict the next tokens. labels: (B, n), those of the input itself, -100 for what does not count; the first
        token's is not used (give it as -100 where padding stands left of it).
        past_key_values: of an earlier call; input_ids are then the tokens after it. logits_to_keep: only the last ones;
        0 keeps all.
        """
        if past_key_values is not None:
            logits = self.from_cache(input_ids, past_key_values)
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        rows = AlignedRows(input_ids, attention_mask)
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
            raise ValueError("labels need the logits of all positions: leave logits_to_keep out")
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=self.objective(loss, auxiliary), logits=logits)

    def _targets(self, rows: AlignedRows, labels: Tensor) -> Targets:
        """Streams of the n + 1 positions: the first predicts the first token, the last what comes after the input."""
        values = F.pad(rows.align(labels), (0, 1), value=IGNORED)
        values = values.index_fill(1, torch.zeros(1, dtype=torch.long, device=values.device), IGNORED)
        counted = values != IGNORED
        if rows.real is not None:
            counted = counted & F.pad(rows.real, (0, 1), value=False)
        return Targets(values.masked_fill(~counted, 0), counted)

    def _into_cache(self, rows: AlignedRows, keep: int) -> CausalLMOutputWithPast:
        """All rows of a length go into a cache of their own, numbered as in the batch, on which draws may depend."""
        self.refuse_leaks()
        self.check_length(rows.tokens.shape[1])
        if bool(self._document_ends(rows).any()):
            raise ValueError("input_ids hold several documents, and a cache only one: give use_cache=False")
        groups, width = [], rows.tokens.shape[1]
        shape = (*rows.tokens.shape[:1], max(1, width))
        logits = torch.zeros(*shape, self.config.vocab_size, device=rows.tokens.device)
        for length in sorted(set(rows.lengths)):
            numbers = torch.tensor([row for row, group in enumerate(rows.lengths) if group == length])
            group = self.model.new_cache(len(numbers), self.config.seed)
            group.rng = RngContext(self.config.seed, EVALUATION_STEP, numbers, training=False)
            numbers = numbers.to(rows.tokens.device)
            streams, _, _ = self.model.streams(rows.tokens[numbers, :length], group.rng, Padding(), caches=group.layers)
            group.position = length + 1
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
    """(B, S), 0 for padding; None where there is none."""


class SourceReader(nn.Module):
    """The encoder of an encoder–decoder with HuggingFace's interface."""

    def __init__(self, owner: "MegasparseForSeq2SeqLM"):
        super().__init__()
        self.encoder, self._read = owner.model.encoder, owner.read

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> SourceOutput:
        return self._read(input_ids, attention_mask)


class MegasparseForSeq2SeqLM(MegasparseWriter):
    """An encoder–decoder: logits at position t predict the target's token t. decoder_input_ids are the start token and
    the target's tokens before the last one.

    Beams are HuggingFace's: they are compared by log-probability / length**length_penalty, and what max_length cuts off
    counts as ended. megasparse's own divide by ((5 + length)/6)**penalty and keep what is cut off only where nothing
    has ended; with length_penalty=0 and early_stopping=True the two find the same, if beams end in time.
    """

    kinds = ("encoder_decoder",)
    read_as = "decoder_input_ids"
    handed_on = ("attention_mask", "encoder_outputs", "decoder_attention_mask", "use_cache")

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        return SourceReader(self)

    def read(self, input_ids: Tensor, attention_mask: Tensor | None) -> SourceOutput:
        """Encode sources (B, S). Without a mask, all is real but the model's padding token."""
        return self._encoded(input_ids, attention_mask, self.rng(len(input_ids)))[0]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The start token and all labels but the last one, in place of what does not count the start token."""
        start = self.config.decoder_start_token_id
        return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1] == IGNORED, (1, 0)), start)

    @can_return_tuple
    def forward(
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
        """Predict the target's tokens. labels: (B, n), the targets with what ends them; -100 and the padding token do
        not count. The loss is the mean nats of a label (of `num_items_in_batch` of them, where given), in training with
        the model's label smoothing.
        encoder_outputs: of `get_encoder`, in place of input_ids; auxiliary losses of the encoder are then not in the
        loss. decoder_attention_mask: padding of decoder_input_ids, right of the tokens. past_key_values: of an earlier
        call; decoder_input_ids are then the tokens after it. logits_to_keep: only the last ones; 0 keeps all.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("an encoder-decoder needs decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if past_key_values is not None:
            logits = self.from_cache(decoder_input_ids, past_key_values)
            return Seq2SeqLMOutput(logits=logits, past_key_values=past_key_values)
        start = self.config.decoder_start_token_id
        if not decoder_input_ids.shape[1] or bool((decoder_input_ids[:, 0] != start).any()):
            raise ValueError(f"decoder_input_ids must begin with the start token {start}")
        self.check_length(decoder_input_ids.shape[1])
        if labels is not None and logits_to_keep:
            raise ValueError("labels need the logits of all positions: leave logits_to_keep out")
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
        if use_cache and labels is None and not self.training:
            filled = self._into_cache(decoder_input_ids, source, logits_to_keep)
            return Seq2SeqLMOutput(**filled, encoder_last_hidden_state=encoder_outputs[0])
        padding = Padding(self._real_targets(decoder_attention_mask, targets))
        streams, decoder_loss, _ = self.model.streams(decoder_input_ids[:, 1:], rng, padding, targets, source=source)
        logits = self.model.logits(tuple(x[:, -logits_to_keep:] for x in streams))
        loss = None
        if targets is not None:
            loss = self.objective(self._loss(logits, targets, num_items_in_batch), auxiliary + decoder_loss)
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=encoder_outputs[0])

    @property
    def _padding(self) -> int:
        """The padding token, -100 where there is none."""
        token: int | None = self.settings.padding_token
        return IGNORED if token is None else token

    def _encoded(
        self, tokens: Tensor, mask: Tensor | None, rng: RngContext, targets: Targets | None = None
    ) -> tuple[SourceOutput, Tensor]:
        """The encoder's output for sources, in the order of the input, and its auxiliary losses."""
        longest = self.settings.source.length
        if tokens.shape[1] > longest:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the {longest} that the encoder reads")
        mask = tokens != self._padding if mask is None else mask
        rows = AlignedRows(tokens, mask, self._padding)
        answer = targets and targets._replace(answer=True)
        states, auxiliary, _ = self.model.encoder(rows.tokens, rng, rows.real, answer)
        return SourceOutput(rows.restore(states), attention_mask=mask if rows.padded else None), auxiliary

    def _source(self, encoder_outputs: Any, mask: Tensor | None) -> EncoderOutput:
        """The order that our decoder sees: the real tokens first."""
        states = encoder_outputs[0]
        mask = getattr(encoder_outputs, "attention_mask", None) if mask is None else mask
        rows = AlignedRows(torch.zeros(states.shape[:2], dtype=torch.long, device=states.device), mask)
        return EncoderOutput(rows.align(states), rows.real)

    def _real_targets(self, mask: Tensor | None, targets: Targets | None) -> Tensor | None:
        """The real positions (B, n) of the target: by its mask, else those up to the last label that counts, the first
        always; None where that is all.
        """
        if mask is not None:
            real = mask != 0
            if bool((real[:, 1:] & ~real[:, :-1]).any()):
                raise ValueError("decoder_attention_mask: padding stands left of a token")
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

    def _into_cache(self, read: Tensor, source: EncoderOutput, keep: int) -> dict[str, Any]:
        self.refuse_leaks()
        cache = self.model.new_cache(len(read), self.config.seed, memory=source)
        streams, _, _ = self.model.streams(read[:, 1:], cache.rng, Padding(), caches=cache.layers)
        cache.position = read.shape[1]
        logits = self.model.logits(tuple(x[:, -keep:] for x in streams))
        numbers = torch.arange(len(read), device=read.device)
        return {"logits": logits, "past_key_values": MegasparseCache([(numbers, cache)], cache.position)}


class MegasparseForMaskedLM(MegasparsePreTrainedModel):
    """An encoder: logits at position t predict the token that the mask hides there."""

    kinds = ("encoder",)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> MaskedLMOutput:
        """Predict the masked tokens. labels: (B, n), -100 for what does not count."""
        rows = AlignedRows(input_ids, attention_mask)
        targets = None
        if labels is not None:
            values = rows.align(labels)
            targets = Targets(values.masked_fill(values == IGNORED, 0), values != IGNORED)
        streams, auxiliary = self.run(rows, targets)
        logits, loss = self.model.logits(tuple(rows.restore(x) for x in streams)), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=self.objective(loss, auxiliary), logits=logits)


class MegasparseForSequenceClassification(MegasparsePreTrainedModel):
    """A label a sequence, by a linear layer over the normalised final streams: of an encoder their mean over real
    tokens, of a decoder those at its last real token.
    """

    def add_head(self) -> None:
        self.settings = self.settings.model_copy(update={"document_separator": None})  # a text, or a pair of them
        streams = 2 if self.settings.blocks == "reversible" else 1
        self.classifier = nn.Linear(streams * self.settings.d_model, self.config.num_labels or 2)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """Predict classes or numbers. labels: (B,) classes, or numbers to regress to where config.num_labels is 1."""
        rows = AlignedRows(input_ids, attention_mask)
        targets = None
        if labels is not None and predicts(self.settings, "pooled"):
            targets = Targets(labels, None)
        streams, auxiliary = self.run(rows, targets)
        hidden = torch.cat(streams, dim=-1)
        hidden = F.layer_norm(hidden, hidden.shape[-1:])
        lengths = torch.tensor(rows.lengths, device=hidden.device)
        if self.config.is_decoder:  # position p has read p tokens
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths]
        else:
            real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
            pooled = (hidden * real.unsqueeze(-1)).sum(1) / lengths[:, None].clamp_min(1)
        logits, loss = self.classifier(pooled.to(self.classifier.weight.dtype)).float(), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=self.objective(loss, auxiliary), logits=logits)
