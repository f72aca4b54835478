"""The schema of a fine-tuning run's JSON file: initial weights, task, head and training."""

from typing import Annotated, Literal

from pydantic import Field

from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import LoRAConfig, ModelConfig, OptimizerConfig, RunSettings, TrainingConfig
from megasparse.config.section import JSON_LIST, Count, Location, Positive, Rate, Section


class StartConfig(Section):
    """The pretrained model: `checkpoint` or `huggingface`; neither trains `model` from its initial weights."""

    checkpoint: Location | None = None
    """A run's folder, or one of its checkpoints."""
    huggingface: Location | None = None
    """A folder with config.json, model.safetensors and tokenizer.json. Reformers, YOSOs and exports of megasparse
    convert to-hf become megasparse models; other encoders and decoders run in transformers.
    """
    attention: AttentionConfig | None = None
    """Attention that replaces the self-attention of a BERT, RoBERTa, XLM-RoBERTa or DistilBERT, or `model.attention` of
    a megasparse model with the same weights (such as YOSO's expectation, or other hash rounds). null: no change."""
    glove: Location | None = None
    """With `model` only: a GloVe text file to initialise token embeddings from (with the principal components if its
    vectors are wider than model.d_model), and Smart Bird's sketches from the principal components.
    """
    activations: Literal["stored", "checkpoint", "checkpoint_cpu"] | None = None
    """As `model.activations`; null keeps a checkpoint's value, and is `stored` for Hugging Face models."""
    sha256: str | None = None
    """SHA-256 of the file of weights, written into the run's configuration. Any other file is an error."""


class GenerationConfig(Section):
    """Generation of answers by an encoder–decoder, in tasks with text answers."""

    target_length: Positive = 128
    """Tokens per answer, with the end token. `too_long` applies to longer answers in training."""
    beams: Positive = 4
    """Beam width."""


class RecommendationConfig(Section):
    """NRMS (Wu et al. 2019): the model of `start` encodes news, attention over clicked news encodes users."""

    user: Literal["attention", "matching"] = "attention"
    """`matching`: FIM (Wang et al. 2020) instead, which matches candidates with clicked news word by word."""

    history: Positive = 50
    """Number of most recently clicked news per user."""
    attention: AttentionConfig = Field(default_factory=lambda: AttentionConfig(pattern=["full"]))
    """Attention over a user's clicked news."""
    heads: Positive = 8
    """Number of heads of this attention."""


class ForecastConfig(Section):
    """An encoder reads the last `task.max_length` rows of a table, and a decoder predicts the next rows in one forward
    pass (Zhou et al. 2020)."""

    horizon: Positive = 24
    """Rows to predict."""
    overlap: Positive = 48
    """Last input rows that the decoder reads too, before the rows to predict."""
    date: str = "date"
    """Column of the date and time."""
    inputs: list[str] | None = None
    """Input columns; null uses every column except the date, and the run's configuration lists them."""
    targets: list[str] | None = None
    """Columns to predict; null uses the input columns."""
    relative: bool = False
    """Subtract the last input row from inputs and predictions (Zeng et al. 2023), for series whose level drifts after
    training. The papers' models do not.
    """
    mean: dict[str, float] | None = None
    """Mean of each column's training rows. Written into the run's configuration, as are `scale` and `step`."""
    scale: dict[str, Annotated[float, Field(gt=0.0)]] | None = None
    """Standard deviation of each column's training rows; 1 for constant columns."""
    step: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds between rows."""


class TaskConfig(Section):
    name: str = "table"
    """Name of a task in megasparse/tasks/catalog.py; `table` is your own CSV or JSONL file."""
    source: Location = "data/task"
    """Folder of the task's official files; for `table` the file to train on."""
    validation: Location | None = None
    """Validation file or folder, in the same form. null: the official one, or else a part of the training examples."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Fraction of the training examples to hold out, chosen by `run.seed`, if no validation files exist."""
    max_length: Positive = 512
    """Most tokens per input, including special tokens; see `too_long`."""
    too_long: Literal["cut", "refuse"] = "cut"
    """Inputs of more than `max_length` tokens: truncate and report their number, or stop at the first."""
    empty: Literal["refuse", "keep"] = "refuse"
    """Inputs without tokens: stop at the first, or keep them and report their number."""
    limit: Count = 0
    """Number of training examples, chosen by `run.seed`; 0 uses all."""
    text: list[str] = Field(default=["text"], min_length=1, max_length=2)
    """`table`: the column of the texts, or the two columns of pairs. `text_table`: the column of the texts.
    `parallel_text`, `wmt14`: the suffix of the source files, such as ["en"]."""
    label: str = "label"
    """`table`: the column of the labels. `text_table`: the column of the answers. `parallel_text`, `wmt14`: the suffix
    of the target files, such as "de"."""
    labels: list[str] | None = None
    """`table` only: the classes in order; null uses the sorted labels of the training file. [] predicts numbers."""
    tokenizer: Location = "bytes"
    """Tokenizer of a `model` without pretrained weights, as `data.tokenizer`."""
    generation: GenerationConfig = GenerationConfig()
    recommendation: RecommendationConfig = Field(default_factory=RecommendationConfig)
    forecast: ForecastConfig = ForecastConfig()


