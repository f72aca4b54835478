"""The typed schema of a run's JSON file. Every default of the project lives here and nowhere else."""

import importlib
from typing import Annotated, Any, Literal

from pydantic import Field

from megasparse.config.attention import AttentionConfig
from megasparse.config.section import JSON_LIST, Count, Positive, Rate, Section

importlib.import_module("megasparse.attention")  # registers the mechanisms of the package; their files import `config`


class RunConfig(Section):
    directory: str = "runs/default"
    """Folder of everything the run writes: config.json, metrics.jsonl, tensorboard/, checkpoints/."""
    seed: Count = 0
    """Every random draw of the run (weights, order of the data, dropout, rotations) is a function of this number."""
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    """`deepspeed`: ZeRO on any number of ranks. `torch`: the same loop on plain torch in one process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    hang_timeout: Annotated[float, Field(ge=0.0)] = 120.0
    """Seconds without progress on some rank after which the run ends and names it; 0 never ends it. Ten times as long
    until the first step is done, and never shorter than four times the longest step."""
    deterministic: bool = False
    """Use only deterministic GPU kernels, so that a resumed run is bit-identical there too. On the CPU it always is."""


class RotaryScalingConfig(Section):
    """Scaling of rotary frequencies to longer sequences than a model was trained on, see attention/heads.py."""

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    """Formula of the scaling, as in transformers."""
    factor: Annotated[float, Field(ge=1.0)]
    """Longest length, in original lengths."""
    original_length: Positive | None = None
    """Length of the training before, which yarn and llama3 need; others have none."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """yarn only: what queries and keys are multiplied by; null takes 0.1·ln(factor) + 1."""


class PositionsConfig(Section):
    kind: Literal["axial", "sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    """Encoding of positions. All kinds except `rotary` are added to the token embeddings."""
    axial_shape: list[Positive] | None = None
    """Axial only: the grid of positions; its product is the longest length, e.g. [128, 512] for 65,536."""
    axial_dims: list[Positive] | None = None
    """Axial only: the width of each axis' embedding; they sum to `model.d_model`."""
    offset: Count = 0
    """Learned only: rows of the table before the first position's, which nothing reads (HuggingFace's YOSO has 2)."""
    base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Rotary only: base of the frequencies base^(−2i/D), HuggingFace's rope_theta."""
    scaling: RotaryScalingConfig | None = None
    """Rotary only: scaling to sequences longer than those of the training before."""


