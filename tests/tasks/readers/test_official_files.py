"""Every reader's official splits, splits by position, examples of rows, and malformed rows; line-aligned files."""

import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.catalog import TASKS, build_task
from megasparse.tasks.task import split_files
from tests.data.corpora.pictures import write_files
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import news_row

ROOT = Path(__file__).parents[3]
GLUE = {"train": ["train.tsv"], "validation": ["dev.tsv"], "test": ["test.tsv"]}
FOLDERS = {
    "cola": "CoLA", "mrpc": "MRPC", "qnli": "QNLI", "qqp": "QQP", "rte": "RTE", "sst2": "SST-2", "stsb": "STS-B",
}  # fmt: skip
MNLI = {
    "train": ["train.tsv"], "validation": ["dev_matched.tsv"], "validation_mismatched": ["dev_mismatched.tsv"],
    "test": ["test_matched.tsv"], "test_mismatched": ["test_mismatched.tsv"],
}  # fmt: skip
MICROSOFT = {"train": ["msr_paraphrase_train.txt"], "test": ["msr_paraphrase_test.txt"]}
STS = {"train": ["sts-train.csv"], "validation": ["sts-dev.csv"], "test": ["sts-test.csv"]}
RTE = {split: [f"rte{n}_{part}.xml" for n in (1, 2, 3)] for split, part in (("train", "dev"), ("test", "test"))}
PUBMED = {"train": ["train.txt"], "validation": ["val.txt"], "test": ["test.txt"]}
WIKIHOP = {"train": ["train.json"], "validation": ["dev.json"], "test": ["test.json"]}


def three(form: str, **names: str) -> dict[str, list[str]]:
    return {split: [form.format(names.get(split, split))] for split in ("train", "validation", "test")}


@together(
    ("name", "inner", "splits"),
    [
        ("aan", "", three("new_aan_pairs.{}.tsv", validation="eval")),
        ("ag_news", "", {"train": ["train.csv"], "test": ["test.csv"]}),
        ("byte_imdb", "", {"train": ["train"], "test": ["test"]}),
        ("grey_cifar10", "", {"train": ["train"], "test": ["test"]}),
        ("imdb", "", three("imdb.{}.txt.ss", validation="dev")),
        ("imdb", "", three("imdb-{}.txt.ss", validation="dev")),
        ("listops", "", three("basic_{}.tsv", validation="val")),
        *[("mind", "", three(f"{release}{{}}/behaviors.tsv", validation="dev"))
          for release in ("MINDlarge_", "MINDsmall_", "")],
        *[("rte_challenge", inner, RTE) for inner in ("", "rte")],
        *[("sts_benchmark", inner, STS) for inner in ("", "stsbenchmark")],
        *[("pubmed", inner, PUBMED) for inner in ("", "pubmed-dataset")],
        *[("wikihop", inner, WIKIHOP) for inner in ("", "wikihop")],
        *[("mnli", inner, MNLI) for inner in ("", "MNLI")],
        *[("mrpc", inner, MICROSOFT) for inner in ("", "MRPC")],
        *[(name, inner, GLUE) for name, folder in FOLDERS.items() for inner in ("", folder)],
    ],
)  # fmt: skip
def test_splits_are_the_official_files(name, inner, splits, tmp_path):
    task = build_task(TaskConfig(name=name))
    paths = {split: [tmp_path / inner / file for file in files] for split, files in splits.items()}
    for file in (file for files in paths.values() for file in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / inner / "README").touch()
    assert task.files(tmp_path) == paths
    assert all(split_files(task, tmp_path, split) == files for split, files in paths.items())
    paths["train"][-1].unlink()
    assert task.files(tmp_path) == {split: files for split, files in paths.items() if split != "train"}
    others = ", ".join(list(splits)[1:])
    with pytest.raises(DataError, match=rf'contains no "train" split of {name}\. Its splits: {others}'):
        split_files(task, tmp_path, "train")


