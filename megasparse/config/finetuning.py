"""The schema of a fine-tuning run's JSON file: what is trained, from where, on which task."""

from typing import Annotated, Literal

from pydantic import Field

from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import LoRAConfig, ModelConfig, OptimizerConfig, RunSettings, TrainingConfig
from megasparse.config.section import JSON_LIST, Count, Positive, Rate, Section


class StartConfig(Section):
    """The pretrained model: `checkpoint` or `huggingface`; neither trains `model` from its initial weights."""

    checkpoint: str | None = None
    """A run's folder, or one of its checkpoints."""
    huggingface: str | None = None
    """A folder with config.json, model.safetensors and tokenizer.json. A Reformer, a YOSO, or what
    megasparse convert to-hf wrote becomes a model of ours; any other encoder or decoder stays what it is."""
    attention: AttentionConfig | None = None
    """Replaces the self-attention of a BERT, RoBERTa, XLM-RoBERTa or DistilBERT; in a model of ours it stands in place
    of `model.attention`, with the same weights (YOSO's expectation in place of samples, another number of rounds).
    null keeps what there is."""
    glove: str | None = None
    """With `model` only: a GloVe text file, whose vectors of the tokenizer's words the token embeddings start from (of
    more numbers than model.d_model their principal components), and Smart Bird's sketches from their components."""
    activations: Literal["stored", "checkpoint", "checkpoint_cpu"] | None = None
    """What the backward reads, as `model.activations` has it; null keeps a checkpoint's own, and stores all of a
    HuggingFace model's."""
    sha256: str | None = None
    """Checksum of the file with its weights, written into the run's configuration. Where it is given, any other file is
    refused."""


class GenerationConfig(Section):
    """Generation of an encoder–decoder's answers, in tasks whose answers are texts."""

    target_length: Positive = 128
    """Tokens of an answer, its end included. In training longer ones are cut or refused as inputs are (`too_long`)."""
    beams: Positive = 4
    """Width of the beam search."""


class RecommendationConfig(Section):
    """NRMS (Wu et al. 2019): news read by the model of `start`, users by attention over the news they clicked."""

    history: Positive = 50
    """Clicked news that a user is known by, the latest ones."""
    attention: AttentionConfig = Field(default_factory=lambda: AttentionConfig(pattern=["full"]))
    """Attention over a user's clicked news."""
    heads: Positive = 8
    """Heads of that attention."""


class ForecastConfig(Section):
    """An encoder reads the last `task.max_length` rows of a table, a decoder predicts the next ones at once (Zhou et
    al. 2020)."""

    horizon: Positive = 24
    """Rows to predict."""
    overlap: Positive = 48
    """Last rows read that the decoder sees too, before those it predicts."""
    date: str = "date"
    """Column of the date and time."""
    inputs: list[str] | None = None
    """Columns that are read; null takes all but the date, and is written out in the run's configuration."""
    targets: list[str] | None = None
    """Columns that are predicted; null takes those that are read."""
    relative: bool = False
    """Rows are read and predicted as differences from the last row read (NLinear's normalisation, Zeng et al. 2023): a
    series wanders away from the level that it had in training. The papers' models do without."""
    mean: dict[str, float] | None = None
    """Mean of each column's training rows, subtracted from what is read and added to what is predicted. Written into
    the run's configuration, as are `scale` and `step`."""
    scale: dict[str, Annotated[float, Field(gt=0.0)]] | None = None
    """The standard deviation of each column's training rows, 1 of a constant."""
    step: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds from a row to the next."""


class TaskConfig(Section):
    name: str = "table"
    """A name of megasparse/tasks/catalog.py; `table` is a CSV or JSONL file of one's own."""
    source: str = "data/task"
    """Folder of the task's official files; of `table` the file to train on."""
    validation: str | None = None
    """A file or folder of the same form to validate on. null: the official one, else a part of the training
    examples."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The part of the training examples, chosen by `run.seed`, that is held out where there is no other validation."""
    max_length: Positive = 512
    """Tokens of an input, special ones included. What is longer is cut, or refused (`too_long`)."""
    too_long: Literal["cut", "refuse"] = "cut"
    """Inputs of more than `max_length` tokens: keep their beginning and report how many, or stop at the first."""
    empty: Literal["refuse", "keep"] = "refuse"
    """Inputs without any token: stop at the first, or keep them and report how many there are."""
    limit: Count = 0
    """Train on so many examples only, chosen by `run.seed`; 0 takes all."""
    text: list[str] = Field(default=["text"], min_length=1, max_length=2)
    """`table`: the column of the texts, or the two columns of pairs. `text_table`: the column of the texts.
    `parallel_text`, `wmt14`: the suffix of the source's files, such as ["en"]."""
    label: str = "label"
    """`table`: the column of the labels. `text_table`: that of the answers. `parallel_text`, `wmt14`: the suffix of the
    target's files, such as "de"."""
    labels: list[str] | None = None
    """`table` only: the classes in their order; null takes those of the training file, sorted. [] predicts numbers."""
    tokenizer: str = "bytes"
    """The tokenizer of a `model` that is trained from its initial weights, as `data.tokenizer`. Others have their
    own."""
    generation: GenerationConfig = GenerationConfig()
    recommendation: RecommendationConfig = Field(default_factory=RecommendationConfig)
    forecast: ForecastConfig = ForecastConfig()