class MaskingConfig(Section):
    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of the tokens that are masked, which an encoder predicts (masked language modelling, Devlin et al.
    2018)."""
    token: Count = 256
    """The id that stands for a masked token: one of the vocabulary that no text has (256 for bytes)."""
    whole_words: bool = False
    """Mask all tokens of a word together (a word begins where the tokenizer says that one does)."""


class SentenceOrderConfig(Section):
    """Sequences are [class] A [separator] B [separator] and padding, as `megasparse prepare-data pairs` makes them."""

    separator: Count
    """The id that ends A, and B."""


class SourceConfig(Section):
    """The encoder of an encoder–decoder. What is not here is the same on both sides."""

    length: Positive = 512
    """Tokens at the start of each sequence that the encoder reads; the decoder predicts the others."""
    layers: Positive | None = None
    """Layers of the decoder; null takes `model.layers`."""
    positions: PositionsConfig = PositionsConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    """The encoder's attention; the decoder's is `model.attention`."""
    cross_attention: Literal["full", "lsh"] = "full"
    """The source's tokens that the decoder's see: all of them, or by `model.attention.lsh` those in the same bucket."""
    shared_embedding: bool = True
    """One table of token embeddings for both sides."""


FeedForwardKind = Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
GATED = ("swiglu", "geglu", "geglu_tanh")


class ModelConfig(Section):
    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """`decoder`: a causal language model. `encoder`: every token sees both sides, and masked tokens are predicted.
    `encoder_decoder`: an encoder reads the beginning of each sequence, and a decoder that sees it predicts the rest."""
    style: Literal["reformer", "bert"] = "reformer"
    """`reformer`: branches read a normalised stream; projections without biases, ReLU. `bert`, for encoders of ordinary
    blocks: the embedding and every sum are normalised; biases, GELU, a dense layer before the output projection."""
    vocabulary: Positive = 256
    """Number of token ids; 256 for bytes, in an encoder 257 with the mask token."""
    max_length: Positive = 65536
    """Longest sequence, in tokens (an encoder–decoder's longest target). Fixes position tables and bucket counts: a
    shorter batch changes neither."""
    layers: Positive = 12
    """Number of layers, each attention and feed-forward."""
    d_model: Positive = 1024
    """Width of the residual stream."""
    d_ff: Positive = 4096
    """Width of the feed-forward."""
    heads: Positive = 8
    """Number of attention heads per layer."""
    head_dim: Positive | None = None
    """Width of a head; null takes d_model/heads."""
    key_heads: Positive | None = None
    """Heads of keys and values in self-attention, each of which heads/key_heads neighbouring queries' heads share
    (grouped-query attention, Ainslie et al. 2023); null: every head has its own."""
    attention_biases: Literal["none", "qkv", "all"] | None = None
    """Biases of the projections of self-attention: none, those to queries, keys and values, or the output's too. null
    is none, with `style` bert all."""
    query_key_norm: bool = False
    """Each head's queries and keys are normalised, with one weight for all heads, before rotary positions."""
    feed_forward: FeedForwardKind | None = None
    """Activation of the feed-forward; null is relu, with `style` bert gelu. `gelu_tanh` approximates GELU by tanh. The
    gated swiglu, geglu and geglu_tanh (Shazeer 2020) multiply silu, gelu or gelu_tanh of one product by another."""
    feed_forward_biases: bool = True
    """Biases in both products of the feed-forward."""
    blocks: Literal["reversible", "ordinary"] = "reversible"
    """Reversible residual blocks on two streams (Reformer Eq. 7), or ordinary residual blocks on one."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the residual streams and their gradients; sums are made in fp32 and rounded to it. bf16 halves
    what a reversible stack holds, and rounds each stream to 8 bits in every layer (docs/lab/streams.md)."""
    activations: Literal["reversible", "stored", "checkpoint", "checkpoint_cpu"] = "reversible"
    """What the backward reads: recomputed from the output (reversible blocks only), all stored, or recomputed from each
    layer's stored input (ordinary blocks only; `checkpoint_cpu` keeps those inputs in CPU memory)."""
    dropout: Rate = 0.0
    """Rate after the embedding, after each attention, and inside (`style` bert: not there) and after each
    feed-forward."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    """Added to the variance in every normalisation; BERT and its kin have 1e-12."""
    norm: Literal["layer", "rms"] = "layer"
    """`layer`: layer normalisation. `rms`: RMS normalisation (Zhang and Sennrich 2019), neither centred nor with a
    bias."""
    feed_forward_tiles: Positive = 1
    """Pieces of the sequence that the feed-forward works on one after another, backward included."""
    loss_tiles: Positive = 1
    """Pieces of the sequence whose logits exist at a time, backward included."""
    score_from: Count = 0
    """First position of a sequence whose token counts in loss and bits/dim, where the beginning cannot be predicted."""
    padding_token: Count | None = None
    """Id of padding, which no token sees and nothing predicts. null: every token is real."""
    document_separator: Count | None = None
    """Id of the token after each document: tokens see those of their own document only. null: a sequence is one."""
    label_smoothing: Rate = 0.0
    """Share of each target's probability spread among all ids (Szegedy et al. 2016); not in reported nats."""
    adaptive_cutoffs: list[Positive] = Field(default=[])
    """Adaptive softmax (Grave et al. 2017) for large vocabularies sorted by frequency: where each cluster of rarer ids
    begins, ascending, e.g. [20000, 40000, 200000]. Empty: an ordinary softmax."""
    tied_embeddings: bool = False
    """The output projection is the token embedding."""
    output_bias: bool = False
    """The output projection has a bias, as published Reformers have. With `style` bert it has one in any case."""
    logit_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of the output projection, before its bias. null is 1; tied, but not with `style` bert,
    d_model^−½."""
    start_token: Count | None = None
    """Decoders only: the token whose embedding stands before the first one. null: a learned vector."""
    token_types: Count = 0
    """`style` bert, or with `sentence_order`: number of token types with an embedding (BERT has 2). Every token is of
    the first, with `sentence_order` those behind the first separator of the second."""
    positions: PositionsConfig = PositionsConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    masking: MaskingConfig = MaskingConfig()
    """Encoders only."""
    sentence_order: SentenceOrderConfig | None = None
    """Encoders only: predict also whether two segments stand in the order of their document (Lan et al. 2020)."""
    source: SourceConfig | None = None
    """Encoder–decoders only, where it must be given."""


class DataConfig(Section):
    path: str = "data/enwik8"
    """Folder of shards with its index.json, as megasparse prepare-data writes it; or a URL: http://, https:// or s3://."""
    cache: str | None = None
    """Folder of this machine to which shards are fetched from URLs; null is megasparse/shards in the user's cache
    (XDG_CACHE_HOME, or ~/.cache). All ranks and runs of a machine share it; best is a local disk."""
    cache_gb: Annotated[float, Field(gt=0.0)] = 50.0
    """Limit of the cache, 10^9 bytes: shards that were not used for longest are deleted first, never one in use."""
    mixture: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default={})
    """Train on several such folders instead, each with its weight among the sequences. Evaluation is on `path`."""
    sequence_length: Positive = 65536
    """Tokens in a training sequence."""
    shuffle_shards: Positive = 16
    """Sequences are shuffled over this many shards at a time, the shards themselves over all."""
    tokenizer: str = "bytes"
    """`bytes`, `pixels`, or a tokenizer's file: *.model (sentencepiece), *.json (HuggingFace), *.txt (words)."""


