"""The corpora that megasparse prepare-data knows. A new one is a subclass of `Corpus` and one line here."""

from megasparse.data.corpora.chats import Chats
from megasparse.data.corpora.corpus import Corpus
from megasparse.data.corpora.drawn import Duplication, Recall
from megasparse.data.corpora.image_sets import Cifar10, ImageNet64
from megasparse.data.corpora.images import Images
from megasparse.data.corpora.pairs import Pairs, Parallel
from megasparse.data.corpora.tables import HuggingFace, JsonLinesCorpus, Parquet
from megasparse.data.corpora.text import PG19, BookCorpus, Enwik8, Text, WikiText103

CORPORA: dict[str, Corpus] = {
    "enwik8": Enwik8(),
    "text": Text(),
    "jsonl": JsonLinesCorpus(),
    "chats": Chats(),
    "parquet": Parquet(),
    "huggingface": HuggingFace(),
    "bookcorpus": BookCorpus(),
    "pg19": PG19(),
    "wikitext103": WikiText103(),
    "images": Images(),
    "imagenet64": ImageNet64(),
    "cifar10": Cifar10(),
    "pairs": Pairs(),
    "parallel": Parallel(),
    "duplication": Duplication(),
    "recall": Recall(),
}
