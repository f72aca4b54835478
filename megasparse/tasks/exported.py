"""Fine-tuned classifiers and regressions, as Hugging Face models. B batch, n length of the input.

Any body can be exported: a megasparse model, or a transformers model, with its attention replaced or not.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from megasparse.config.finetuning import HeadConfig
from megasparse.hub.aligned_rows import AlignedRows
from megasparse.hub.replaced_layer import share_of_batch
from megasparse.ops.random import RngContext, drawn_step
from megasparse.tasks.batches import Inputs, Padded
from megasparse.tasks.form import TaskModel
from megasparse.tasks.start import body_of


class MegasparseTaskConfig(PretrainedConfig):
    """Configuration of an exported fine-tuned model. body: the record of a run's body (`tasks.start`). head: the
    section `head` of its configuration. seed: of the run, for hashes.
    """

    model_type = "megasparse_task"

    def __init__(
        self, body: dict[str, Any] | None = None, head: dict[str, Any] | None = None, seed: int = 0, **kwargs: Any
    ) -> None:
        self.body, self.head, self.seed = body or {}, head or {}, seed
        super().__init__(**kwargs)


class MegasparseTaskForSequenceClassification(PreTrainedModel):
    """Predicts a class, or a number if config.num_labels is 1, of a sequence or of a pair in one input."""

    config_class = MegasparseTaskConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: MegasparseTaskConfig):
        super().__init__(config)
        with torch.device("cpu"):  # not meta: replaced attention is checked with values
            head = HeadConfig.model_validate(config.head)
            self.task = TaskModel(body_of(config.body), config.num_labels or 1, head, False, config.seed)
        stored = self.state_dict().keys()
        self._constants = {name: x.clone() for name, x in self.named_buffers() if name not in stored}
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep the values of the constructor."""

    def initialize_weights(self) -> None:
        """Set the buffers that are not stored, which the loader leaves without values."""
        super().initialize_weights()
        for name, value in self._constants.items():
            self.get_buffer(name).copy_(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Predict classes or numbers. labels: (B,) classes, or numbers to regress on."""
        if input_ids.shape[1] > self.task.body.longest:
            longest = self.task.body.longest
            raise ValueError(f"{input_ids.shape[1]} tokens are more than the model's maximum of {longest}")
        rows = AlignedRows(input_ids, attention_mask, positions=kwargs.get("position_ids"))
        types = torch.zeros_like(input_ids) if token_type_ids is None else rows.align(token_type_ids)
        read = Padded(rows.tokens, types, torch.tensor(rows.lengths, device=input_ids.device))
        rng = RngContext.evaluation(self.config.seed, len(input_ids))
        if self.training:
            rng = RngContext(self.config.seed, drawn_step(), torch.arange(len(input_ids)), training=True)
        classes = labels if self.training and self.task.outputs > 1 else None
        logits, auxiliary = self.task.predicted(Inputs((read,), labels), rng, classes)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
            if self.training:
                share = share_of_batch(labels, kwargs.get("num_items_in_batch"))
                loss = self.task.body.task_weight * loss + auxiliary * share
        return SequenceClassifierOutput(loss=loss, logits=logits)