class TrainingConfig(Section):
    steps: Positive = 20000
    """Optimizer steps of the whole run."""
    global_batch: Positive = 8
    """Sequences a step, over all ranks; the number of ranks does not change the run."""
    micro_batch: Positive = 1
    """Sequences a rank takes at once; the rest of its share is accumulated."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Branches' arithmetic; norms, softmax statistics and master weights are fp32 in both. Residual streams have
    `model.residual_dtype`."""
    gradient_clipping: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest L2 norm of the gradient; 0 does not clip."""


class OptimizerConfig(Section):
    name: str = "adamw"
    """"adamw" or "adafactor"."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-4
    """Peak learning rate, after the warm-up."""
    betas: Annotated[tuple[Rate, Rate], JSON_LIST] = (0.9, 0.98)
    """AdamW only."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW only."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay, times the learning rate, of all weights with two dimensions or more."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "cosine"
    """Learning rate after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    final_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Cosine and linear: the last step's learning rate as a part of `learning_rate`."""


class EvaluationConfig(Section):
    every: Count = 1000
    """Steps between evaluations; 0 never."""
    sequences: Positive = 8
    """Held-out sequences scored each time, from the start of the split."""
    sample_tokens: Count = 0
    """Length of the sample written to TensorBoard with each evaluation, a text or, of pixels, a picture (rows that are
    not drawn stay black); 0 writes none."""


class CheckpointConfig(Section):
    every: Count = 500
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    asynchronous: bool = False
    """Copy the state, and write it while training goes on. Takes as much CPU memory as a checkpoint has bytes."""
    on_failure: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written or uploaded: end with exit code 3, or report it and go on to the next."""
    bucket: str | None = None
    """URL to which each checkpoint is uploaded beside training, and from which a run goes on whose folder has none or
    older ones, on any machine: s3://, gs://, az:// or file://, for this run alone. null: they are in `run.directory`
    only."""


class LoggingConfig(Section):
    every: Positive = 1
    """Steps between points of TensorBoard and of the progress bar; where that is no terminal, a line comes every 10 s.
    metrics.jsonl has every step."""
    sink: Literal["wandb", "mlflow"] | None = None
    """Destination of scalars, texts and pictures besides TensorBoard: Weights & Biases or MLflow, set up by their own
    environment variables (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI). null: nothing leaves this machine."""
    attention_quality_every: Count = 0
    """Steps between measurements of how near each attention comes to full attention, on a held-out window; 0 never."""


class LoRAConfig(Section):
    """Low-rank adapters on linear layers (Hu et al. 2021), by peft; the pretrained weights are frozen."""

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """Adapters are scaled by alpha/rank."""
    dropout: Rate = 0.0
    """Dropout rate of the input of the adapters."""
    targets: list[str] = Field(default=["query", "value"], min_length=1)
    """Names of the linear layers, their last parts: of BERT and of our models query, key, value, output, ..."""


class ParallelConfig(Section):
    sequence: Positive = 1
    """Ranks that share one sequence, each with its part of the tokens, and inside attention of each mechanism's heads,
    which it must divide. The number of ranks is a multiple of it."""


class RunSettings(Section):
    """The sections of every run."""

    run: RunConfig = RunConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    deepspeed: dict[str, Any] = Field(default={})
    """DeepSpeed's own settings (zero_optimization, ...), handed over as they are once every key is checked."""


class Config(RunSettings):
    """The configuration of a pretraining run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoRAConfig | None = None
    """Low-rank adapters on the weights that the run starts from (--start); null trains all weights."""


def encoder_part(model: ModelConfig) -> ModelConfig:
    """The encoder, which reads the source."""
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
    return model.model_copy(update=changes)


def decoder_part(model: ModelConfig) -> ModelConfig:
    """The decoder, which predicts the target, without its attention to the source."""
    return model.model_copy(update={"kind": "decoder", "source": None})
