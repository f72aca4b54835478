"""Small folders of MIND's form, in which the topic of a user's clicked news predicts what they click."""

import random
from pathlib import Path

WORDS = {
    "sports": ["match", "goal", "team", "coach", "league", "striker"],
    "food": ["soup", "bread", "recipe", "oven", "salad", "cook"],
    "weather": ["storm", "rain", "sun", "cloud", "snow", "wind"],
}


def news_row(name: str, title: str, category: str = "news") -> str:
    return "\t".join([name, category, f"{category}all", title, "", f"https://x.y/{name}.html", "[]", "[]"]) + "\n"


def behaviors_row(name: str, history: str, impressions: str) -> str:
    return "\t".join([name, "U1", "11/11/2019 9:05:58 AM", history, impressions]) + "\n"


def split_folder(folder: Path, news: list[str], behaviors: list[str]) -> Path:
    """Writes rows of both files. Returns behaviors.tsv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "news.tsv").write_text("".join(news), encoding="utf-8")
    (folder / "behaviors.tsv").write_text("".join(behaviors), encoding="utf-8")
    return folder / "behaviors.tsv"


def mind(folder: Path, train: int, dev: int, seed: int = 0, each: int = 20, cold: float = 0.1) -> Path:
    """Writes train/, dev/ and an unlabelled test/. A user likes one topic: all clicks, before and now, are of it. each:
    news of a topic. cold: share of impressions without a history.
    """
    drawn = random.Random(seed)
    titles = {}
    for topic, words in enumerate(WORDS.values()):
        titles |= {f"N{topic}{number}": " ".join(drawn.sample(words, 3)) for number in range(each)}
    news = [news_row(name, title) for name, title in titles.items()]
    for inner, count in (("train", train), ("dev", dev), ("test", 5)):
        rows = []
        for number in range(count):
            topic = drawn.randrange(len(WORDS))
            own = [name for name in titles if name.startswith(f"N{topic}")]
            other = [name for name in titles if name not in own]
            history = [] if drawn.random() < cold else drawn.choices(own, k=drawn.randint(1, 8))
            clicked, shown = drawn.sample(own, drawn.randint(1, 2)), drawn.sample(other, drawn.randint(2, 9))
            fields = [f"{name}-1" for name in clicked] + [f"{name}-0" for name in shown]
            if inner == "test":
                fields = [*clicked, *shown]
            drawn.shuffle(fields)
            rows.append(behaviors_row(str(number + 1), " ".join(history), " ".join(fields)))
        split_folder(folder / inner, news, rows)
    return folder
