"""Published Reformers, wrapped as they are, trained on our batches; their bits/dim as they report it, and as strictly
causal scoring gives it.

A causal model predicts token t from tokens 0 … t − 1. The published ones mask later tokens, but let them decide which
earlier ones are in a query's chunk. So each is scored twice at the same positions: in one pass over the whole window,
as it reports itself, and from the tokens before the position alone. The difference is its leak.

B batch, L length, V vocabulary.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.reader import EvaluationStream
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.outputs import kept_rows, write_json
from megasparse.planning.measure import machine
from megasparse.runs.data import open_data, training_batches
from megasparse.training.ranks import Ranks
from megasparse.training.schedule import learning_rate
from megasparse.training.stopping.hooks import RunHooks

KEYS = ("peer", "seed", "steps", "learning_rate", "data")
"""What rows differ by."""


class Peer(nn.Module):
    """A causal language model of another package. `forward`: tokens (B, n), n <= L, to the logits (B, n, V) of the
    token after each.
    """

    def __init__(self, model: nn.Module, logits: Callable[[Any], Tensor] = lambda out: out):
        super().__init__()
        self.model, self.logits = model, logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.model(tokens))


def huggingface(model: ModelConfig, positions: float = 1.0) -> Peer:
    """transformers' Reformer: local and LSH layers by turns, axial positions, reversible. positions: the deviation that
    these begin at, by default transformers' own; words begin at 0.02.
    """
    from transformers import ReformerConfig, ReformerModelWithLMHead

    lsh, side = model.attention.lsh, 2 ** (int(math.log2(model.max_length)) // 2)
    half = model.d_model // 2
    config = ReformerConfig(
        vocab_size=model.vocabulary,
        attn_layers=[("local", "lsh")[layer % 2] for layer in range(model.layers)],
        hidden_size=model.d_model,
        feed_forward_size=model.d_ff,
        num_attention_heads=model.heads,
        attention_head_size=model.d_model // model.heads,
        num_hashes=lsh.rounds,
        lsh_attn_chunk_length=lsh.chunk,
        local_attn_chunk_length=lsh.chunk,
        max_position_embeddings=model.max_length,
        axial_pos_shape=[side, model.max_length // side],
        axial_pos_embds_dim=[half, model.d_model - half],
        axial_norm_std=positions,
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        is_decoder=True,
        use_cache=False,
        hash_seed=None,
    )
    return Peer(ReformerModelWithLMHead(config), lambda out: out.logits)


def reformer_pytorch(model: ModelConfig) -> Peer:
    """reformer-pytorch's language model, half of its heads local as in its enwik8 example, padded by its Autopadder."""
    from reformer_pytorch import Autopadder, ReformerLM

    lsh = model.attention.lsh
    own = ReformerLM(
        num_tokens=model.vocabulary,
        dim=model.d_model,
        depth=model.layers,
        max_seq_len=model.max_length,
        heads=model.heads,
        dim_head=model.d_model // model.heads,
        bucket_size=lsh.chunk,
        n_hashes=lsh.rounds,
        ff_chunks=1,
        ff_mult=model.d_ff // model.d_model,
        n_local_attn_heads=model.heads // 2,
        causal=True,
    )
    return Peer(Autopadder(own))


PEERS: dict[str, Callable[[ModelConfig], Peer]] = {
    "huggingface": huggingface,
    "huggingface-small-positions": partial(huggingface, positions=0.02),
    "reformer-pytorch": reformer_pytorch,
}


def compare_peers(
    config: Config, names: Sequence[str], seeds: Sequence[int], rates: Sequence[float], positions: int, output: Path
) -> list[dict[str, Any]]:
    """The rows of every peer, rate and seed, of which those that are not in the JSON file `output` are measured and
    written. config: of a decoder of ours, whose sizes, batches, schedule and steps they have. positions: scored twice.
    Raises ConfigError for sizes that a peer cannot have, DataError for a test split that is shorter than a window, and
    for a file of something else.
    """
    _check(config)
    rows = kept_rows(output, KEYS)
    wanted = [(name, rate, seed) for name in names for rate in rates for seed in seeds]
    for name, rate, seed in wanted:
        own = config.model_copy(
            update={
                "run": config.run.model_copy(update={"seed": seed}),
                "optimizer": config.optimizer.model_copy(update={"learning_rate": rate}),
            }
        )
        row = dict(zip(KEYS, (name, seed, config.training.steps, rate, str(config.data.path)), strict=True))
        if not any(all(old[key] == row[key] for key in KEYS) for old in rows):
            with torch.random.fork_rng(devices=[]):  # which the peers draw from
                torch.manual_seed(seed)
                peer = PEERS[name](config.model)
                trained = train(peer, own, f"{name}, rate {rate:g}, seed {seed}")
                rows.append(row | trained | score(peer, own, positions))
            write_json(output, {"machine": machine(torch.device("cpu")), "rows": rows})
    return rows


