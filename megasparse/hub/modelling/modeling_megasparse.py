"""megasparse models behind HuggingFace's interface: the same modules, the same names of parameters below `model.`.

B batch, n length of the input, V vocabulary.

HuggingFace's logits at position t tell token t + 1; a megasparse decoder's output at position t tells token t, the
first one from a learned start vector. So an input of n tokens is n + 1 positions, of which the last n are given back.
An empty input (B, 0) gives (B, 1, V), the first token's logits, so that text can be generated from nothing.

Padding may stand left or right (attention_mask): a sequence is computed as if it stood alone, from position 0 on.
In evaluation random hashes depend on the run's seed alone; in training they are drawn anew every forward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from megasparse.attention.contract import Targets
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.hub.modelling.configuration_megasparse import MegasparseConfig
from megasparse.model.build import initialise
from megasparse.model.decoder import Decoder, DecodingCache
from megasparse.model.encoder import Encoder
from megasparse.ops.random import EVALUATION_STEP, Draws

IGNORED = -100
"""A label that does not count, as everywhere in HuggingFace's."""


class Rows:
    """A batch with each row's real tokens moved to its beginning, and the way back."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None):
        """input_ids: (B, n). attention_mask: (B, n), 0 for padding, or None where there is none. Raises ValueError for
        a row of padding alone.
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
        self.tokens = input_ids.gather(1, self._order).masked_fill(~self.real, 0)

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
    """What generation keeps of a batch: a decoding cache for the rows of each length, since a decoding cache has one
    position for all of its rows.
    """

    is_compileable = False

    def __init__(self, groups: list[tuple[Tensor, DecodingCache]], length: int):
        """groups: the numbers of the rows, and their cache. length: columns of the input taken in."""
        self.groups, self.length = groups, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class MegasparsePreTrainedModel(PreTrainedModel):
    config_class = MegasparseConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = "text"
    supports_gradient_checkpointing = False
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: MegasparseConfig):
        super().__init__(config)
        self.settings: Any = ModelConfig.model_validate(config.model)
        self.model = Decoder(self.settings) if config.is_decoder else Encoder(self.settings)
        self.passes = 0
        """Forward passes in training so far: their draws depend on the number."""

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

    def run(self, rows: Rows, targets: Targets | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The final streams, (B, n, E) each in the rows' order, in a decoder (B, n + 1, E); and what the mechanisms
        want to be minimised beside the task.
        """
        self.check_length(rows.tokens.shape[1])
        draws = self.draws(len(rows.tokens))
        padding = Padding(key_mask=rows.key_mask(start=self.config.is_decoder))
        streams, auxiliary, _ = self.model.streams(rows.tokens, draws, padding, targets)
        return streams, auxiliary

    def draws(self, batch: int) -> Draws:
        if not self.training:
            return Draws.evaluation(self.config.seed, batch)
        self.passes += 1
        return Draws(self.config.seed, self.passes - 1, torch.arange(batch), training=True)

    def check_length(self, length: int) -> None:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens are more than the {longest} that this model takes")

    def objective(self, loss: Tensor, auxiliary: Tensor) -> Tensor:
        """What training minimises: in evaluation the task's loss alone."""
        return self.model.task_weight * loss + auxiliary if self.training else loss


class MegasparseModel(MegasparsePreTrainedModel):
    """The bare model: last_hidden_state is the final streams side by side, (B, n, E) or, reversible, (B, n, 2·E), fp32,
    before the output's norm.
    """

    def __init__(self, config: MegasparseConfig):
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        rows = Rows(input_ids, attention_mask)
        streams, _ = self.run(rows, None)
        hidden = torch.cat(streams, dim=-1)[:, int(self.config.is_decoder) :]
        return BaseModelOutput(last_hidden_state=rows.restore(hidden))


class MegasparseForCausalLM(MegasparsePreTrainedModel, GenerationMixin):
    """A decoder: logits at position t tell token t + 1."""

    _is_stateful = True  # a cache cannot be taken back by some tokens

    def __init__(self, config: MegasparseConfig):
        if not config.is_decoder:
            raise ValueError("this model is an encoder: load it with AutoModelForMaskedLM")
        super().__init__(config)
        self.post_init()

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
        """labels: (B, n), those of the input itself, -100 for what does not count; the first token's is not used (give
        it as -100 where padding stands left of it).
        past_key_values: of an earlier call; input_ids are then the tokens after it. logits_to_keep: only the last ones;
        0 keeps all.
        """
        if past_key_values is not None:
            return CausalLMOutputWithPast(
                logits=self._from_cache(input_ids, past_key_values), past_key_values=past_key_values
            )
        rows = Rows(input_ids, attention_mask)
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

    def _targets(self, rows: Rows, labels: Tensor) -> Targets:
        """Of the n + 1 positions: the first tells the first token, the last what comes after the input."""
        values = F.pad(rows.align(labels), (0, 1), value=IGNORED)
        values = values.index_fill(1, torch.zeros(1, dtype=torch.long, device=values.device), IGNORED)
        counted = values != IGNORED
        if rows.real is not None:
            counted = counted & F.pad(rows.real, (0, 1), value=False)
        return Targets(values.masked_fill(~counted, 0), counted)

    def _into_cache(self, rows: Rows, keep: int) -> CausalLMOutputWithPast:
        """All rows of a length go into a cache of their own; they are numbered as in the batch, on which draws may
        depend.
        """
        if leaks := self.model.leaks:
            raise ValueError(f"not strictly causal, so it has no cache ({'; '.join(leaks)}): give use_cache=False")
        self.check_length(rows.tokens.shape[1])
        groups, width = [], rows.tokens.shape[1]
        shape = (*rows.tokens.shape[:1], max(1, width))
        logits = torch.zeros(*shape, self.config.vocab_size, device=rows.tokens.device)
        for length in sorted(set(rows.lengths)):
            numbers = torch.tensor([row for row, own in enumerate(rows.lengths) if own == length])
            own = self.model.new_cache(len(numbers), self.config.seed)
            own.draws = Draws(self.config.seed, EVALUATION_STEP, numbers, training=False)
            numbers = numbers.to(rows.tokens.device)
            streams, _, _ = self.model.streams(rows.tokens[numbers, :length], own.draws, Padding(), caches=own.layers)
            own.position = length + 1
            told = self.model.logits(tuple(x[:, min(1, length) :] for x in streams))
            logits[numbers, : told.shape[1]] = told
            groups.append((numbers, own))
        logits = rows.restore(logits)[:, -keep:]
        cache: Any = MegasparseCache(groups, width)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _from_cache(self, input_ids: Tensor, cache: MegasparseCache) -> Tensor:
        self.check_length(max(own.position for _, own in cache.groups) - 1 + input_ids.shape[1])
        logits = torch.empty(*input_ids.shape, self.config.vocab_size, device=input_ids.device)
        for column in range(input_ids.shape[1]):
            for numbers, own in cache.groups:
                logits[numbers, column] = self.model.decode(input_ids[numbers, column], own)
        cache.length += input_ids.shape[1]
        return logits

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
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}
        return {**inputs, "use_cache": kwargs.get("use_cache"), "logits_to_keep": 1}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes the cache


