"""Tasks that rank the items shown to a user, given the items chosen before: NRMS (Wu et al. 2019), and FIM (Wang et al.
2020), a baseline of Smart Bird.

A pretrained body encodes news. Attention over clicked news encodes users, or each candidate is matched with each
clicked news word by word. B impressions, N distinct news of a batch, L length, H clicked news, C candidates, M clicks,
E width.
"""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import MultiHeadAttention, Padding
from megasparse.config.finetuning import HeadConfig, RecommendationConfig
from megasparse.config.schema import ModelConfig, PositionsConfig
from megasparse.errors import ConfigError
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import RngContext, derive, random_bits
from megasparse.settings.checks import check_model, check_targets
from megasparse.tasks.batches import EncodedExample, Movable, Padded, Segments, first, pad, side_by_side
from megasparse.tasks.body import Backbone
from megasparse.tasks.form import Form, draw_normal, dropped
from megasparse.tasks.task import Example

HISTORY_LAYER = -2  # layer number for random draws of the attention over clicked news; not a layer of the body
FILTERS, DILATIONS, CUBES = 150, (1, 2, 3), (32, 16)
"""FIM's own sizes: convolutions of words, each of width 3, and of matching images, 3 × 3 × 3."""
NEGATIVES = 4  # news of the same impression without a click, as negatives of a clicked one; NRMS' value


@dataclass(frozen=True)
class Impressions(Movable):
    """A micro-batch: distinct news, and the rows of them that each impression shows or has clicked, padded with 0."""

    news: Padded  # tokens of the news, (N, L)
    numbers: Tensor  # (N,) int64: a hash of the news' tokens, which seeds its dropout independently of its row
    history: Tensor  # (B, H) int64 rows of `news`
    clicks: Tensor  # (B,) int64: number of news in each history, possibly 0
    candidates: Tensor  # (B, C) int64 rows of `news`
    shown: Tensor  # (B,) int64: number of candidates of each impression
    clicked: Tensor | None  # (B, C) bool; None without labels

    def numel(self) -> int:
        """Return the number of news tokens."""
        return int(self.news.lengths.sum())