class HeadConfig(Section):
    pooling: Literal["pooler", "first", "mean", "last"] | None = None
    """Input of the head: final state of the first token, mean over non-padding tokens, or state of the last token.
    `pooler`: first token through a dense layer initialised from the pretrained pooler. null: `pooler` if the model
    provides a trained one, else `mean` for encoders and `last` for decoders.
    """
    hidden: Count = 0
    """Width of the dense layer (tanh) before the output layer; 0 uses the model's width, as in BERT."""
    dropout: Rate = 0.1
    """Dropout rate before the dense layer (not before a pooler) and before the output layer."""


class FinetuneTrainingConfig(TrainingConfig):
    epochs: Annotated[float, Field(ge=0.0)] = 3.0
    """Passes over the training examples, which set `training.steps`; 0 keeps `training.steps`."""
    global_batch: Positive = 32
    """Examples per step over all ranks."""
    micro_batch: Positive = 8
    """Examples per rank and forward pass; gradients are accumulated over the rest of the rank's batch."""
    batch_unit: Literal["examples", "tokens"] = "examples"
    """Unit of `global_batch` and `micro_batch`. `tokens`: tokens of inputs and answers, padding included; a batch
    contains as many examples of similar length as fit.
    """


class FinetuneOptimizerConfig(OptimizerConfig):
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    betas: Annotated[tuple[Rate, Rate], JSON_LIST] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "linear"
    final_fraction: Rate = 0.0
    warmup_fraction: Rate = 0.1
    """Fraction of all steps used for warm-up, which sets `warmup_steps`; 0 keeps `warmup_steps`."""


class FinetuneEvaluationConfig(Section):
    every: Count = 0
    """Steps between validations; 0 validates after each epoch. The last step is always validated."""
    metric: str | None = None
    """Metric that selects the best checkpoint; null uses the task's first metric."""
    patience: Count = 0
    """Stop after this many validations in a row without improvement; 0 disables it."""
    batch: Positive = 8
    """Examples per forward pass."""


class FinetuneConfig(RunSettings):
    start: StartConfig = StartConfig()
    model: ModelConfig | None = None
    """A model to train without pretrained weights; null if `start` names one."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    head: HeadConfig = HeadConfig()
    lora: LoRAConfig | None = None
    """Low-rank adapters (LoRA); null trains all weights."""
    training: FinetuneTrainingConfig = FinetuneTrainingConfig()
    optimizer: FinetuneOptimizerConfig = FinetuneOptimizerConfig()
    evaluation: FinetuneEvaluationConfig = FinetuneEvaluationConfig()
