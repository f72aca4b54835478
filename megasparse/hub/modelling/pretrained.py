"""The common part of all classes: the model of ours inside, its draws, its weights, and its cache. B batch, n length of
the input, E width, V vocabulary.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megasparse.attention.contract import Targets
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.hub.modelling.configuration_megasparse import MegasparseConfig
from megasparse.hub.modelling.rows import Rows
from megasparse.model.build import empty_model, initialise
from megasparse.model.decoder import DecodingCache
from megasparse.ops.random import RngContext

AUTO = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "encoder_decoder": "AutoModelForSeq2SeqLM",
}
"""Map of transformers' class of each kind of model that predicts tokens."""


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
        for numbers, own in self.groups:
            same = beam_idx.to(numbers.device).unsqueeze(1) == numbers
            found = same.any(1).nonzero().squeeze(1)
            if len(found):
                own.select(same[found].to(torch.int8).argmax(1))
                groups.append((found, own))
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
            raise ValueError(f"this model is of kind {kind}: load it with {AUTO[kind]}")
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

    def run(self, rows: Rows, targets: Targets | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The final streams, (B, n, E) in the rows' order, in a decoder (B, n + 1, E); and the auxiliary losses."""
        self.check_length(rows.tokens.shape[1])
        rng = self.rng(len(rows.tokens))
        padding = Padding(key_mask=rows.key_mask(start=self.config.is_decoder))
        streams, auxiliary, _ = self.model.streams(rows.tokens, rng, padding, targets)
        return streams, auxiliary

    def rng(self, batch: int) -> RngContext:
        if not self.training:
            return RngContext.evaluation(self.config.seed, batch)
        self.passes += 1
        return RngContext(self.config.seed, self.passes - 1, torch.arange(batch), training=True)

    def check_length(self, length: int) -> None:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"{length} tokens are more than the {longest} that this model takes")

    def objective(self, loss: Tensor, auxiliary: Tensor) -> Tensor:
        """The loss that training minimises: in evaluation the task's alone."""
        return self.model.task_weight * loss + auxiliary if self.training else loss

    def refuse_leaks(self) -> None:
        """Raise ValueError where a cache cannot give what whole sequences do."""
        if leaks := self.model.leaks:
            raise ValueError(f"not strictly causal, so it has no cache ({'; '.join(leaks)}): give use_cache=False")

    def from_cache(self, input_ids: Tensor, cache: MegasparseCache) -> Tensor:
        """Takes more tokens (B, n) into the cache. Returns the logits (B, n, V) of the token after each."""
        taken = max(own.position for _, own in cache.groups) - self.config.is_decoder
        self.check_length(taken + input_ids.shape[1])
        logits = torch.empty(*input_ids.shape, self.config.vocab_size, device=input_ids.device)
        for column in range(input_ids.shape[1]):
            for numbers, own in cache.groups:
                logits[numbers, column] = self.model.decode(input_ids[numbers, column], own)
        cache.length += input_ids.shape[1]
        return logits

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes the cache