@together(
    ("name", "files", "row"),
    [
        *[("amazon", [f"reviews_Electronics_5.json{end}"], json.dumps({"reviewText": "text {}", "overall": 1.0}) + "\n")
          for end in ("", ".gz")],
        ("sentence_polarity", ("rt-polarity.neg", "rt-polarity.pos"), "text {}\n"),
        *[("mind_topics", [f"{release}news.tsv"], news_row("N0", "text {}"))
          for release in ("MINDlarge_train/", "MINDsmall_train/", "")],
    ],
)  # fmt: skip
def test_eight_of_ten_examples_train_and_splits_are_disjoint(name, files, row, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        content = "".join(row.replace("{}", str(n)) for n in range(23)).encode()
        (tmp_path / file).write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    task, result = build_task(TaskConfig(name=name)), {}
    for split in ("train", "validation", "test"):
        examples = [example for file in split_files(task, tmp_path, split) for example in task.read(file)]
        result[split] = [int(str(example.inputs[0]).split()[1]) for example in examples]
        assert {example.location.file for example in examples} == {tmp_path / file for file in files}
        assert [example.location.line for example in examples] == [n + 1 for n in result[split]]
    expected = {"test": [0, 10, 20], "validation": [1, 11, 21], "train": [n for n in range(23) if n % 10 > 1]}
    assert result == {split: numbers * len(files) for split, numbers in expected.items()}
    (tmp_path / files[-1]).unlink()
    assert task.files(tmp_path) == {}


AAN_TEXTS = ("b'Parsing \\xe2\\x80\\x93 a survey\\n1 Introduction'", 'b"It\'s \\"quoted"')
"""The repr of bytes: escapes stay, and a quotation mark does not quote."""
NEWS = ["https://assets.msn.com/labs/mind/AAGH0ET.html", '[{"Label": "A", "OccurrenceOffsets": [48]}]', "[]"]
MNLI_COLUMNS = "\t".join(("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse",
                          "sentence1_parse", "sentence2_parse", "sentence1", "sentence2"))  # fmt: skip
MNLI_ROW = "1\t1e\tfiction\t(a)\t(b)\t(A)\t(B)\tA man.\t"
REVIEW = {
    "reviewerID": "A1", "asin": "0528881469", "reviewerName": "", "helpful": [0, 0], "overall": 4.0,
    "reviewText": 'Good, "\u2028" & more.', "summary": "not to be read", "reviewTime": "06 2, 2013",
}  # fmt: skip
PAPER = {
    "article_id": "PMC3872579", "article_text": ["a recent study reports anxiety .", " it was done in 2009 . "],
    "abstract_text": ["<S> background : it is common . </S>", "<S> <S is no mark , p < 0.05 . </S>"],
    "labels": None, "section_names": ["introduction"], "sections": [["a recent study reports anxiety ."]],
}  # fmt: skip
PAPER_TEXT = ("a recent study reports anxiety . it was done in 2009 .",)
ABSTRACT = "background : it is common .\n<S is no mark , p < 0.05 ."
NEW = {"article_text": ["one .", "two ."]}


@together(
    ("name", "header", "rows", "want"),
    [
        ("aan", "", ["\t".join(("1.0", "P05-1022", "W04-0301", *AAN_TEXTS)), "0\tA00\tB11\t\"b''\tb'y'"],
         [(AAN_TEXTS, 1, "P05-1022 W04-0301"), (("\"b''", "b'y'"), 0, "A00 B11")]),
        ("ag_news", "", ['"3","Bears return (Reuters)","Reuters - A dwindling\\band of sellers is back."',
                         '"4","A ""quoted"" title","It said \\""no"" , twice."',
                         '"1","Talks, again","AP - It is the firm #39;s first."', '"2","Late\u2028goal",""'],
         [(("Bears return (Reuters) Reuters - A dwindling\\band of sellers is back.",), 2, "0"),
          (('A "quoted" title It said \\"no" , twice.',), 3, "1"),
          (("Talks, again AP - It is the firm #39;s first.",), 0, "2"), (("Late\u2028goal ",), 1, "3")]),
        ("amazon", "", [json.dumps({**REVIEW, "overall": stars}) for stars in (5.0, 1, 3.0, 4.0, 2.0)],
         [(('Good, "\u2028" & more.',), label, str(n)) for n, label in enumerate((4, 0, 2, 3, 1))]),
        ("amazon", "", [json.dumps({**REVIEW, "reviewText": ""})], [(("",), 3, "0")]),
        # training and validation files of CoLA have four columns without names
        ("cola", "", ['gj04\t1\t\tThe cat "sat.', "gj04\t0\t*\tCat the\u2028sat."],
         [(('The cat "sat.',), 1, "0"), (("Cat the\u2028sat.",), 0, "1")]),
        ("cola", "index\tsentence", ["0\tThe dog ran.", "17\tRan dog."],
         [(("The dog ran.",), None, "0"), (("Ran dog.",), None, "17")]),
        ("mnli", f"{MNLI_COLUMNS}\tlabel1\tgold_label", [f"0\t{MNLI_ROW}A person.\tneutral\tentailment",
                                                        f"7\t{MNLI_ROW}A cat.\tneutral\tcontradiction"],
         [(("A man.", "A person."), 0, "0"), (("A man.", "A cat."), 2, "7")]),
        ("mnli", f"{MNLI_COLUMNS}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
         [f"0\t{MNLI_ROW}A tall man.\tentailment\tneutral\tneutral\tentailment\tneutral\tneutral"],
         [(("A man.", "A tall man."), 1, "0")]),
        ("mnli", MNLI_COLUMNS, [f"0\t{MNLI_ROW}A person."], [(("A man.", "A person."), None, "0")]),
        ("imdb", "", ["ur0012\t\ttt0111161\t\t10\t\ti loved it ! <sssss> really . <sssss> see it",
                      "ur7\t\ttt1\t\t1\t\tno\u2028good\tat all\t\tnone <sssss> "],
         [(("i loved it ! really . see it",), 9, "0"), (("no\u2028good\tat all\t\tnone ",), 0, "1")]),
        # digits are themselves; [MIN, [MAX, [MED, [SM are 10 … 13, and ] is 14; the official generator writes CR LF
        *[("listops", f"Source\tTarget{end}",
           [f"( ( ( ( [MED 3 ) ( ( ( [SM 4 ) 9 ) ] ) ) 8 ) ] )\t3{end}", f"( ( ( [MIN 0 ) 7 ) ] )\t0{end}"],
           [(([12, 3, 13, 4, 9, 14, 8, 14],), 3, "0"), (([10, 0, 7, 14],), 0, "1")]) for end in ("", "\r")],
        ("mind_topics", "", ["\t".join(("N55528", "lifestyle", "x", 'The "Brands" they', "Shop, \u2028 now.", *NEWS)),
                             "\t".join(("N1", "tv", "subtv", "Alone", "", *NEWS))],
         [(('The "Brands" they Shop, \u2028 now.',), 7, "N55528"), (("Alone",), 15, "N1")]),
        ("pubmed", "", [json.dumps({**PAPER, "article_id": "first"}), json.dumps(PAPER)],
         [(PAPER_TEXT, ABSTRACT, "first"), (PAPER_TEXT, ABSTRACT, "PMC3872579")]),
        ("pubmed", "", [json.dumps(each) for each in (NEW, {**NEW, "abstract_text": []}, {"article_text": []})],
         [(("one . two .",), None, "0"), (("one . two .",), "", "1"), (("",), None, "2")]),
        ("qnli", "index\tquestion\tsentence\tlabel",
         ["4\tWho?\tA man came.\tentailment", "9\tWhen?\tA man came.\tnot_entailment"],
         [(("Who?", "A man came."), 0, "4"), (("When?", "A man came."), 1, "9")]),
        ("rte", "index\tsentence1\tsentence2\tlabel",
         ["0\tA \"man.\tA man's.\tnot_entailment", "1\tA man.\t man\tentailment"],
         [(('A "man.', "A man's."), 1, "0"), (("A man.", " man"), 0, "1")]),
        ("sst2", "sentence\tlabel", ["a film \t1", '"bad\t0'], [(("a film ",), 1, "0"), (('"bad',), 0, "1")]),
        ("sst2", "index\tsentence", ["3\ta film"], [(("a film",), None, "3")]),
        ("stsb", "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
         ["0\tnews\tMSRvid\t2012\t1\tnone\tnone\tA man.\tA dog.\t0.250"], [(("A man.", "A dog."), 0.25, "0")]),
        ("sts_benchmark", "", ['main\tMSRvid\t2012test\t0001\t5.000\tA plane is taking off.\tAn "air plane.',
                               "main\tanswers\t2015\t12\t3.8\tYes.\tNo.\tSource one, licence\tSource two"],
         [(("A plane is taking off.", 'An "air plane.'), 5.0, "0"), (("Yes.", "No."), 3.8, "1")]),
        ("qqp", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
         ['133273\t1\t2\tHow "far?\tHow long?\t1', "402555\t3\t4\tWhy?\tWho?\t0"],
         [(('How "far?', "How long?"), 1, "133273"), (("Why?", "Who?"), 0, "402555")]),
        ("qqp", "id\tquestion1\tquestion2", ["0\tWhy?\tHow come?"], [(("Why?", "How come?"), None, "0")]),
    ],
)  # fmt: skip
def test_an_example_is_a_row_with_its_columns_label_and_id(tmp_path, name, header, rows, want):
    file = tmp_path / "some.txt"
    file.write_text("".join(f"{row}\n" for row in [header, *rows] if row), encoding="utf-8", newline="")
    result = list(build_task(TaskConfig(name=name)).read(file))
    arrays = [part for example in result for part in example.inputs if isinstance(part, np.ndarray)]
    assert all(part.dtype == np.int64 for part in arrays) and bool(arrays) == (name == "listops")
    inputs = [tuple(part.tolist() if arrays else part for part in example.inputs) for example in result]
    assert list(zip(inputs, [each.label for each in result], [each.name for each in result], strict=True)) == want
    first = 2 if header else 1
    assert [str(example.location) for example in result] == [f"{file}:{first + i}" for i in range(len(rows))]


AAN, TREE = "1\ta\tb\tx\ty", "( ( ( [MIN 0 ) 7 ) ] )"
STS_ROW = ["genre", "file", "year", "1", "5.000", "A", "B"]
PAIR = "index\tsentence1\tsentence2\t"


def sts(*fields: str, score: str = "5.000") -> str:
    return "\t".join([*STS_ROW[:4], score, *STS_ROW[5:], *fields])


REVIEW_ROW, QQP = json.dumps(REVIEW), "id\tquestion1\tquestion2\tis_duplicate"
MALFORMED = [
    ("aan", "", AAN, "0\ta\tb\tx", "4 fields instead of 5 (label, id1, id2, text1, text2)"),
    ("aan", "", AAN, "2.0\ta\tb\tx\ty", '"2.0" is not a label of aan. Known here: 0, 1'),
    *[("ag_news", "", '"1","a","b"', f'"{index}","a","b"', f'"{index}" is not a label of ag_news.')
      for index in ("0", "5", "", "1.0", "Class Index")],
    *[("imdb", "", "u\t\tp\t\t7\t\tgood", f"u\t\tp\t\t{rating}\t\tgood", f'"{rating}" is not a label of imdb')
      for rating in ("0", "11", "7.5", "", "05")],
    ("imdb", "", "u\t\tp\t\t7\t\tgood", "", "1 fields instead of 4 (user, product, rating, text)"),
    ("listops", "Source\tTarget", f"{TREE}\t0", "( [FIRST 0 ) 7 ]\t0", 'unknown token "[FIRST" in Source'),
    ("listops", "Source\tTarget", f"{TREE}\t0", f"{TREE}\t10", '"10" is not a label of listops'),
    ("mind_topics", "", news_row("N1", "a")[:-1], news_row("N2", "a").replace("news", "sport")[:-1],
     '"sport" is not a label of mind_topics. Did you mean "sports"?'),
    *[("amazon", "", REVIEW_ROW, json.dumps({**REVIEW, "overall": stars}),
       f'"{json.dumps(stars)[:80]}" is not a label of amazon') for stars in (0.0, 4.5, True, [5], 10**400)],
    ("amazon", "", REVIEW_ROW, json.dumps({**REVIEW, "reviewText": None}), 'null in the column "reviewText"'),
    ("amazon", "", REVIEW_ROW, "{", "not JSON ("),
    *[("pubmed", "", json.dumps(PAPER), json.dumps({**PAPER, column: value}), f'"{column}" is not a list of sentences')
      for column, value in (("article_text", "one"), ("article_text", ["x", None]), ("abstract_text", None))],
    ("sts_benchmark", "", sts(), "\t".join(STS_ROW[:6]), "6 fields instead of 7"),
    ("sts_benchmark", "", sts(), sts(score="much"), '"much" in the column "score" is not a similarity from 0 to 5'),
    ("rte", f"{PAIR}label", "1\tA\tB\tentailment", "1\tA\tB\tentails", '"entails" is not a label of rte. Did you mean'),
    ("cola", "", "gj04\t1\t\tA", "gj04\t1\t\tA\tB", "5 fields instead of 4"),
    ("qqp", QQP, "7\tA\tB\t1", "7\tA", "2 fields instead of 4"),
    *[("stsb", f"{PAIR}score", "0\tA\tB\t1", f"0\tA\tB\t{score}", f'"{score}" in the column "score" is not a simi')
      for score in ("5.1", "-0.1", "nan", "")],
]  # fmt: skip


@together(("name", "header", "good", "odd", "problem"), MALFORMED)
def test_a_malformed_row_is_named_and_skipped_within_the_limit(name, header, good, odd, problem, tmp_path, capsys):
    file, task = tmp_path / "rows.txt", build_task(TaskConfig(name=name))
    header, first = f"{header}\n" * bool(header), 1 + bool(header)
    file.write_text(f"{header}{odd}\n{good}\n")
    message = refusal(lambda: task.read(file))
    assert message.startswith(f"{file}:{first}: {problem}")
    latin = name != "ag_news"  # a row of CSV may have several lines, of which none is left out
    file.write_bytes(f"{header}{odd}\n".encode() + f"{good}\n".encode() * 200 + b"\xff\n" * latin)
    assert len(list(task.read(file))) == 200
    printed = capsys.readouterr().err
    assert printed.startswith(f"skipped: {message}\n") and f"{file}: skipped {1 + latin} of " in printed
    file.write_text(header + f"{odd}\n" * 3 + f"{good}\n" * 200)
    result = refusal(lambda: task.read(file))
    assert result.startswith(f"{file}: 3 of 203 rows are malformed, the first one: {file}:{first}: ")
    assert result.endswith("At most 1% may be: replace the file")


@together(
    ("name", "header", "row", "column"),
    [("rte", "index\tsentence1\tsentence\tlabel", "0\tA\tB\tentailment", '"sentence2"'),
     ("listops", "source\tTarget", f"{TREE}\t3", "'Source'")],
)  # fmt: skip
def test_a_missing_column_is_named(name, header, row, column, tmp_path):
    (tmp_path / "rows.txt").write_text(f"{header}\n{row}\n")
    message = refusal(lambda: build_task(TaskConfig(name=name)).read(tmp_path / "rows.txt"))
    assert message.startswith(f"{tmp_path / 'rows.txt'}:2: missing column {column}")


def test_every_task_is_documented_with_its_metrics():
    lines = [line.split("|") for line in (ROOT / "docs" / "reference" / "tasks.md").read_text().splitlines()]
    rows = [cells[1:4] for cells in lines if len(cells) == 5 and cells[1].startswith(" `")]
    assert {name for names, _, _ in rows for name in re.findall(r"`(\w+)`", names)} == TASKS.keys()
    for names, _, metrics in rows:
        expected = metrics.replace("as `cnn_dm`", "rouge1, rouge2, rougeL, rougeLsum").replace(" then", "")
        for name in [] if "series" in names else re.findall(r"`(\w+)`", names):
            settings = {"text": ["en"], "label": "de"} if name in ("parallel_text", "wmt14") else {}
            task = build_task(TaskConfig(name=name, **({"labels": ["a", "b"]} if name == "table" else settings)))
            assert task.metrics == tuple(re.findall(r"\w+", expected.partition(";")[0])), name
            assert task.classes is None or "accuracy" in task.metrics


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_both_encodings_give_the_same_text(tmp_path, encoding):
    task = build_task(TaskConfig(name="sentence_polarity"))
    file = tmp_path / "rt-polarity.pos"
    sentences = ["un café \x85 à l'été .", "plain", "señor"]
    file.write_bytes("".join(f"{each}\r\n" for each in sentences).encode(encoding))
    assert [example.inputs[0] for example in task.read(file)] == sentences


def test_the_sample_is_every_33rd_review_in_parts_of_eight_one_and_one(tmp_path):
    rows = (json.dumps({"reviewText": f"text {n}", "overall": 1.0}) for n in range(33 * 20))
    (tmp_path / "reviews_Electronics_5.json").write_text("\n".join(rows))
    task = build_task(TaskConfig(name="amazon_50k"))
    splits = ("train", "validation", "test")
    result = {s: [int(e.name) for f in split_files(task, tmp_path, s) for e in task.read(f)] for s in splits}
    assert result == {"train": [33 * n for n in range(20) if n % 10 > 1], "validation": [33, 363], "test": [0, 330]}


IMDB = {
    "neg/0_3.txt": b"Dull.<br /><br />Not \xe2\x80\x93 good",
    "neg/2_1.txt": b"\xef\xbb\xbfmarked\r\nbad\n",
    "neg/10_2.txt": b"\tworst ",
    "pos/0_9.txt": b"Fine",
}


def test_reviews_come_class_by_class_in_the_order_of_their_numbers_and_a_missing_class_is_named(tmp_path):
    files = {f"{split}/{name}": content for split in ("train", "test") for name, content in IMDB.items()}
    folder = write_files(tmp_path / "aclImdb", {**files, "train/unsup/0_0.txt": b"without a label"})
    task = build_task(TaskConfig(name="byte_imdb"))
    examples = list(task.read(*split_files(task, folder, "train")))
    assert [example.name for example in examples] == ["neg/0_3", "neg/2_1", "neg/10_2", "pos/0_9"]
    assert [example.label for example in examples] == [0, 0, 0, 1] and task.classes == ("neg", "pos")
    assert [str(example.location) for example in examples] == [str(folder / "train" / name) for name in IMDB]
    (folder / "train" / "pos" / "0_9.txt").rename(folder / "train" / "pos" / "0_9.text")
    problem = r"train/pos: contains no \*\.txt\. Use a folder with neg/\*\.txt and pos"
    refusal(lambda: task.read(folder / "train"), match=problem)


@pytest.mark.parametrize("inner", ["", "txt_sentoken", "movie_reviews"])
def test_splits_are_the_official_folds(tmp_path, inner):
    task = build_task(TaskConfig(name="movie_reviews"))
    (tmp_path / "README").write_text("about it")
    for name, n in itertools.product(("neg", "pos"), (0, 99, 700, 799, 800, 899, 900, 999)):
        content = f"{name} film {n} .\nof two lines . \n".encode()
        write_files(tmp_path / inner, {f"{name}/cv{n:03}_{29000 + n}.txt": content})
    for split, numbers in (("train", (0, 99, 700, 799)), ("validation", (800, 899)), ("test", (900, 999))):
        files = split_files(task, tmp_path, split)
        names = [f"{name}/cv{n:03}_{29000 + n}.txt" for name in ("neg", "pos") for n in numbers]
        assert files == [tmp_path / inner / name for name in names]
        for file in files:
            (example,) = task.read(file)
            name, number = file.parent.name, int(file.stem[2:5])
            assert example.inputs == (f"{name} film {number} .\nof two lines . \n",)
            assert task.classes[example.label] == name and example.name == file.stem
            assert str(example.location) == str(file)


def write(folder, name, *rows, encoding="utf-8", end="\n"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes("".join("\t".join(row) + end for row in rows).encode(encoding))
    return folder / name


def test_mrpc_is_read_from_the_files_of_glue_or_of_microsoft(tmp_path):
    task = build_task(TaskConfig(name="mrpc"))

    def examples_of(file):
        return [(example.inputs, example.label, example.name) for example in task.read(file)]

    names = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [names, ["1", "70", "71", 'He said "yes.', "He agreed."], ["0", "72", "73", "He left.", "She came."]]
    want = [(('He said "yes.', "He agreed."), 1, "0"), (("He left.", "She came."), 0, "1")]
    glue = write(tmp_path / "glue", "train.tsv", *rows)
    assert examples_of(glue) == want
    test = write(tmp_path / "glue", "test.tsv", ["index", *names[1:]], ["5", "1", "2", "He left.", "He went."])
    assert examples_of(test) == [(("He left.", "He went."), None, "5")]
    original = write(tmp_path / "microsoft", "msr_paraphrase_train.txt", *rows, encoding="utf-8-sig", end="\r\n")
    assert examples_of(original) == want
    test_file = write(tmp_path / "microsoft", "msr_paraphrase_test.txt", *rows)
    assert task.files(tmp_path / "microsoft") == {"train": [original], "test": [test_file]}
    write(tmp_path / "glue", "msr_paraphrase_train.txt", *rows)
    assert task.files(tmp_path / "glue") == {"train": [glue], "test": [test]}


CHALLENGE = build_task(TaskConfig(name="rte_challenge"))

FIRST = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE entailment-corpus SYSTEM "rte.dtd">
<entailment-corpus challenge="1">
<pair id="8" value="FALSE" task="IR">
	<t>Oil traded at $37.80, down &lt;28&gt; cents &amp;
more</t>
	<h>Oil rose; they don&apos;t fall</h>
</pair>
<!-- a comment -->
<pair id="12" value="TRUE" task="IR">
	<t>Émile &#233;tait là. </t>
	<h>He was there.</h>
</pair>
</entailment-corpus>
"""


@pytest.fixture
def problem(tmp_path):
    def read(text, encoding="utf-8"):
        file = tmp_path / "rte1_dev.xml"
        file.write_text(text, encoding=encoding)
        message = refusal(lambda: CHALLENGE.read(file))
        assert message.startswith(str(file))
        return message.removeprefix(str(file))

    return read


def test_pairs_labels_ids_and_lines_equal_the_file(tmp_path):
    file = tmp_path / "rte1_dev.xml"
    file.write_text(FIRST, encoding="utf-8")
    first, second = CHALLENGE.read(file)
    assert first.inputs == ("Oil traded at $37.80, down <28> cents &\nmore", "Oil rose; they don't fall")
    assert (first.label, first.name, str(first.location)) == (1, "8", f"{file}:1")
    assert second.inputs == ("Émile était là. ", "He was there.")
    assert (second.label, second.name, str(second.location)) == (0, "12", f"{file}:2")


def test_entities_and_external_references_are_rejected(problem, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    pair = '<a><pair id="1" value="TRUE"><t>before &e; after</t><h>B</h></pair></a>'
    for declared in (f'<!ENTITY e SYSTEM "{secret}">', '<!ENTITY e "x">'):
        message = problem(f"<?xml version='1.0'?>\n<!DOCTYPE a [{declared}]>\n{pair}")
        assert message.startswith(": declares its own entities")
    outside = tmp_path / "outside.dtd"
    outside.write_text('<!ENTITY e "x">')
    assert problem(f'<!DOCTYPE a SYSTEM "{outside}">\n{pair}').startswith(":2: not XML (undefined entity")
    assert problem(pair).startswith(":1: not XML (undefined entity")


@together(
    "old, new, message",
    [
        ('value="TRUE"', 'value="PERHAPS"', ':2: "PERHAPS" is not a label of rte_challenge'),
        ('<pair id="12"', "<pair", ":2: a pair without an id"),
        ("<h>He was there.</h>", "", ':2: missing column "h"'),
        ("<h>He was there.</h>", "<h>He</h><h>was</h>", ":2: a pair without an id, or with a repeated"),
        ("there.</h>", "<b>there</b>.</h>", ":2: a pair without an id, or with a repeated or nested"),
        ("</pair>\n<!--", "<pair></pair></pair>\n<!--", ":2: a pair without an id"),
        ("</entailment-corpus>", "", ":15: not XML (no element found"),
        ('encoding="UTF-8"', 'encoding="none"', ": is in an encoding that cannot be read"),
    ],
)
def test_a_malformed_pair_is_named_by_file_and_pair(problem, old, new, message):
    assert old in FIRST
    assert problem(FIRST.replace(old, new)).startswith(message)


ENGLISH = ["A dog runs .", "Two  men\u2028sit\x0btoo.", " “Hi”, she said. "]
GERMAN = ["Ein Hund rennt .", "Zwei Männer\u2028sitzen\x0bauch.", "„Hallo“, sagte sie.\r"]


def task_of(name="parallel_text", text=("en",), label="de"):
    return build_task(TaskConfig(name=name, text=list(text), label=label))


def written(file, rows):
    content = "".join(f"{row}\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def aligned(folder, stem, end="", number=3):
    written(folder / f"{stem}.en{end}", [f"{stem} en {n}" for n in range(number)])
    written(folder / f"{stem}.de{end}", [f"{stem} de {n}" for n in range(number)])


@together("ends", [("", ""), (".gz", ".gz"), ("", ".gz"), (".gz", "")])
def test_lines_of_both_files_belong_together(tmp_path, ends):
    file = written(tmp_path / f"mine.en{ends[0]}", ENGLISH)
    written(tmp_path / f"mine.de{ends[1]}", GERMAN)
    result = list(task_of().read(file))
    assert [example.inputs for example in result] == [(line.strip(),) for line in ENGLISH]
    assert [example.label for example in result] == [line.strip() for line in GERMAN]
    assert [(str(each.location), each.name) for each in result] == [(f"{file}:{n + 1}", str(n)) for n in range(3)]


def test_the_configuration_sets_the_direction(tmp_path):
    written(tmp_path / "train.en", ENGLISH), written(tmp_path / "train.de", GERMAN)
    task = task_of(text=["de"], label="en")
    (file,) = split_files(task, tmp_path, "train")
    assert file.name == "train.de"
    assert next((each.inputs[0], each.label) for each in task.read(file)) == (GERMAN[0], ENGLISH[0])


@together("validation", ["val", "valid", "dev"])
@together(("test", "end"), [("test", ""), ("test_2016_flickr", ".gz"), ("test.2016", "")])
def test_the_splits_of_a_folder(tmp_path, validation, test, end):
    for stem in ("train", validation, test, "train.more", "newstest2014"):
        aligned(tmp_path, stem, end)
    written(tmp_path / f"test_other.fr{end}", ["x"])
    (tmp_path / "README").write_text("none of them")
    task = task_of()
    names = {split: [file.name for file in files] for split, files in task.files(tmp_path).items()}
    stems = {"train": "train", "validation": validation, "test": test}
    assert names == {split: [f"{stem}.en{end}"] for split, stem in stems.items()}
    for split, stem in stems.items():
        (file,) = split_files(task, tmp_path, split)
        pairs = [(f"{stem} en {n}", f"{stem} de {n}") for n in range(3)]
        assert [(each.inputs[0], each.label) for each in task.read(file)] == pairs


def test_wmt14_is_validated_on_2013_and_tested_on_2014(tmp_path):
    for stem in ("train", "newstest2012", "newstest2013", "newstest2014"):
        aligned(tmp_path, stem)
    task = task_of("wmt14")
    names = {split: file.name for split, (file,) in task.files(tmp_path).items()}
    assert names == {"train": "train.en", "validation": "newstest2013.en", "test": "newstest2014.en"}
    assert task.metrics[0] == "bleu" and task.form == "texts"


@pytest.mark.parametrize("name", ["new.en", "new.txt", "new"])
def test_a_single_file_has_no_labels(tmp_path, name):
    file = written(tmp_path / name, ENGLISH)
    written(tmp_path / "other.de", GERMAN)
    result = list(task_of().read(file))
    assert [example.label for example in result] == [None] * 3
    assert result[2].inputs == (ENGLISH[2].strip(),) and str(result[2].location) == f"{file}:3"


@together(("left", "right"), [(3, 5), (5, 3), (0, 2), (1200, 1)])
def test_files_of_unequal_length_are_rejected_naming_both(tmp_path, left, right):
    file = written(tmp_path / "a.en", ["x"] * left)
    other = written(tmp_path / "a.de", ["y"] * right)
    assert refusal(lambda: task_of().read(file)).startswith(f"{file}: {left:,} lines, but {right:,} in {other}. Use")


def test_a_folder_without_such_files_is_rejected(tmp_path):
    aligned(tmp_path, "train")
    for task, names in ((task_of(text=["fr"]), "train.fr or val.fr"), (task_of("wmt14", ["cs"]), "newstest2013.cs")):
        message = refusal(lambda task=task: split_files(task, tmp_path, "train"))
        assert names in message and message.endswith("Set task.text and task.label to suffixes")
    assert "no such folder" in refusal(lambda: split_files(task_of(), tmp_path / "none", "train"))
    assert "cannot be read" in refusal(lambda: task_of().read(tmp_path / "none.en"))


@together("name", ["parallel_text", "wmt14", "text_table"])
def test_unsuitable_column_names_are_rejected(name):
    message = refusal(lambda: task_of(name, ["en", "fr"]), ConfigError)
    assert message == f'task.text: 2 names, but "{name}" reads one. Name one'
    assert refusal(lambda: task_of(name, ["en"], "en"), ConfigError).startswith('task.label: "en" is also task.text')


def test_summaries_are_a_line_a_story(tmp_path):
    task = task_of("cnn_dm")
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.source").write_text(f"{name} one .\n{name} two .\n")
        (tmp_path / f"{name}.target").write_text("summary one .\nsummary two .\n")
    assert set(task.files(tmp_path)) == {"train", "validation", "test"}
    (file,) = split_files(task, tmp_path, "validation")
    result = [(example.inputs[0], example.label) for example in task.read(file)]
    assert result == [("val one .", "summary one ."), ("val two .", "summary two .")]
    (tmp_path / "val.target").write_text("summary one .\n")
    assert "2 lines, but 1 in" in refusal(lambda: task.read(file))


@pytest.mark.parametrize("nested", [False, True])
def test_a_dataset_of_translations_is_read_by_its_columns(tmp_path, nested):
    pairs = [{"en": "a dog", "de": "ein Hund"}, {"en": "two men", "de": "zwei Männer"}]
    data = Dataset.from_list([{"translation": pair} for pair in pairs] if nested else pairs)
    DatasetDict(train=data, validation=data, test=data).save_to_disk(str(tmp_path / "data"))
    task = task_of("wmt14" if nested else "parallel_text", ["de"], "en")
    (file,) = task.files(tmp_path / "data")["test"]
    assert [(x.inputs, x.label) for x in task.read(file)] == [((pair["de"],), pair["en"]) for pair in pairs]