class AdditivePooling(nn.Module):
    """Σ α_i·x_i, α = softmax_i(q·tanh(V·x_i + v)): the additive attention of NRMS' encoders (section 2)."""

    def __init__(self, width: int, hidden: int, seed: int, name: str):
        super().__init__()
        self.dense, self.query = nn.Linear(width, hidden), nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.dense.bias)
        for part, layer in (("dense", self.dense), ("query", self.query)):
            draw_normal(layer.weight, layer.weight.shape[1] ** -0.5, seed, "initial pooling", name, part)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Pool x (B, L, E) over mask (B, L), which is true for at least one token. Returns (B, E) fp32."""
        scores = self.query(torch.tanh(self.dense(x.to(self.dense.weight.dtype)))).squeeze(-1).float()
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights.unsqueeze(-1) * torch.where(mask.unsqueeze(-1), x.float(), 0.0)).sum(1)


Score = Callable[[Tensor, Tensor], Tensor]
"""Scores (M, C) of users, rows of impressions (M,), for candidates, rows of news (M, C)."""


class Recommender(nn.Module):
    """Base of models that score candidates for users, from the body's states of news."""

    varying_token_counts = True

    def __init__(self, body: Backbone, head: HeadConfig):
        super().__init__()
        self.body, self.rate = body, head.dropout
        self.task_weight = body.task_weight

    def forward(self, batch: Any, rng: RngContext, divisor: float | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return the objective, auxiliary losses included, and the statistics of `Form.model`.

        In training every click is an example of weight 1, with cost −ln softmax of its score among itself and NEGATIVES
        news of its impression without a click. divisor: replaces M. In evaluation `predicted` is one tensor of the
        scores of all candidates per impression, and the cost of an impression is the sum over its clicks of −ln softmax
        among the click and all its news without a click.
        """
        if rng.training:
            rows, chosen = drawn_negatives(batch, rng, NEGATIVES)
            score, auxiliary = self._read(batch, chosen, rng)
            scores = score(rows, chosen)
            costs = -scores.log_softmax(-1)[:, 0]
            loss, count = costs.sum() / (divisor or len(costs)), torch.tensor(len(costs), device=costs.device)
            return self.task_weight * loss + auxiliary, {"nats": costs.sum().detach(), "tokens": count}
        real = first(batch.shown, batch.candidates.shape[1])
        score, auxiliary = self._read(batch, batch.candidates[real], rng)
        scores = score(torch.arange(len(real), device=real.device), batch.candidates)
        predicted = [row[:count] for row, count in zip(scores, batch.shown.tolist(), strict=True)]
        statistics: dict[str, Any] = {"predicted": predicted}
        loss, count = scores.new_zeros(()), scores.new_tensor(float(len(scores)))
        if batch.clicked is not None:
            others = scores.masked_fill(~real | batch.clicked, -torch.inf).logsumexp(-1, keepdim=True)
            costs = torch.where(batch.clicked, F.softplus(others - scores), 0.0).sum(-1)
            weights = batch.clicked.sum(-1).float()
            loss, count = costs.sum() / weights.sum(), weights.sum()
            statistics |= {"costs": costs, "weights": weights}
        return self.task_weight * loss + auxiliary, statistics | {"nats": loss.detach() * count, "tokens": count}

    def count_scored(self, batch: Any) -> Tensor:
        """Return the number of clicks to predict."""
        return batch.clicked.sum()

    def _states(self, batch: Any, candidates: Tensor, rng: RngContext) -> tuple[Tensor, Tensor, Padded, Tensor]:
        """Return the numbers of the needed news, their states after dropout (N, L, E), the news, and the auxiliary
        loss.
        """
        mask, news, popular = first(batch.clicks, batch.history.shape[1]), batch.news, None
        needed = torch.cat([batch.history[mask], candidates.flatten()]).unique()
        if rng.training:  # a sketch learns which news any user of the batch has clicked, now or before: 1, others 0
            popular = batch.numbers.new_zeros(len(batch.numbers))
            popular[batch.history[mask]] = 1
            popular[batch.candidates[batch.clicked]] = 1
            popular = popular[needed]
        read = Padded(news.tokens[needed], news.types[needed], news.lengths[needed])
        rng_of_news = replace(rng, samples=batch.numbers[needed])
        states, auxiliary = self.body(read, rng_of_news, popular)
        return needed, dropped(states, self.rate, rng_of_news, "news dropout"), read, auxiliary

    @abstractmethod
    def _read(self, batch: Any, candidates: Tensor, rng: RngContext) -> tuple[Score, Tensor]:
        """Return a function that scores the candidates, and the auxiliary losses."""


class NewsRecommender(Recommender):
    """Model that scores candidates by the product u·r of a user's and a news' vector.

    r: additive pooling of the body's states of a title. u: multi-head self-attention over the vectors r of clicked
    news, then additive pooling; a learned vector, initially 0, for users without clicks. Dropout precedes both
    poolings. `head.hidden` is the width of the additive attentions.
    """

    def __init__(self, body: Backbone, config: RecommendationConfig, head: HeadConfig, seed: int):
        super().__init__(body, head)
        hidden, model = head.hidden or body.width, history_model(body.width, config)
        self.news_pooling = AdditivePooling(body.width, hidden, seed, "news")
        self.user_pooling = AdditivePooling(body.width, hidden, seed, "user")
        self.attention = MultiHeadAttention(model, 0, derive(seed, "attention over clicked news"))
        self.unknown_user = nn.Parameter(torch.zeros(body.width))
        weights = (self.attention.mechanism(kind).task_weight for kind in self.attention.split)
        self.task_weight = min(body.task_weight, *weights)

    def _read(self, batch: Any, candidates: Tensor, rng: RngContext) -> tuple[Score, Tensor]:
        needed, states, read, auxiliary = self._states(batch, candidates, rng)
        pooled = self.news_pooling(states, first(read.lengths, states.shape[1]))
        vectors = pooled.new_zeros(len(batch.numbers), self.body.width).index_copy(0, needed, pooled)
        mask = first(batch.clicks, batch.history.shape[1])
        users, further = self._users(vectors[batch.history], mask, rng)
        return lambda rows, chosen: (users[rows].unsqueeze(1) * vectors[chosen]).sum(-1), auxiliary + further

    def _users(self, clicked: Tensor, mask: Tensor, rng: RngContext) -> tuple[Tensor, Tensor]:
        """Return the users' vectors (B, E) fp32, and the auxiliary loss. clicked: (B, H, E). mask: (B, H)."""
        visible = mask.clone()
        visible[:, 0] = True  # without it, the softmax of a user without clicks is NaN, which would spread
        x = torch.where(mask.unsqueeze(-1), clicked, 0.0).to(self.attention.query.weight.dtype)
        padding = Padding(None if bool(visible.all()) else visible)
        out, auxiliary, *_ = self.attention(x, AttentionContext(HISTORY_LAYER, rng), padding)
        users = self.user_pooling(dropped(out.float(), self.rate, rng, "user dropout"), visible)
        users = torch.where(mask.any(-1, keepdim=True), users, self.unknown_user.float())
        return users, users.new_zeros(()) if auxiliary is None else auxiliary


class MatchingRecommender(Recommender):
    """FIM: the words of a candidate are matched with the words of each clicked news, at several levels.

    Level 0 are the body's states (FIM: word vectors); each further level is a dilated convolution of the one before,
    ReLU and layer normalisation. Products of all words of two news, divided by √width, are an image per level. The
    images of a user's clicked news are a volume that convolutions, each with ReLU and a maximum over 3 × 3 × 3, reduce
    to a score. Missing words and news are 0.
    """

    def __init__(self, body: Backbone, config: RecommendationConfig, head: HeadConfig, length: int, seed: int):
        super().__init__(body, head)
        self.history, self.length = config.history, length
        widths, channels = (body.width, *[FILTERS] * len(DILATIONS)), (1 + len(DILATIONS), *CUBES)
        self.words = nn.ModuleList(
            nn.Conv1d(a, b, 3, padding=d, dilation=d) for (a, b), d in zip(pairwise(widths), DILATIONS, strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:])
        self.cubes = nn.ModuleList(nn.Conv3d(a, b, 3, padding=1) for a, b in pairwise(channels))
        volume = -(-config.history // 9) * (-(-length // 9)) ** 2
        self.output = nn.Linear(CUBES[-1] * volume, 1)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and not name.startswith("body."):
                draw_normal(weight, weight[0].numel() ** -0.5, seed, "initial matching", name)
        for layer in (*self.words, *self.cubes, self.output):
            nn.init.zeros_(layer.bias)

    def levels(self, states: Tensor, lengths: Tensor) -> list[Tensor]:
        """Return the levels of news (N, length, width), from the body's states (N, L, E)."""
        mask = first(lengths, self.length).unsqueeze(-1)
        x = F.pad(states.to(self.output.weight.dtype), (0, 0, 0, self.length - states.shape[1])).masked_fill(~mask, 0.0)
        levels = [x]
        for convolution, norm in zip(self.words, self.norms, strict=True):
            x = norm(convolution(x.mT).relu().mT).masked_fill(~mask, 0.0)
            levels.append(x)
        return levels

    def match(self, candidates: Sequence[Tensor], clicked: Sequence[Tensor]) -> Tensor:
        """Return the scores (C,) of candidates for a user. Both by level: (C, length, E), (H, length, E)."""
        pairs = zip(candidates, clicked, strict=True)
        x = torch.stack([torch.einsum("cie,hje->chij", a, b) / a.shape[-1] ** 0.5 for a, b in pairs], dim=1)
        for convolution in self.cubes:
            x = F.max_pool3d(convolution(x).relu(), 3, ceil_mode=True)
        return at_least_fp32(self.output(x.flatten(1)).squeeze(-1))

    def _read(self, batch: Any, candidates: Tensor, rng: RngContext) -> tuple[Score, Tensor]:
        needed, states, read, auxiliary = self._states(batch, candidates, rng)
        row_of_news = needed.new_zeros(len(batch.numbers)).index_copy(
            0, needed, torch.arange(len(needed), device=needed.device)
        )
        levels = self.levels(states, read.lengths)
        mask = first(batch.clicks, batch.history.shape[1])[..., None, None]
        missing = self.history - mask.shape[1]

        def score(rows: Tensor, chosen: Tensor) -> Tensor:
            scores = []
            for row, numbers in zip(rows.tolist(), row_of_news[chosen], strict=True):
                history = [level[row_of_news[batch.history[row]]].masked_fill(~mask[row], 0.0) for level in levels]
                clicked = [F.pad(level, (0, 0, 0, 0, 0, missing)) for level in history]
                scores.append(self.match([level[numbers] for level in levels], clicked))
            return torch.stack(scores)

        return score, auxiliary


def history_model(width: int, config: RecommendationConfig) -> ModelConfig:
    """Return the one-layer encoder of clicked news. Raises ConfigError naming task.recommendation."""
    section = "task.recommendation"
    if width % config.heads:
        problem = f"{config.heads} heads do not divide the width of the news' vectors, {width}"
        raise ConfigError(f"{section}.heads", problem, "Set it to a divisor")
    model = ModelConfig(
        kind="encoder", vocabulary=257, max_length=config.history, layers=1, d_model=width, heads=config.heads,
        blocks="ordinary", activations="stored", positions=PositionsConfig(kind="none"), attention=config.attention,
    )  # fmt: skip
    try:
        check_model(model)
        check_targets(model, f"{section}.attention")  # a history provides neither labels nor tokens
    except ConfigError as error:
        texts = [text.replace("model.max_length", f"{section}.history") for text in (error.problem, error.hint)]
        raise ConfigError(error.key.replace("model", section, 1), *texts) from None
    return model


def drawn_negatives(batch: Any, rng: RngContext, count: int) -> tuple[Tensor, Tensor]:
    """Return the impression of each click (M,), and its news to score, (M, 1 + count): the click, then its negatives.

    Negatives are drawn without replacement from the impression's news without a click; if there are fewer, all of them
    repeat in random order. A draw depends only on seed, step, the impression's sample number and the click's column.
    """
    width = batch.candidates.shape[1]
    rows, column = batch.clicked.nonzero(as_tuple=True)
    bits = random_bits(rng.key(-1, "negatives"), rng.rows(width, rows.device)[rows, column], width)
    free = (first(batch.shown, width) & ~batch.clicked)[rows]
    order = bits.to(torch.int64).masked_fill(~free, 2**31).argsort(dim=-1, stable=True)
    turns = torch.arange(count, device=rows.device) % free.sum(-1, keepdim=True)
    chosen = torch.cat([column.unsqueeze(1), order.gather(1, turns)], dim=1)
    return rows, batch.candidates[rows].gather(1, chosen)


@dataclass(frozen=True)
class Impression(EncodedExample):
    """An encoded impression, with candidates as `sequences`. Equal texts and histories are one object."""

    history: tuple[Segments, ...]

    @property
    def length(self) -> int:
        return max(len(text.tokens) for text in (*self.history, *self.sequences))

    def content(self) -> Iterator[bytes]:
        read = (*self.history, *self.sequences)
        yield f"{self.label!r} {len(self.history)} {[len(text.tokens) for text in read]}\n".encode()
        yield b"".join([text.tokens.tobytes() for text in read])


class RankingForm(Form):
    """Inputs are the texts chosen before and the texts shown, labels 0 or 1 per text shown; answers are their scores.

    A training example is an impression with all its clicks: `training.global_batch` is a number of impressions. Every
    step draws new negatives. Truncated and empty texts are counted once.
    """

    def reset(self) -> None:
        super().reset()
        self.counts.kinds |= {"clicks": 0, "distinct texts": 0, "users without clicks": 0}
        self.texts: dict[str, Segments] = {}
        self.histories: dict[tuple[str, ...], tuple[Segments, ...]] = {}

    def encoded(self, example: Example) -> Impression:
        history, shown = example.inputs
        kinds, location = self.counts.kinds, example.location
        kinds["clicks"] += sum(example.label or ())
        kinds["users without clicks"] += not history
        for text in (*history, *shown):
            if text not in self.texts:
                self.texts[text] = self._join((text,), location)
        kinds["distinct texts"] = len(self.texts)
        clicked = self.histories.setdefault(history, tuple(self.texts[text] for text in history))
        candidates = tuple(self.texts[text] for text in shown)
        return Impression(candidates, example.label, location, example.name, clicked)

    def model(self, body: Backbone) -> nn.Module:
        if self.config.head.pooling is not None:
            raise ConfigError("head.pooling", f'"{self.config.head.pooling}" does not pool news', "Remove it")
        task, seed = self.config.task, self.config.run.seed
        if task.recommendation.user == "matching":
            return MatchingRecommender(body, task.recommendation, self.config.head, task.max_length, seed)
        return NewsRecommender(body, task.recommendation, self.config.head, seed)

    def collate(self, examples: Sequence[Any]) -> Impressions:
        distinct = {id(text): text for example in examples for text in (*example.history, *example.sequences)}
        rows = {key: row for row, key in enumerate(distinct)}
        news = pad([*distinct.values()], self.config.task.max_length)
        numbers = [zlib.crc32(text.tokens.tobytes()) >> 1 for text in distinct.values()]
        histories = [[rows[id(text)] for text in example.history] for example in examples]
        shown = [[rows[id(text)] for text in example.sequences] for example in examples]
        history, clicks = side_by_side(histories, self.config.task.recommendation.history)
        candidates, counts = side_by_side(shown, max(map(len, shown)))
        labels = [example.label for example in examples]
        clicked = None if None in labels else side_by_side(labels, candidates.shape[1])[0].bool()
        return Impressions(news, torch.tensor(numbers), history, clicks, candidates, counts, clicked)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> tuple[float, ...]:
        return tuple(predicted.tolist())

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        label = None if example.label is None else list(example.label)
        return {"label": label, "predicted": predicted.tolist()}
