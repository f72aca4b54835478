"""The typed schema of a run's JSON file. Every default of the project lives here and nowhere else."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.section import JSON_LIST, Count, Location, Positive, Rate, Section
from megasparse.files import UNSCORED


class RunConfig(Section):
    directory: Location = "runs/default"
    """Folder of everything the run writes."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Every random draw of the run (weights, order of the data, dropout, rotations) is a function of it."""
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    """`deepspeed`: ZeRO on any number of ranks. `torch`: the same loop on plain torch in one process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` selects a GPU if one is available."""
    hang_timeout: Annotated[float, Field(ge=0.0)] = 120.0
    """Abort and name the rank if a rank makes no progress for this many seconds; 0 disables the watchdog. The limit is
    ten times as long until the first step is done, and at least four times the longest step.
    """
    deterministic: bool = False
    """Use only deterministic GPU kernels, so that resumed runs are bit-identical. CPU runs always are."""
    cuda_graph: bool = False
    """Torch engine, decoders without documents: launch a micro-batch's forward and backward as one CUDA graph, which
    saves host time; losses are the same. Shown on CPUs only, not yet on GPUs.
    """


class RotaryScalingConfig(Section):
    """Scaling of rotary frequencies to sequences longer than the model was trained on, see ops/positions.py."""

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    """Formula of the scaling, as in transformers."""
    factor: Annotated[float, Field(ge=1.0)]
    """Ratio of the longest length to the original training length."""
    original_length: Positive | None = None
    """yarn and llama3 only, required: sequence length of the original training."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """yarn only: factor of queries and keys; null uses 0.1·ln(factor) + 1."""


class PositionsConfig(Section):
    kind: Literal["axial", "sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    """Position encoding. All kinds except `rotary` are added to the token embeddings."""
    axial_shape: list[Positive] | None = None
    """Axial only: the grid of positions; its product is the longest length, e.g. [128, 512] for 65,536."""
    axial_dims: list[Positive] | None = None
    """Axial only: the width of each axis' embedding, in sum `model.d_model`."""
    offset: Count = 0
    """Learned only: unused rows of the table before the first position (2 in Hugging Face's YOSO)."""
    base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Rotary only: base of the frequencies base^(−2i/D), Hugging Face's rope_theta."""
    scaling: RotaryScalingConfig | None = None
    """Rotary only: scaling to sequences longer than in the original training."""


