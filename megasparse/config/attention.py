"""The schema of `model.attention`: a section for each mechanism, and which layer has which."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from megasparse.config.buckets import lsh_buckets
from megasparse.config.mechanism import MechanismSection, check_band, check_sketch
from megasparse.config.section import Count, Positive, Rate, Section
from megasparse.errors import ConfigError

if TYPE_CHECKING:
    from megasparse.config.schema import ModelConfig


class FullAttentionConfig(MechanismSection):
    shared_qk: bool = False
    """Queries are the keys too (Reformer section 2): logits q·q/|q|, a token sees itself only as last resort."""
    sinusoidal_positions: bool = False
    """Sinusoidal positions added to the queries and keys of every such layer, as in the model of LHA's appendix A.1."""


class LocalAttentionConfig(MechanismSection):
    chunk: Positive = 128
    """A token sees its own chunk of this many positions and the chunk before; an encoder's also the chunk after."""
    relative: bool = False
    """Relative positions as in Transformer-XL, in place of what `model.positions` gives."""
    sinks: Count = 0
    """First tokens of each document that every later one sees (in an encoder every one), in the same softmax, each
    once."""

    def check(self, key: str, model: "ModelConfig") -> None:
        if self.relative and model.positions.kind == "rotary":
            raise ConfigError(
                f"{key}.relative",
                'true adds distances in a layer whose queries and keys model.positions.kind = "rotary" has rotated by '
                "them",
                "Set it to false, or model.positions.kind to another",
            )
        if self.relative and self.sinks:
            problem = f"{self.sinks} may be farther away than relative = true knows distances"
            raise ConfigError(f"{key}.sinks", problem, "Set it to 0, or relative to false")


class LSHAttentionConfig(MechanismSection):
    shared_qk: bool = True
    """The paper: keys are q/|q|. false: queries and keys of their own, hashed alike (the LSH baseline of LHA)."""
    rounds: Positive = 2
    """Hash rounds while training."""
    evaluation_rounds: Positive | None = None
    """Hash rounds in evaluation and generation; null takes `rounds`."""
    chunk: Positive = 64
    """M: the window, in tokens of the sorted order."""
    buckets: Positive | list[Positive] | None = None
    """Buckets per round: an even number, or two even factors whose product it is (each hashed by its own rotation).
    null takes the paper's 2·max_length/chunk, in two factors above 128."""
    window: Literal["band", "chunk"] = "band"
    """`band`: the last M tokens of one's own bucket, strictly causal; in an encoder M on either side. `chunk`: the
    paper's own chunk and the one before it, whose borders future tokens move: not strictly causal."""
    same_bucket: bool = True
    """Only tokens of the same bucket see each other (the paper). false: all of the window, as HuggingFace does it."""
    count_rounds: bool = True
    """A pair seen in N rounds counts once (log N of appendix A). false: N times, as HuggingFace does it."""
    local: bool = False
    """A window beside the buckets: each head also sees the last `chunk` tokens (in an encoder on either side), in the
    same softmax, a key that is in both once."""
    sinks: Count = 0
    """With band only: first tokens of each document that every later one sees (in an encoder every one), in the same
    softmax. They stand in no bucket and no window, so each counts once."""

    replaceable_by_full = True
    rounds_key = "rounds"

    def check(self, key: str, model: "ModelConfig") -> None:
        if self.chunk > model.max_length:
            raise ConfigError(
                f"{key}.chunk",
                f"{self.chunk} is longer than model.max_length = {model.max_length}",
                f"Set it to {model.max_length} or less",
            )
        if self.window == "band" and not self.same_bucket:
            raise ConfigError(
                f"{key}.same_bucket",
                'false with window = "band" is not causal: later tokens move the borders of what is seen',
                'Set same_bucket to true, or window to "chunk"',
            )
        if self.window == "chunk" and not self.shared_qk:
            raise ConfigError(
                f"{key}.window",
                '"chunk" is a window on tokens in one order, but with shared_qk = false queries and keys have buckets '
                "of their own",
                'Set window to "band", or shared_qk to true',
            )
        check_band(key, self.window, False, self.sinks)  # a window may stand beside chunks too
        self._check_buckets(f"{key}.buckets", model.max_length)

    def _check_buckets(self, key: str, max_length: int) -> None:
        factors = self.buckets if isinstance(self.buckets, list) else [self.buckets] if self.buckets else []
        if isinstance(self.buckets, list) and len(factors) not in (1, 2):
            raise ConfigError(key, f"{factors} has {len(factors)} factors", "Give a number, or two factors")
        odd = [factor for factor in factors if factor % 2]
        if odd:
            raise ConfigError(
                key,
                f"{odd[0]} is odd, but a rotation R gives the buckets [xR; -xR], an even number",
                f"Write {odd[0] + 1} instead",
            )
        try:
            lsh_buckets(self, max_length)
        except ValueError as error:
            problem = f"{error}, and as one rotation it would cost too much"
            raise ConfigError(key, problem, "Take a multiple of 4") from None