class HeadConfig(Section):
    pooling: Literal["pooler", "first", "mean", "last"] | None = None
    """What of a sequence the head reads: its first token's final state, the mean over real tokens, or the last one's.
    `pooler`: the first one's, by a dense layer that begins as the pretrained model's own, as in transformers' BERT.
    null: the pooler where the model has one that was trained, else an encoder's mean, a decoder's last."""
    hidden: Count = 0
    """Width of the dense layer (tanh) before the last one; 0 takes the model's, as BERT has it."""
    dropout: Rate = 0.1
    """Dropout before the dense layer (not before a pooler), and before the last one."""


class FinetuneTrainingConfig(TrainingConfig):
    epochs: Annotated[float, Field(ge=0.0)] = 3.0
    """Passes over the training examples, which decide `training.steps`; 0 takes `training.steps` as it is."""
    global_batch: Positive = 32
    """Examples a step, over all ranks."""
    micro_batch: Positive = 8
    """Examples a rank takes at once; the rest of its share is accumulated."""
    batch_unit: Literal["examples", "tokens"] = "examples"
    """What `global_batch` and `micro_batch` count. `tokens`: of texts and their answers, padding included; a batch has
    as many examples of like length as fit."""


class FinetuneOptimizerConfig(OptimizerConfig):
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    """Peak learning rate, after the warm-up."""
    betas: Annotated[tuple[Rate, Rate], JSON_LIST] = (0.9, 0.999)
    """AdamW only."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay, times the learning rate, of all weights with two dimensions or more."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "linear"
    """Learning rate after the warm-up."""
    final_fraction: Rate = 0.0
    """Cosine and linear: the last step's learning rate as a part of `learning_rate`."""
    warmup_fraction: Rate = 0.1
    """The part of all steps that is warm-up, which decides `warmup_steps`; 0 takes `warmup_steps` as it is."""


class FinetuneEvaluationConfig(Section):
    every: Count = 0
    """Steps between validations; 0 validates after each epoch. The last step is always one."""
    metric: str | None = None
    """The metric whose best checkpoint is kept; null takes the task's first."""
    patience: Count = 0
    """Validations in a row without a better one after which training ends; 0 never ends it early."""
    batch: Positive = 8
    """Examples scored at once."""


class FinetuneConfig(RunSettings):
    start: StartConfig = StartConfig()
    model: ModelConfig | None = None
    """A model to train from its initial weights; null where `start` names one."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    head: HeadConfig = HeadConfig()
    lora: LoRAConfig | None = None
    """Low-rank adapters (LoRA); null trains all weights."""
    training: FinetuneTrainingConfig = FinetuneTrainingConfig()
    optimizer: FinetuneOptimizerConfig = FinetuneOptimizerConfig()
    evaluation: FinetuneEvaluationConfig = FinetuneEvaluationConfig()