def _check(config: Config) -> None:
    model, length = config.model, config.data.sequence_length
    if model.kind != "decoder":
        raise ConfigError("model.kind", f'the peers are decoders, not "{model.kind}"', "Name a decoder's configuration")
    multiple = 2 * model.attention.lsh.chunk
    if length != model.max_length or length % multiple:
        problem = f"{length} is not model.max_length = {model.max_length}, or no multiple of {multiple}"
        raise ConfigError("data.sequence_length", problem, "The peers train on whole sequences of 2 × chunk: set both")
    data = open_data(config).evaluation
    for split in (config.evaluation.split, "test"):
        if (tokens := EvaluationStream(data, split).tokens) < length:
            raise DataError(data.directory, f"{split} has {tokens} tokens, less than a window", "Prepare more text")


def train(peer: Peer, config: Config, name: str) -> dict[str, Any]:
    """Train by AdamW on a decoder's batches, in the order of its seed. Returns the peer's weights, the median seconds
    of a step, and held-out bits/dim by step, with the seconds of training until then.
    """
    peer.train()
    given, data = config.optimizer, open_data(config)
    optimizer = torch.optim.AdamW(peer.parameters(), betas=given.betas, eps=given.eps, weight_decay=given.weight_decay)
    stream, seconds, curve = EvaluationStream(data.evaluation, config.evaluation.split), [], []
    with training_batches(config, data, Ranks(), 0, RunHooks()) as batches:
        for step in tqdm(range(1, config.training.steps + 1), desc=name, unit="step", disable=None):
            batch, start = next(batches), time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.training.steps, given)
            for micro in batch.micro_batches:
                (_nats(peer, micro.tokens).mean() / len(batch.micro_batches)).backward()
            nn.utils.clip_grad_norm_(peer.parameters(), config.training.gradient_clipping or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            if step % config.evaluation.every == 0 or step == config.training.steps:
                held_out = bits_per_dim(peer, stream, config, config.evaluation.sequences)
                curve.append({"step": step, "seconds": round(sum(seconds), 1), "bits_per_dim": held_out})
    weights = sum(each.numel() for each in peer.parameters())
    return {"weights": weights, "step_seconds": round(statistics.median(seconds), 3), "curve": curve}


@torch.no_grad()
def bits_per_dim(peer: Peer, stream: EvaluationStream, config: Config, limit: int | None = None) -> float:
    """As the peer reports it: of the first `limit` whole windows, one pass each, all tokens but each window's first."""
    length, nats = config.data.sequence_length, []
    peer.eval()
    with torch.random.fork_rng(devices=[]):  # training draws on as if nothing had been scored
        for start in list(range(0, stream.tokens - length + 1, length))[:limit]:
            torch.manual_seed(config.run.seed)  # of the rotations
            nats.append(_nats(peer, stream.read(start, start + length)[None]).double().mean())
    peer.train()
    return float(torch.stack(nats).mean()) / math.log(2)


@torch.no_grad()
def score(peer: Peer, config: Config, positions: int) -> dict[str, Any]:
    """Of the test split: `bits_per_dim` as the peer reports it; and at `positions` drawn places its bits in the pass
    over the whole window, from the tokens before alone, what the later ones save (the leak) and its standard error,
    and the share of places at which the two are not within 1e-3 nats.
    """
    stream, length = EvaluationStream(open_data(config).evaluation, "test"), config.data.sequence_length
    reported = bits_per_dim(peer, stream, config)
    peer.eval()
    drawn, seed = random.Random(f"positions {config.run.seed}"), config.run.seed
    starts = range(0, stream.tokens - length + 1, length)
    places = sorted((drawn.choice(starts), drawn.randrange(length // 8, length)) for _ in range(positions))
    whole, before = list[float](), list[float]()
    for start, place in tqdm(places, desc="prefix by prefix", unit="position", disable=None):
        tokens = stream.read(start, start + length)[None]
        for part, found in ((tokens, whole), (tokens[:, :place], before)):
            torch.manual_seed(seed)
            found.append(float(F.cross_entropy(peer(part)[0, place - 1].float(), tokens[0, place])) / math.log(2))
    leaks = [alone - seeing for seeing, alone in zip(whole, before, strict=True)]
    return {
        "bits_per_dim": reported,
        "positions": positions,
        "whole": statistics.mean(whole),
        "prefix": statistics.mean(before),
        "leak": statistics.mean(leaks),
        "standard_error": statistics.stdev(leaks) / math.sqrt(positions),
        "moved": sum(abs(leak) * math.log(2) > 1e-3 for leak in leaks) / positions,
    }


def _nats(peer: Peer, tokens: Tensor) -> Tensor:
    """Of every token but the first, (B, L - 1)."""
    return F.cross_entropy(peer(tokens)[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, a row each."""
    head = "| peer | rate | seed | steps | a step, s | reported | sample, whole | prefix alone | leak | moved |"
    lines = [head, "|" + "---|" * 10]
    for row in rows:
        found = [f"{row[key]:.3f}" for key in ("step_seconds", "bits_per_dim", "whole", "prefix")]
        leak = f"{row['leak']:+.4f} ± {row['standard_error']:.4f}"
        first = [row["peer"], f"{row['learning_rate']:g}", str(row["seed"]), str(row["steps"])]
        lines.append(f"| {' | '.join([*first, *found, leak, format(row['moved'], '.0%')])} |")
    return lines