class MegasparseForMaskedLM(MegasparsePreTrainedModel):
    """An encoder: logits at position t tell the token that the mask hides there."""

    def __init__(self, config: MegasparseConfig):
        if config.is_decoder:
            raise ValueError("this model is a decoder: load it with AutoModelForCausalLM")
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> MaskedLMOutput:
        """labels: (B, n), -100 for what does not count."""
        rows = Rows(input_ids, attention_mask)
        targets = None
        if labels is not None:
            values = rows.align(labels)
            targets = Targets(values.masked_fill(values == IGNORED, 0), values != IGNORED)
        streams, auxiliary = self.run(rows, targets)
        logits = self.model.logits(tuple(rows.restore(x) for x in streams))
        if labels is None:
            return MaskedLMOutput(logits=logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return MaskedLMOutput(loss=self.objective(loss, auxiliary), logits=logits)


class MegasparseForSequenceClassification(MegasparsePreTrainedModel):
    """A label a sequence, by a linear layer over the normalised final streams: of an encoder their mean over real
    tokens, of a decoder those at its last real token.
    """

    def __init__(self, config: MegasparseConfig):
        super().__init__(config)
        streams = 2 if self.settings.blocks == "reversible" else 1
        self.classifier = nn.Linear(streams * self.settings.d_model, config.num_labels or 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """labels: (B,) classes, or numbers to regress to where config.num_labels is 1."""
        rows = Rows(input_ids, attention_mask)
        targets = None
        if labels is not None and self.settings.attention.smart_bird.objective == "pooled":
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
        logits = self.classifier(pooled.to(self.classifier.weight.dtype)).float()
        if labels is None:
            return SequenceClassifierOutput(logits=logits)
        loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=self.objective(loss, auxiliary), logits=logits)
