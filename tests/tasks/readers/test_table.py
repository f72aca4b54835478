"""User tables: fields, line numbers, columns, classes, numbers, texts, answers and rejected files."""

import csv
import gzip
import json
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.data.corpora import CORPORA
from megasparse.errors import DataError
from megasparse.runs.api import load_finetune_config
from megasparse.tasks.catalog import build_task
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.readers.rows import comma_separated, field, json_lines, lines, strict, tab_separated
from megasparse.tasks.run import read_examples, read_files
from megasparse.tasks.task import SourceLocation, split_files
from tests.data.corpora.pictures import write_zip
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import reviews, table

TABLES = pytest.mark.parametrize(("reader", "mark"), [(tab_separated, "\t"), (comma_separated, ",")])


@pytest.fixture
def made(tmp_path):
    return tmp_path / "rows.txt"


def rejection(reader, made, *arguments):
    with pytest.raises(DataError) as caught:
        list(strict(reader(made, *arguments)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_column_may_contain_semicolons(made):
    made.write_text("text\nGood; really\n")
    assert [row for _, row in comma_separated(made)] == [{"text": "Good; really"}]


@together("end", ["\n", "\r\n"])
@together("last", [True, False])
def test_lines_end_in_lf_or_cr_lf_the_last_one_also_in_nothing(made, end, last):
    made.write_bytes((end.join(["a", "", "b c "]) + end * last).encode())
    assert [(location.line, line) for location, line in lines(made)] == [(1, "a"), (2, ""), (3, "b c ")]


@pytest.mark.parametrize(
    ("reader", "form"),
    [
        (tab_separated, "text\tlabel\n{}\t1\n"),
        (comma_separated, '"text",label\n"{}",1\n'),
        (json_lines, '{{"text": "{}"}}\n'),
    ],
)
def test_unicode_line_separators_stay_and_a_byte_order_mark_is_removed(made, reader, form):
    text = "\ufeffone\u2028two\u0085three" + "\x0bfour\x1cfive\rsix" * (reader is not json_lines)
    made.write_text("\ufeff" + form.format(text), encoding="utf-8", newline="")
    assert [row["text"] for _, row in reader(made)] == [text]
    made.write_text(f"\ufeff{text}\n", encoding="utf-8", newline="")
    assert [line for _, line in lines(made)] == [text]


@together("reader", [lines, tab_separated, comma_separated, json_lines])
def test_latin_1_is_rejected_naming_line_and_column(made, reader):
    made.write_bytes("a\ncafé\n".encode("latin-1") if reader is not json_lines else '{}\n{"é": 1}\n'.encode("latin-1"))
    column = 3 if reader is json_lines else 4
    message = rejection(reader, made)
    assert message.startswith(f"{made}:2: not UTF-8 (byte 0xe9 in column {column})") and "-f latin1" in message
    made.write_bytes("a\ncafé\n".encode("utf-16"))
    assert "iconv -f utf-16 -t utf-8" in rejection(reader, made)


def test_a_compressed_file_reads_as_the_file_and_a_damaged_one_is_rejected(tmp_path):
    text = "".join(f"line {i} \u2028\n" for i in range(2000))
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    assert [line for _, line in lines(packed)] == [line for _, line in lines(plain)]
    whole = packed.read_bytes()
    for content in (whole[:-20], b"no gzip", whole[:200] + bytes(200) + whole[400:]):
        packed.write_bytes(content)
        assert f"{packed}: cannot be read" in rejection(lines, packed)


def test_tab_separated_fields_keep_quotation_marks_and_spaces(made):
    made.write_bytes(b'text\tlabel\n"He said ""no\t 1\r\n\'a, b \t\n')
    result = list(tab_separated(made))
    assert [row for _, row in result] == [{"text": '"He said ""no', "label": " 1"}, {"text": "'a, b ", "label": ""}]
    assert [str(location) for location, _ in result] == [f"{made}:2", f"{made}:3"]


@TABLES
@together("fields", [1, 3])
def test_a_row_of_another_number_of_fields_is_rejected(made, reader, mark, fields):
    made.write_text(f"text{mark}label\na{mark}1\n{mark.join('bcd'[:fields])}\n")
    assert rejection(reader, made).startswith(f"{made}:3: {fields} fields instead of 2 (text, label)")


@TABLES
def test_an_empty_file_is_rejected_and_a_bare_header_has_no_rows(made, reader, mark):
    made.write_text("")
    assert rejection(reader, made).startswith(f"{made}: is empty")
    assert list(reader(made, ["text"])) == []
    made.write_text(f"text{mark}label\n")
    assert list(reader(made)) == []


@TABLES
def test_two_columns_of_one_name_are_rejected(made, reader, mark):
    made.write_text(mark.join(["text", "label", "text"]) + "\n" + mark.join("abc") + "\n")
    assert rejection(reader, made).startswith(f'{made}:1: the column name "text" occurs twice')
    made.write_text(mark.join(map(str, [*range(100_000), 99_999])) + "\n")
    assert rejection(reader, made).startswith(f'{made}:1: the column name "99999" occurs twice')


def test_quoted_fields_equal_the_standard_library_with_their_first_line(made):
    rows = [["text", "label"], ["a, b", "1"], ["two\nlines\r\nand a third\n", 'said "no"'], ["", " x "]]
    rows += [["\u2028 \\ \\n 'quoted' \t", "2"], ["last", "3"]]
    with open(made, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)  # ends rows with CR LF
    result = list(comma_separated(made))
    assert [list(row.values()) for _, row in result] == rows[1:]
    assert [location.line for location, _ in result] == [2, 3, 7, 8, 9]
    assert all(location.file == made for location, _ in result)


@pytest.mark.parametrize("mark", ";\t")
def test_semicolons_or_tabs_separate_fields_if_the_first_line_has_no_comma(made, mark):
    made.write_text(f'text{mark}"label"\n"1,5 {mark}"{mark}" good "\n')
    assert [row for _, row in comma_separated(made)] == [{"text": f"1,5 {mark}", "label": " good "}]


@together(
    ("text", "line", "problem", "hint"),
    [
        ('text,label\na,1\n"b,2\nc,3\n', 3, "not CSV (", "Close or double the quotation mark"),  # never closed
        ('text,label\n"a,1\n"b",2\n', 2, "not CSV (", "Close or double the quotation mark"),  # closed by the next row's
        ('text,label\n"a" b,1\n', 2, "not CSV (", "Close or double the quotation mark"),
        ("text,label\na\rb,1\n", 2, "not CSV (", "end lines in LF"),
        ("text,label\ra,1\rb,2\r", 1, "not CSV (", "end lines in LF"),
        ('"text;label"\n"a;1"\n', 1, "contains one column", "Save it with commas"),
    ],
)
def test_malformed_csv_is_rejected_at_the_first_line_of_its_row_with_a_hint(made, text, line, problem, hint):
    made.write_text(text, newline="")
    message = rejection(comma_separated, made)
    assert message.startswith(f"{made}:{line}: {problem}") and hint in message


@together(
    ("line", "problem"),
    [
        ('{"a": 1', "not JSON ("),
        ('{"a": 1} {"a": 2}', "not JSON ("),
        ("[1]", "not a JSON object"),
        ('"a"', "not a JSON object"),
        ('{"a": NaN}', "not JSON (NaN is not JSON)"),
        ('{"a": 1, "b": 2, "a": 3}', 'not JSON (the key "a" is given twice)'),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_line_without_a_json_object_is_rejected(made, line, problem):
    made.write_text('{"a": 0}\n' + line + "\n")
    assert rejection(json_lines, made).startswith(f"{made}:2: {problem}")


ROWS = ['{"text": "a", "label": "x"}', '{"text": "b", "label": "y"}']


@together("suffix", ["", ".gz", ".zip"])
@together(
    ("content", "line", "hint"),
    [
        ("\r".join(ROWS).encode(), 1, "one object per line"),
        (",\n".join(ROWS).encode(), 1, "one object per line"),
        ("\n".join([ROWS[0], ROWS[1][:-1] + ",}"]).encode(), 2, "comma before the closing bracket"),
        ("".join(ROWS).encode(), 1, "one object per line, as jq -c ."),
        ("\n".join(ROWS).replace('"', "'").encode(), 1, "in double quotes"),
        (f"[{','.join(ROWS)}]".encode(), 1, "jq -c '.[]'"),
        (f"[\n{','.join(ROWS)}\n]".encode(), 1, "jq -c '.[]'"),
        ("\n".join([ROWS[0], ROWS[1].replace("b", "ü")]).encode("latin1"), 2, "iconv -f latin1 -t utf-8"),
        ("\n".join(ROWS).encode("utf-16"), 1, "iconv -f utf-16 -t utf-8"),
    ],
)
def test_the_hint_about_a_json_line_names_the_mistake_for_tasks_and_corpora(tmp_path, content, line, hint, suffix):
    made = tmp_path / f"a.jsonl{suffix}"
    if suffix == ".zip":
        archive(made, ("a.jsonl", content))
    else:
        made.write_bytes(gzip.compress(content) if suffix else content)
    message = rejection(json_lines, made)
    assert message.startswith(f"{made}:{line}: not ") and hint in message
    options = {"column": "text", "split": None, "deduplicate": False}
    with pytest.raises(DataError) as caught:
        CORPORA["jsonl"].open([str(made)], None, tmp_path, options, 1)
    assert hint in str(caught.value) and (f"record {line} here" in str(caught.value) or b"\0" in content)


@TABLES
def test_column_names_have_no_white_space_around_them(made, reader, mark):
    made.write_text(f"text {mark} a label\n b{mark}1\n")
    ((location, row),) = reader(made)
    assert row == {"text": " b", "a label": "1"} and field(row, "text ", location) == " b"


def test_a_missing_column_is_named_with_its_nearest(made):
    location = SourceLocation(made, 3)
    assert field({"text": "a"}, "text", location) == "a"
    with pytest.raises(DataError) as caught:
        field({"text": "a", "label": "b"}, "texts", location)
    assert str(caught.value) == f'{made}:3: missing column "texts". Did you mean "text"?'
    with pytest.raises(DataError, match=r"Known here: 0, 1, .* and 99,940 more$"):
        field({str(number): "" for number in range(100_000)}, "text", location)


def archive(made, *members):
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members:
            out.writestr(name, content)
    return made


def test_the_one_file_of_a_zip_archive_is_read_where_it_is(tmp_path):
    made = archive(tmp_path / "a.zip", ("inner/", ""), ("inner/rows.csv", '\ufefftext,label\r\n"é\nb",1\n'.encode()))
    ((location, row),) = comma_separated(made)
    assert (str(location), row) == (f"{made}:2", {"text": "é\nb", "label": "1"})
    assert [line for _, line in lines(made)] == ["text,label", '"é', 'b",1']
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_a_damaged_zip_archive_is_rejected(tmp_path):
    made = archive(tmp_path / "a.zip", ("a.csv", "".join(f"{n * n}\n" for n in range(1000))))
    whole = made.read_bytes()
    for content in (whole[:-30], whole[:200] + bytes([whole[200] ^ 8]) + whole[201:], b"no archive"):
        made.write_bytes(content)
        assert rejection(lines, made).startswith(f"{made}: cannot be read (")
    encrypted = bytearray(whole)
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        encrypted[whole.index(mark) + offset] |= 1
    made.write_bytes(encrypted)
    assert "encrypted" in rejection(lines, made)


TEXTS = ['a "good" film, again', "two\nlines", "\u2028 plain ", "x"]


def write(file, columns, *rows):
    return table(file, rows, columns)


def config_of(file, **settings):
    return TaskConfig(name="table", source=str(file), **settings)


def task_of(file, **settings):
    return build_task(config_of(file, **settings))


@together("suffix", [".csv", ".tsv", ".jsonl", ".CSV", ".csv.gz"])
def test_rows_become_examples_in_their_order(tmp_path, suffix):
    texts = [text.replace("\n", " ") for text in TEXTS] if suffix == ".tsv" else TEXTS
    rows = [(n, text, "ab"[n % 2]) for n, text in enumerate(texts)]
    task = task_of(write(tmp_path / f"train{suffix}", ("number", "text", "label"), *rows))
    (file,) = split_files(task, tmp_path / f"train{suffix}", "train")
    result = list(task.read(file))
    assert [example.inputs for example in result] == [(text,) for text in texts]
    assert [example.label for example in result] == [0, 1, 0, 1] and task.classes == ("a", "b")
    assert [example.name for example in result] == ["0", "1", "2", "3"]
    lines = {".tsv": [2, 3, 4, 5], ".jsonl": [1, 2, 3, 4]}.get(suffix, [2, 3, 5, 6])
    assert [str(example.location) for example in result] == [f"{file}:{line}" for line in lines]
    assert task.metrics == ("accuracy", "macro_f1")


@together(
    ("labels", "classes"),
    [
        (["10", "9", "2", "9"], ("2", "9", "10")),
        (["1e1", "-3", ".5", "+2", "2.0"], ("-3", ".5", "+2", "2.0", "1e1")),
        (["10", "9", "b2"], ("10", "9", "b2")),
        (["nan", "2", "10"], ("10", "2", "nan")),
        (["1_0", "9"], ("1_0", "9")),
        (["pos", "neg", "Pos"], ("Pos", "neg", "pos")),
    ],
)
def test_classes_come_from_the_training_file_in_order(tmp_path, labels, classes):
    file = write(tmp_path / "a.csv", ("text", "label"), *(("x", label) for label in labels))
    task = task_of(file)
    assert task.classes == classes and [task.classes[example.label] for example in task.read(file)] == labels


def test_given_classes_keep_their_order_and_need_no_training_file(tmp_path):
    task = task_of(tmp_path / "none.csv", labels=["pos", "neg"])
    assert task.classes == ("pos", "neg")
    file = write(tmp_path / "test.csv", ("text", "label"), ("x", "neg"), ("x", "pos"))
    assert [example.label for example in task.read(file)] == [1, 0]


@pytest.mark.parametrize("labels", [None, []])
def test_a_resolved_configuration_builds_the_same_task_without_the_training_file(tmp_path, labels):
    file = write(tmp_path / "train.csv", ("text", "label"), *(("x", label) for label in ("10", "9", "2")))
    task = task_of(file, labels=labels)
    resolved = TaskConfig.model_validate_json(task.config.model_dump_json())
    assert resolved.labels == (["2", "9", "10"] if labels is None else [])
    assert resolved.model_copy(update={"labels": labels}) == config_of(file, labels=labels)
    other = file.rename(tmp_path / "other.csv")
    again = build_task(resolved)
    assert again.classes == task.classes and again.metrics == task.metrics
    assert list(again.read(other)) == list(task.read(other))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_task_without_classes_predicts_numbers(tmp_path, suffix):
    values = ["3.5", "-1e-2", "4", "0"] if suffix == ".csv" else [3.5, -1e-2, 4, "0"]
    file = write(tmp_path / f"a{suffix}", ("text", "label"), *(("x", value) for value in values))
    task = task_of(file, labels=[])
    result = [example.label for example in task.read(file)]
    assert task.classes is None and result == [3.5, -0.01, 4.0, 0.0] and {type(label) for label in result} == {float}
    assert task.metrics == ("pearson", "spearman") and set(task.metrics) <= set(METRICS)
    assert METRICS[task.metrics[0]](np.array(result), np.array(result)) == pytest.approx(1.0)


COLUMNS, NAMED = ("text", "label"), "Set the name of the column by"


@together(
    ("suffix", "columns", "rows", "settings", "said"),
    [
        (".csv", ("text", "labels"), [("x", "a"), ("y", "b")], {},
         f':2: missing column "label". Did you mean "labels"? {NAMED} task.label'),
        (".csv", ("review", "stars"), [("x", "a"), ("y", "b")], {},
         f':2: missing column "label". Known here: review, stars. {NAMED} task.label'),
        (".csv", ("review", "label"), [("x", 1), ("y", 2)], {"text": ["reviews"]},
         f':2: missing column "reviews". Did you mean "review"? {NAMED} task.text'),
        *[(".jsonl", COLUMNS, [("x", "a"), ("y", value)], {"labels": ["a", "b"]},
           f':2: {json.dumps(value)} in the column "label" is not a label. Write a text')
          for value in (None, ["a"], {"a": 1})],
        (".csv", COLUMNS, [("x", "pos"), ("y", "Pos")], {"labels": ["neg", "pos"]},
         ':3: "Pos" is not a label of table. Did you mean "pos"?'),
        *[(".csv", COLUMNS, [("x", "1"), ("y", value)], {"labels": []},
           f':3: "{value}" in the column "label" is not a float32 number. '
           "Write one, such as 3.5; or predict classes: --set task.labels=null")
          for value in ("four", "nan", "inf", "1e999", "-4e38", "1,5", "0x10", "1_0", "true", "٣")],
        *[(".jsonl", COLUMNS, [("x", 1), (value, 2)], {},
           f':2: {json.dumps(value)} in the column "text" is not a text. Quote it')
          for value in (None, 3, ["x"])],
        *[(".csv", COLUMNS, rows, {}, f': {len(rows[:1])} labels in the column "label" ({"a" * len(rows[:1])}). '
           "Use a file with two classes or more, or list them in task.labels")
          for rows in ([], [("x", "a")], [("x", "a"), ("y", "a")])],
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_rejected(tmp_path, suffix, columns, rows, settings, said):
    file = write(tmp_path / f"a{suffix}", columns, *rows)
    assert refusal(lambda: task_of(file, **settings).read(file)) == f"{file}{said}"


@together(("suffix", "empty"), [(".csv", ""), (".tsv", ""), (".csv", " "), (".jsonl", "")])
@together("labels", [None, [], ["1", "2"]])
def test_an_empty_label_is_rejected(tmp_path, suffix, empty, labels):
    file = write(tmp_path / f"a{suffix}", ("text", "label"), ("x", "1"), ("y", empty), ("z", "2"))
    line = 2 if suffix == ".jsonl" else 3
    message = refusal(lambda: task_of(file, labels=labels).read(file))
    assert message == f'{file}:{line}: no label in the column "label". Write one, or remove the row'


@pytest.mark.parametrize("name", ["finetune/quick", "finetune/reviews"])
def test_the_shipped_table_is_read_in_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_finetune_config(name)
    train, held_out = read_examples(build_task(config.task), config)
    assert (len(train), len(held_out)) == (540, 60)
    assert {example.label for example in held_out} == {0, 1}
    Path("configs/finetune").mkdir(parents=True)
    reviews(Path(config.task.source), 40)  # a file of one's own of that name comes first
    assert len(read_examples(build_task(config.task), config)[0]) == 36


@pytest.fixture(params=["saved", "exported"])
def dataset(tmp_path, request):
    folder = tmp_path / "data"
    folder.mkdir()
    names = datasets.ClassLabel(names=["negative", "positive"])
    splits = datasets.DatasetDict()
    for split, labels in (("train", [1, 0, 1]), ("validation", [0]), ("test", [-1, -1])):
        columns = {"sentence": [f"{split} {n}" for n in range(len(labels))], "label": labels, "idx": range(len(labels))}
        splits[split] = datasets.Dataset.from_dict(columns).cast_column("label", names)
        if request.param == "exported":
            splits[split].to_parquet(folder / f"{split}-00000-of-00001.parquet")
    if request.param == "saved":
        splits.save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize(("name", "classes"), [("sst2", ("0", "1")), ("table", ("negative", "positive"))])
def test_a_dataset_of_hugging_face_is_read_by_its_splits(dataset, name, classes):
    task = build_task(TaskConfig(name=name, source=str(dataset), text=["sentence"]))
    result = {split: list(read_files(task, files)) for split, files in task.files(dataset).items()}
    assert task.classes == classes
    assert {split: [each.label for each in examples] for split, examples in result.items()} == {
        "train": [1, 0, 1], "validation": [0], "test": [None, None],
    }  # fmt: skip
    assert [each.inputs for each in result["train"]] == [("train 0",), ("train 1",), ("train 2",)]
    assert [(each.name, str(each.location)) for each in result["train"][1:]] == [
        ("1", f"{dataset}:2"), ("2", f"{dataset}:3"),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r'data:1: missing column "text"'):
        list(task_of(dataset, labels=["a", "b"]).read(Path(f"{dataset}#train")))
    with pytest.raises(DataError, match=r'data: contains no split "extra"\. Its splits: train, validation, test'):
        list(task.read(Path(f"{dataset}#extra")))


def test_a_dataset_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no more")
    assert "cannot be read as a dataset (" in refusal(lambda: build_task(TaskConfig(name="sst2")).files(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    result = refusal(lambda: split_files(build_task(TaskConfig(name="sst2")), Path("hub"), "train"))
    assert result.startswith("hf://datasets/nyu-mll/glue/sst2: cannot be read as a dataset (")


@together(("name", "text", "label"), [("listops", "Source", "Target"), ("ag_news", "text", "label")])
def test_a_value_of_another_type_is_named_by_its_row(name, text, label, tmp_path):
    datasets.Dataset.from_dict({text: [None], label: ["1"]}).save_to_disk(str(tmp_path))
    assert refusal(lambda: build_task(TaskConfig(name=name)).read(tmp_path)).startswith(f"{tmp_path}:1: ")


ROWS = [("It rained, all day.\nAll night too.", "Rain"), ('He said "no".', " Ein Nein – é ")]
NEWS_COLUMNS = ["article_id", "publish_date", "article_source_link", "title", "subtitle", "text"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".tsv"])
def test_a_row_is_a_text_and_its_answer(tmp_path, suffix):
    file, rows = tmp_path / f"mine{suffix}", ROWS if suffix != ".tsv" else [(a.replace("\n", " "), b) for a, b in ROWS]
    table(file, [(b, 1, a) for a, b in rows], ("predicted", "n", "body"))
    task = build_task(TaskConfig(name="text_table", text=["body"], label="predicted"))
    assert split_files(task, file, "train") == [file] and task.form == "texts"
    result = list(task.read(file))
    assert [(each.inputs, each.label) for each in result] == [((a,), b.strip()) for a, b in rows]
    assert [each.name for each in result] == ["0", "1"]
    assert result[1].location.line == {".csv": 4, ".tsv": 3, ".jsonl": 2}[suffix]


def test_eight_of_ten_articles_train_and_a_missing_side_is_named(tmp_path, capsys):
    rows = [[n, "2017/2/7", "http://x", f"title {n}", "", f"text {n}, é"] for n in range(25)]
    for number, column in ((2, "title"), (3, "text"), (10, "title")):
        rows[number][NEWS_COLUMNS.index(column)] = " "
    content = table(tmp_path / "rows.csv", rows, NEWS_COLUMNS).read_bytes()
    file = write_zip(tmp_path / "NewsArticles.zip", {"NewsArticles.csv": content})
    task = build_task(TaskConfig(name="headlines"))
    result = {}
    for split, (part,) in task.files(tmp_path).items():
        examples = list(task.read(part))
        assert all(each.location.file == file and each.location.line == int(each.name) + 2 for each in examples)
        assert all((each.inputs[0], each.label) == (f"text {each.name}, é", f"title {each.name}") for each in examples)
        result[split] = [int(each.name) for each in examples]
    assert result["test"] == [0, 20] and result["validation"] == [1, 11, 21]
    assert result["train"] == [n for n in range(4, 25) if n % 10 > 1]
    assert capsys.readouterr().err.splitlines() == [
        f"{file}#train: left out 2 articles without a title or a text: lines 4, 5",
        f"{file}#test: left out 1 articles without a title or a text: lines 12",
    ]


@together("labels", [None, ["bad", "cafe\u0301"]])
def test_labels_that_look_alike_are_one_class(tmp_path, labels):
    alike = ["caf\u00e9", "cafe\u0301 ", "\u00a0caf\u00e9", "\ufeffcaf\u00e9\u200b\t", " bad"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"a,{label}\n" for label in alike), encoding="utf-8")
    task = build_task(TaskConfig(name="table", source=str(tmp_path / "a.csv"), labels=labels))
    assert task.classes == ("bad", "caf\u00e9")
    assert [example.label for example in task.read(tmp_path / "a.csv")] == [1, 1, 1, 1, 0]