class LHAAttentionConfig(MechanismSection):
    hash: Literal["mlp", "linear", "random"] = "mlp"
    """H_Q and H_K: two-layer MLPs (the paper's best), linear, or a random projection that nothing trains."""
    chunk: Positive = 64
    """N/B, tokens a bucket; max_length/chunk buckets, rounded up. The band's width, and top_k's size before √2."""
    window: Literal["band", "top_k"] = "band"
    """`band`: the last N/B tokens of one's own (argmax) bucket, strictly causal; in an encoder N/B on either side.
    `top_k`: the paper's ⌊√2·N/B⌋ best queries and keys of every bucket; later tokens decide who is among them: not
    strictly causal."""
    joint: bool = True
    """Decoders: a token's query and key have one bucket, by H_Q(q) + H_K(k) (the paper's Eq. 18). false: each its own,
    as in encoders, so that a query finds keys of another kind; for the queries and keys of a pretrained model."""
    local: bool = False
    """With band only: a window beside the buckets. Each head also sees the last `chunk` tokens (in an encoder on either
    side), in the same softmax, a key that is in both once."""
    sinks: Count = 0
    """With band only: first tokens of each document that every later one sees (in an encoder every one), in the same
    softmax. They stand in no bucket and no window, so each counts once."""
    count_buckets: bool = True
    """With top_k only: whether a pair that shares N buckets counts once. false: N times, as the paper's Algorithm 1
    does it."""
    utility: Literal["sampled", "features", "exact", "collisions"] = "sampled"
    """Target of the hash, ψ and ψ′. `sampled`: from some queries and keys a step. `features`: by positive random
    features (Eq. 16 and 17), the paper's; long queries and keys drown in their noise. `exact`: in O(L²) time.
    `collisions`, not the paper's: softmax(H_Q) and softmax(H_K) of some queries and their best keys beyond the window
    and the sinks are to draw the same bucket, all buckets alike; in decoders with joint = false."""
    samples: Positive = 256
    """With sampled and collisions: the queries (sampled: of each document) that the hash learns from in a step."""
    sampled_keys: Positive = 1024
    """With sampled only: keys of each document that learn, and draws that queries learn by; all of a shorter one."""
    features: Positive = 64
    """With features only: number of positive random features."""
    visible_utility: bool = False
    """Whether ψ sums over the keys that a causal query may see, in place of all (the paper). Encoders see all."""
    weight: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Weight λ of Eq. 19: the loss is (1 − λ)·task + λ·mean(KL_Q + KL_K)."""
    sinusoidal_positions: bool = False
    """Sinusoidal positions added to the queries and keys of every such layer, as the paper does for WikiText-103."""
    project_positions: bool = False
    """With sinusoidal_positions: they are d_model wide, and each layer projects them to its heads, once for queries and
    once for keys, as in the released code. false: they are a head wide, and added as they are."""
    normalize: bool = False
    """Queries and keys of each head are layer-normalised, without gain and bias, as in the released code: none is
    longer than the square root of the head dim, so random features approximate their products well."""

    def check(self, key: str, model: "ModelConfig") -> None:
        check_band(key, self.window, self.local, self.sinks)
        if self.utility == "collisions" and self.joint and model.kind != "encoder":
            problem = '"collisions" are those of queries and keys with hashes of their own, but joint = true adds them'
            raise ConfigError(f"{key}.utility", problem, 'Set joint to false, or utility to "sampled"')
        if self.project_positions and not self.sinusoidal_positions:
            problem = "true projects positions, but sinusoidal_positions = false adds none"
            raise ConfigError(f"{key}.project_positions", problem, "Set it to false, or sinusoidal_positions to true")


class YOSOAttentionConfig(MechanismSection):
    hashes: Positive = 32
    """Number m of hashes while training."""
    evaluation_hashes: Positive | None = None
    """Hashes in evaluation and generation; null takes `hashes`."""
    expectation: bool = False
    """The weight is (1 − acos(q·k)/π)^τ itself, in O(L²) time, in place of m samples of it (YOSO-E)."""
    code_bits: Positive | None = None
    """Number τ of sign bits of a code. null takes log2(max_length), in a decoder no more than keeps its hash tables
    below a key-value cache of max_length tokens, where one bit does."""
    projection: Literal["hadamard", "gaussian"] = "hadamard"
    """`hadamard`: fast, slightly biased. `gaussian`: dense projections, unbiased."""
    backward: Literal["auto", "tables", "pairs"] = "auto"
    """Gradients of q and k on a CPU: over the hash tables (cost L·m·D²), or over colliding pairs; `auto` takes the
    cheaper. On a GPU there is one way, whose cost is linear in L however the tokens collide."""
    normalization: Literal["length", "sum"] = "length"
    """`length`: each output is scaled to length 1, as in the paper's experiments. `sum`: it is divided by B·1, the sum
    of its weights."""
    convolution: Positive | None = None
    """Kernel size (odd) of a depth-wise convolution of the values that is added to the output; null for none."""
    chunk: Positive = 128
    """Decoders on a CPU only: tables grow chunk by chunk; inside a chunk collisions are found pair by pair."""

    rounds_key = "hashes"
    no_probabilities = True

    @model_validator(mode="before")
    @classmethod
    def _no_softmax(cls, values: Any) -> Any:
        asked = [key for key in ("local", "sinks") if isinstance(values, dict) and key in values]
        if asked:
            raise ValueError(
                f"{asked[0]} joins a softmax, but YOSO has no softmax, and weighs every token already. A window beside "
                'it is convolution, or other heads, {"local": 2, "yoso": 2}'
            )
        return values

    def check(self, key: str, model: "ModelConfig") -> None:
        if self.code_bits is not None and self.code_bits > 30:
            problem = f"{self.code_bits} bits do not fit a 32-bit code"
            raise ConfigError(f"{key}.code_bits", problem, "Set it to 30 or less, or to null")
        if self.convolution is not None and self.convolution % 2 == 0:
            raise ConfigError(
                f"{key}.convolution",
                f"{self.convolution} is even, so the kernel has no middle",
                f"Write {self.convolution + 1} instead",
            )


class SmartBirdAttentionConfig(MechanismSection):
    keys: Positive = 20
    """K, keys a query attends to."""
    sketch_dim: Positive = 4
    """Width d of the single-head sketch."""
    sketch: Literal["attention", "transformer", "heads"] = "attention"
    """`attention`: one narrow attention on the layer's input. `transformer`: a Transformer layer of `sketch_dim` on
    embeddings of tokens of its own, with sinusoidal positions (Eq. 1). `heads`: one for every `sketch_heads` heads, on
    their own queries and keys, as they are after the rotation."""
    sketch_heads: Positive = 1
    """With heads only: neighbouring heads that share a sketch, and the keys that it picks."""
    evaluation: Literal["top_k", "draws"] = "top_k"
    """Evaluation takes the K largest weights, the same keys for all heads, or draws by head as training does."""
    sampling: Literal["inverse_log_squared", "inverse_log", "raw", "top_k", "random"] = "inverse_log_squared"
    """How a sketched weight becomes a sampling score (the paper's Figure 4)."""
    objective: Literal["token", "pooled", "answer", "attention"] = "token"
    """Objective of the sketch itself: `token`, each position's target (language modelling, masked tokens); `pooled`,
    the sequence's label, from an attention-pooled vector (the paper); `answer`, in the encoder of an encoder–decoder,
    which tokens the target has, from the same vector; `attention`, the full attention of its heads to what is beyond
    the window and the sinks, from 256 queries a step.
    """
    labels: Positive | None = None
    """With pooled only: number of labels."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Weight of the sketch's objective. Nothing else trains the sketch, and it trains nothing else."""
    local: bool = False
    """A window beside the chosen keys, in the same softmax, a key in both once: a token's own chunk of positions and
    the chunk before, in an encoder also the chunk after."""
    chunk: Positive = 64
    """With local only: positions a chunk."""
    sinks: Count = 0
    """First tokens of each document that every later one sees (in an encoder every one), in the same softmax, each
    once."""

    def check(self, key: str, model: "ModelConfig") -> None:
        if (self.objective == "pooled") != (self.labels is not None):
            labels = "null" if self.labels is None else self.labels
            problem = f'{labels} does not fit objective = "{self.objective}"'
            raise ConfigError(f"{key}.labels", problem, 'Give the number of labels with "pooled", null with others')
        check_sketch(key, self.sketch, self.sketch_heads, self.objective, model)

    def check_pretraining(self, key: str, predicted: Literal["token", "answer"]) -> None:
        if self.objective not in (predicted, "attention"):
            problem = f'"{self.objective}" is not what pretraining predicts here'
            raise ConfigError(f"{key}.objective", problem, f'Set it to "{predicted}"')


class NGramAttentionConfig(MechanismSection):
    lengths: list[Positive] = Field(default=[4], min_length=1)
    """n of each round: a token sees what followed earlier occurrences of its last n tokens."""
    chunk: Annotated[int, Field(ge=2)] = 64
    """M: of each round the last M − 1 of these."""
    window: Positive = 64
    """Beside them a token sees its own chunk of this many positions and the chunk before, as in `local`."""
    sinks: Count = 0
    """First tokens of each document that every later one sees beside its window, in the same softmax."""

    causal_only = "it sees what followed earlier tokens"


class SMYRFAttentionConfig(MechanismSection):
    rounds: Positive = 2
    evaluation_rounds: Positive | None = None
    """Hash rounds in evaluation; null takes `rounds`."""
    chunk: Positive = 64
    """Queries, and keys, of a cluster."""

    bidirectional_only = "its balanced clusters depend on all tokens"
    replaceable_by_full = True
    rounds_key = "rounds"


class RoutingAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Tokens a cluster; max_length/chunk centroids, rounded up."""
    window: Literal["band", "top_k"] = "band"
    """`band`: the last `chunk` tokens of one's own cluster, strictly causal. `top_k`: the paper's nearest tokens of
    each centroid; later tokens decide who is among them: not strictly causal."""
    local: bool = False
    """With band only: a window beside the clusters. Each head also sees the last `chunk` tokens (in an encoder on
    either side), in the same softmax, a key that is in both once."""
    sinks: Count = 0
    """With band only: first tokens of each document that every later one sees (in an encoder every one), in the same
    softmax. They stand in no cluster and no window, so each counts once."""
    decay: Rate = 0.999
    """Decay of the centroids' moving average, a step."""

    def check(self, key: str, model: "ModelConfig") -> None:
        check_band(key, self.window, self.local, self.sinks)


class RandomAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Tokens a bucket; max_length/chunk buckets, rounded up, drawn at random whatever the tokens are."""


class SparseTransformerAttentionConfig(MechanismSection):
    stride: Positive | None = None
    """A token sees the tokens of the last `stride` positions and every stride-th one; null takes √max_length."""


class LongformerAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token sees its own block and its neighbours."""
    globals: Count = 1
    """First tokens that every token sees, and that see every token."""


class BigBirdAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token sees its own block and its neighbours."""
    globals: Count = 1
    """First blocks that every block sees, and that see every block."""
    random: Count = 3
    """Blocks more that each block sees, drawn at random."""


class PerformerAttentionConfig(MechanismSection):
    features: Positive = 256
    """Number of positive random features."""
    chunk: Positive = 128
    """Decoders only: pairs of tokens this near are scored one by one, farther ones meet in running sums."""

    no_probabilities = True


class LinformerAttentionConfig(MechanismSection):
    projected: Positive = 256
    """Length k: keys and values are projected from max_length to this many."""

    bidirectional_only = "it projects the whole sequence"


AttentionKind = Literal[
    "full", "local", "lsh", "lha", "yoso", "smart_bird", "smyrf", "routing", "random", "sparse_transformer",
    "longformer", "bigbird", "performer", "linformer", "ngram",
]  # fmt: skip
HeadSplit = Annotated[dict[AttentionKind, Positive], Field(min_length=1)]


class AttentionConfig(Section):
    pattern: list[AttentionKind | HeadSplit] = Field(default=["local", "local", "lsh", "local"], min_length=1)
    """Attention of each layer, repeated over the depth; as long as the depth, it is an explicit list. An entry is a
    kind, or the number of heads of each of several kinds, such as {"local": 4, "lha": 4}, in whatever order."""
    full_below: Positive | None = None
    """In a model whose max_length is below this, full attention takes the place of `lsh` and `smyrf`, on the same
    weights. null never. bench attention --write-crossover writes the length from which on hashing is faster."""
    dropout: Rate = 0.0
    """Dropout of attention probabilities, after the softmax. It is computed by blocks: slower than a GPU's kernels."""
    output_dropout: Rate | None = None
    """Dropout of the output of attention, before it is added to the residual stream; null takes `model.dropout`."""
    head_groups: Positive = 1
    """Groups of each mechanism's heads, which attend one after another, backward included; the same losses."""
    full: FullAttentionConfig = FullAttentionConfig()
    local: LocalAttentionConfig = LocalAttentionConfig()
    lsh: LSHAttentionConfig = LSHAttentionConfig()
    lha: LHAAttentionConfig = LHAAttentionConfig()
    yoso: YOSOAttentionConfig = YOSOAttentionConfig()
    smart_bird: SmartBirdAttentionConfig = SmartBirdAttentionConfig()
    smyrf: SMYRFAttentionConfig = SMYRFAttentionConfig()
    routing: RoutingAttentionConfig = RoutingAttentionConfig()
    random: RandomAttentionConfig = RandomAttentionConfig()
    sparse_transformer: SparseTransformerAttentionConfig = SparseTransformerAttentionConfig()
    longformer: LongformerAttentionConfig = LongformerAttentionConfig()
    bigbird: BigBirdAttentionConfig = BigBirdAttentionConfig()
    performer: PerformerAttentionConfig = PerformerAttentionConfig()
    linformer: LinformerAttentionConfig = LinformerAttentionConfig()
    ngram: NGramAttentionConfig = NGramAttentionConfig()