class MaskingConfig(Section):
    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Fraction of tokens that are masked and predicted (Devlin et al. 2018)."""
    token: Count = 256
    """Id of the mask token, which never occurs in text (256 for bytes)."""
    whole_words: bool = False
    """Mask all tokens of a word together, as the tokenizer marks words."""


class NgramsConfig(Section):
    """Embeddings of the last n tokens, added to the token embedding: a table per length, hashed and initially 0."""

    lengths: list[Positive] = Field(default=[2, 3, 4, 5], min_length=1)
    """n of each table. A decoder's position has read the tokens before it, an encoder's also its own token. Missing
    tokens (before the start, padding, of other documents) are part of the n-gram.
    """
    rows: Positive = 16384
    """Rows of each table; different n-grams may share one."""
    width: Positive | None = None
    """Width of each table, projected to d_model if it differs; null uses d_model."""


class SentenceOrderConfig(Section):
    """Sequences are [class] A [separator] B [separator] and padding; `megasparse prepare-data pairs` writes them."""

    separator: Count
    """Id of the separator, the last token of A and of B."""


class SourceConfig(Section):
    """The encoder of an encoder–decoder. Other settings are shared with the decoder."""

    length: Positive = 512
    """Tokens at the start of each sequence that the encoder reads; the decoder predicts the rest."""
    layers: Positive | None = None
    """Layers of the encoder; null uses `model.layers`."""
    positions: PositionsConfig = PositionsConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    """Self-attention of the encoder; `model.attention` configures the decoder."""
    shared_embedding: bool = True
    """Share one token embedding table between encoder and decoder."""


FeedForwardKind = Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
GATED = ("swiglu", "geglu", "geglu_tanh")


class ModelConfig(Section):
    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """`decoder`: causal language model. `encoder`: bidirectional, predicts masked tokens. `encoder_decoder`: an encoder
    reads the start of each sequence, and a decoder predicts the rest with cross-attention.
    """
    style: Literal["reformer", "bert"] = "reformer"
    """`reformer`: pre-norm, projections without biases, ReLU. `bert`, for encoders of ordinary blocks: post-norm, a
    normalised embedding, biases, GELU, a dense layer before the output projection."""
    vocabulary: Positive = 256
    """Number of token ids: 256 for bytes, 257 in an encoder (with the mask token)."""
    max_length: Positive = 65536
    """Longest sequence in tokens (encoder–decoders: longest target), for position tables and the number of buckets."""
    layers: Positive = 12
    """Number of layers."""
    d_model: Positive = 1024
    """Width of the residual stream."""
    d_ff: Positive = 4096
    """Inner width of the feed-forward."""
    heads: Positive = 8
    """Number of attention heads per layer."""
    head_dim: Positive | None = None
    """Width of a head; null uses d_model/heads."""
    key_heads: Positive | None = None
    """Number of key and value heads in self-attention, each shared by heads/key_heads neighbouring query heads (Ainslie
    et al. 2023); null uses `heads`.
    """
    attention_biases: Literal["none", "qkv", "all"] | None = None
    """Self-attention projections with biases: none, query, key and value (`qkv`), or also the output (`all`). null is
    `none`, or `all` with `style` bert.
    """
    query_key_norm: bool = False
    """Normalise queries and keys per head, with one weight for all heads, before rotary positions."""
    feed_forward: FeedForwardKind | None = None
    """Activation of the feed-forward; null is relu, or gelu with `style` bert. swiglu, geglu and geglu_tanh are gated
    (Shazeer 2020): silu, gelu or gelu_tanh of one product times another.
    """
    feed_forward_biases: bool = True
    """Biases in both products of the feed-forward."""
    blocks: Literal["reversible", "ordinary"] = "reversible"
    """Reversible residual blocks on two streams (Reformer Eq. 7), or ordinary residual blocks on one stream."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the residual streams and their gradients; additions run in fp32 and are rounded to it. bf16 halves the
    stored streams of a reversible stack, and rounds each stream to 8 bits in every layer (docs/lab/streams.md).
    """
    activations: Literal["reversible", "stored", "checkpoint", "checkpoint_cpu"] = "reversible"
    """Activations for the backward: recomputed from the output (reversible blocks only), stored, or recomputed from
    each layer's stored input (ordinary blocks only; `checkpoint_cpu` stores the inputs in CPU memory). With
    `feed_forward_tiles`, decoders recompute layers of full, local and sketched attention tile by tile.
    """
    checkpoint_layers: Positive = 1
    """Layers recomputed together from the input of the first, the only one stored. More need less memory for inputs,
    and run the forward of each group, except its last layer, once more.
    """
    dropout: Rate = 0.0
    """Dropout rate after the embedding, after each attention, and inside (not with `style` bert) and after each
    feed-forward."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    """Added to the variance in every normalisation (1e-12 in BERT)."""
    norm: Literal["layer", "rms"] = "layer"
    """`layer`: layer normalisation. `rms`: RMS normalisation without a bias (Zhang and Sennrich 2019)."""
    feed_forward_tiles: Positive = 1
    """Pieces of the sequence that the feed-forward processes one after another, backward included."""
    loss_tiles: Positive = 1
    """Pieces of the sequence whose logits are computed one after another, backward included."""
    score_from: Count = 0
    """Positions before this one are excluded from the loss and from bits/dim."""
    padding_token: Count | None = None
    """Id of padding, which is masked in attention and excluded from the loss. null: no padding."""
    document_separator: Count | None = None
    """Id of the token after each document; tokens attend only within their document. null: one document per sequence. A
    run on conversations sets it to the marked token between them.
    """
    label_smoothing: Rate = 0.0
    """Fraction of each target's probability spread over all ids (Szegedy et al. 2016), not in reported nats."""
    adaptive_cutoffs: list[Positive] = Field(default=[])
    """Adaptive softmax (Grave et al. 2017) for large vocabularies sorted by frequency: first id of each cluster of
    rarer ids, ascending, e.g. [20000, 40000, 200000]. Empty: an ordinary softmax.
    """
    tied_embeddings: bool = False
    """Use the token embedding as the output projection."""
    embedding_twice: bool = False
    """Encoder–decoders of reversible blocks: both streams contain the embedding, as in Reformer's paper. false: one of
    them, so that their sum is the embedding plus all branches, which trains faster.
    """
    output_bias: bool = False
    """Add a bias to the output projection; always on with `style` bert."""
    logit_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of the logits, before the bias. null is 1, or d_model^−½ with tied embeddings (not with `style` bert)."""
    start_token: Count | None = None
    """Decoders only: token that precedes each sequence. null: a learned vector."""
    token_types: Count = 0
    """Number of token types with an embedding (2 in BERT). Every token has type 0; with `sentence_order`, tokens after
    the first separator have type 1.
    """
    positions: PositionsConfig = PositionsConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    ngrams: NgramsConfig | None = None
    """Hashed n-gram embeddings; each stack of an encoder–decoder learns its own. null: none."""
    masking: MaskingConfig = MaskingConfig()
    """Encoders only."""
    sentence_order: SentenceOrderConfig | None = None
    """Encoders only: also predict if two segments are in document order (Lan et al. 2020)."""
    source: SourceConfig | None = None
    """Encoder–decoders only, required."""

    @property
    def separator_id(self) -> int | None:
        """Id of `document_separator`, without the mark that it has between conversations."""
        return None if self.document_separator is None else self.document_separator % UNSCORED

    @property
    def marked(self) -> bool:
        """True if tokens carry marks (`files.UNSCORED`), as conversations do."""
        return self.document_separator != self.separator_id

    @property
    def end_token(self) -> int | None:
        """Id of `document_separator` if the model learns to end a text with it, unlike that between conversations."""
        return None if self.marked else self.document_separator


class DataConfig(Section):
    path: Location = "data/enwik8"
    """Folder of shards, written by megasparse prepare-data; or its URL: https://, s3://, ..."""
    cache: Location | None = None
    """Local folder for shards fetched from URLs, shared by all ranks and runs of a machine; null is megasparse/shards
    in the user's cache (XDG_CACHE_HOME, or ~/.cache).
    """
    cache_gb: Annotated[float, Field(gt=0.0)] = 50.0
    """Limit of the cache, 10^9 bytes. The least recently used shards are deleted first."""
    mixture: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default={})
    """Train on several folders instead: folder -> sampling weight. Evaluation uses `path`."""
    sequence_length: Positive = 65536
    """Tokens per training sequence."""
    shuffle_shards: Positive = 16
    """Sequences are shuffled within groups of this many shuffled shards."""
    tokenizer: Location = "bytes"
    """`bytes`, `pixels`, or a tokenizer's file: *.model (sentencepiece), *.json (Hugging Face), *.txt (words)."""


class TrainingConfig(Section):
    steps: Positive = 20000
    """Optimizer steps of the whole run."""
    global_batch: Positive = 8
    """Sequences per step over all ranks; losses do not depend on the number of ranks."""
    micro_batch: Positive = 1
    """Sequences per rank and forward pass; gradients are accumulated over the rest of the rank's batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the computation inside branches. Norms, softmax statistics and master weights are always fp32; see
    `model.residual_dtype` for the residual streams.
    """
    gradient_clipping: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest L2 norm of the gradient; 0 disables clipping."""


class OptimizerConfig(Section):
    name: str = "adamw"
    """"adamw", "adafactor" or "muon" (matrices of attention and feed-forward by Muon, all other weights by AdamW,
    n-gram tables without its momentum, so that only rows in use change).
    """
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-4
    """Peak learning rate, after the warm-up."""
    betas: Annotated[tuple[Rate, Rate], JSON_LIST] = (0.9, 0.98)
    """AdamW only, also for the weights that Muon leaves to AdamW."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW only, as `betas`."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay, times the learning rate, of all weights with two dimensions or more."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    """Learning rate after the warm-up. "wsd" stays at the peak and decays linearly at the end, so that one run serves
    several budgets: resume a checkpoint of the stable part with another run.directory and fewer training.steps.
    """
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    final_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Cosine, linear and wsd: learning rate of the last step as a fraction of `learning_rate`."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """wsd: fraction of `training.steps`, at the end, over which the learning rate decays."""


class EvaluationConfig(Section):
    every: Count = 1000
    """Steps between evaluations; 0 disables them."""
    sequences: Positive = 8
    """Held-out windows per evaluation during training, from the start of the split."""
    sequence_length: Positive | None = None
    """Window length in evaluation during training, `evaluate` and `compress`; null means `data.sequence_length`. Longer
    windows give more context. Needs positions without a trained table. `plan` does not count their memory.
    """
    sample_tokens: Count = 0
    """Tokens of the sample written to TensorBoard at each evaluation; 0 disables it."""


class CheckpointConfig(Section):
    every: Count = 500
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    asynchronous: bool = False
    """Copy the state to CPU memory and write it while training continues."""
    on_failure: Literal["stop", "continue"] = "stop"
    """If a checkpoint cannot be written or uploaded: stop with exit code 3, or report it and continue."""
    bucket: Location | None = None
    """URL (s3://, gs://, az:// or file://) of a location for this run only, to which each checkpoint is uploaded in the
    background. A run resumes from it if the checkpoints in `run.directory` are older or missing.
    """


class LoggingConfig(Section):
    every: Positive = 1
    """Steps between updates of TensorBoard and the progress bar; without a terminal, a line is printed every 10 s.
    metrics.jsonl contains every step.
    """
    sink: Literal["wandb", "mlflow"] | None = None
    """Additional destination of scalars, texts and pictures: Weights & Biases or MLflow, configured by environment
    variables (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI).
    """
    attention_quality_every: Count = 0
    """Steps between comparisons of each attention with full attention on a held-out window; 0 disables them."""


class LoRAConfig(Section):
    """Low-rank adapters on linear layers (Hu et al. 2021), with peft; the pretrained weights are frozen."""

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """Adapters are scaled by alpha/rank, or alpha/√rank with `rslora`."""
    rslora: bool = False
    """Scale by alpha/√rank (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Learn the norm of every row of the sum W + α/r·B·A, too (DoRA, Liu et al. 2024)."""
    quantized: Literal["nf4", "int8"] | None = None
    """Store the frozen matrices of the layers in 4 bits (NF4, double quantisation) or 8 bits (a scale per row), with
    bitsandbytes; they are dequantised to compute. Only `pretrain` supports it.
    """
    dropout: Rate = 0.0
    """Dropout rate of the input of the adapters."""
    targets: list[str] = Field(default=["query", "value"], min_length=1)
    """Last parts of the names of the linear layers, such as query, key, value and output."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class ParallelConfig(Section):
    sequence: Positive = 1
    """Number of ranks that split each sequence. Must divide `data.sequence_length`, `model.source.length` and the
    number of ranks.
    """


class RunSettings(Section):
    """Sections shared by pretraining and fine-tuning."""

    run: RunConfig = RunConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    deepspeed: dict[str, Any] = Field(default={})
    """DeepSpeed's settings (zero_optimization, ...), checked key by key and passed on unchanged."""

    @property
    def zero(self) -> dict[str, Any]:
        """The settings of ZeRO; empty on plain torch."""
        return self.deepspeed.get("zero_optimization", {}) if self.run.engine == "deepspeed" else {}


class Config(RunSettings):
    """The configuration of a pretraining run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoRAConfig | None = None
    """Low-rank adapters on the initial weights (--start); null trains all weights."""

    @property
    def evaluation_length(self) -> int:
        """Window length in evaluation and compression, tokens."""
        return self.evaluation.sequence_length or self.data.sequence_length


def encoder_part(model: ModelConfig) -> ModelConfig:
    """Return the configuration of an encoder–decoder's encoder, which reads the source."""
    source = model.source
    assert source is not None
    changes = {
        "kind": "encoder",
        "source": None,
        "max_length": source.length,
        "layers": source.layers or model.layers,
        "positions": source.positions,
        "attention": source.attention,
    }
    return model.changed(**changes)


def decoder_part(model: ModelConfig) -> ModelConfig:
    """Return the configuration of an encoder–decoder's decoder without cross-attention."""
    return model.changed(kind="decoder", source=None)


def heads_of_layer(model: ModelConfig, layer: int) -> dict[str, int]:
    """Return mechanism -> number of heads for a layer, the first heads first.

    They are in registration order, because checkpoints sort the keys of a JSON object.
    """
    entry = model.attention.pattern[layer % len(model.attention.pattern)]
    if isinstance(entry, str):
        return {entry: model.heads}
    return {kind: entry[kind] for kind in MECHANISMS if kind in entry}


def layers_with(model: ModelConfig, kind: str) -> int:
    """Return the number of layers with heads of this kind."""
    return sum(kind in heads_of_layer(model, layer) for layer in range(model.layers))


def kinds(model: ModelConfig) -> list[str]:
    """Return the mechanisms of a model without duplicates, in the order of their first layers."""
    layers = range(min(model.layers, len(model.attention.pattern)))
    return list(dict.fromkeys(kind for layer in layers for kind in heads_of_layer(model, layer)))


def evaluation_rounds(model: ModelConfig) -> dict[str, int]:
    """Return mechanism -> hash rounds (YOSO: hashes) in evaluation, for mechanisms of the model that hash."""
    rounds = {kind: getattr(model.attention, kind).hash_rounds(training=False) for kind in kinds(model)}
    return {kind: number for kind, number in rounds.items() if number is not None}


def predicts(model: ModelConfig, target: str) -> bool:
    """Return True if a mechanism of the model learns to predict this target, see `MechanismSection.predicts`."""
    return any(getattr(model.attention, kind).predicts == target for kind in kinds(model))
