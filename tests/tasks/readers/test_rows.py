"""Files of rows: fields, line numbers and rejected files."""

import csv
import gzip
import zipfile

import pytest

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import comma_separated, field, json_lines, lines, strict, tab_separated
from megasparse.tasks.task import SourceLocation

TABLES = pytest.mark.parametrize(("reader", "mark"), [(tab_separated, "\t"), (comma_separated, ",")])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rows.txt"


def refusal(reader, file, *arguments):
    with pytest.raises(DataError) as caught:
        list(strict(reader(file, *arguments)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_the_error_names_semicolons_or_tabs_as_separators(file, delimiter):
    file.write_text(f"text{delimiter}label\nGood, really{delimiter}1\n")
    assert "Save it with commas between the fields, or with tabs and the suffix .tsv" in refusal(comma_separated, file)
    file.write_text("text\nGood; really\n")
    assert [row for _, row in comma_separated(file)] == [{"text": "Good; really"}]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_in_lf_or_cr_lf_the_last_one_also_in_nothing(file, end, last):
    file.write_bytes((end.join(["a", "", "b c "]) + end * last).encode())
    assert [(location.line, line) for location, line in lines(file)] == [(1, "a"), (2, ""), (3, "b c ")]


@pytest.mark.parametrize(
    ("reader", "form"),
    [
        (tab_separated, "text\tlabel\n{}\t1\n"),
        (comma_separated, '"text",label\n"{}",1\n'),
        (json_lines, '{{"text": "{}"}}\n'),
    ],
)
def test_unicode_line_separators_stay_and_a_byte_order_mark_is_removed(file, reader, form):
    text = "\ufeffone\u2028two\u0085three" + "\x0bfour\x1cfive\rsix" * (reader is not json_lines)
    file.write_text("\ufeff" + form.format(text), encoding="utf-8", newline="")
    assert [row["text"] for _, row in reader(file)] == [text]
    file.write_text(f"\ufeff{text}\n", encoding="utf-8", newline="")
    assert [line for _, line in lines(file)] == [text]


@pytest.mark.parametrize("reader", [lines, tab_separated, comma_separated, json_lines])
def test_latin_1_is_rejected_naming_line_and_column(file, reader):
    file.write_bytes("a\ncafé\n".encode("latin-1") if reader is not json_lines else '{}\n{"é": 1}\n'.encode("latin-1"))
    column = 3 if reader is json_lines else 4
    message = refusal(reader, file)
    assert message.startswith(f"{file}:2: not UTF-8 (byte 0xe9 in column {column})") and "-f latin1" in message
    file.write_bytes("a\ncafé\n".encode("utf-16"))
    assert "iconv -f utf-16 -t utf-8" in refusal(reader, file)


def test_a_compressed_file_reads_as_the_file_and_a_damaged_one_is_rejected(tmp_path):
    text = "".join(f"line {i} \u2028\n" for i in range(2000))
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    assert [line for _, line in lines(packed)] == [line for _, line in lines(plain)]
    whole = packed.read_bytes()
    for content in (whole[:-20], b"no gzip", whole[:200] + bytes(200) + whole[400:]):
        packed.write_bytes(content)
        assert f"{packed}: cannot be read" in refusal(lines, packed)


def test_tab_separated_fields_keep_quotation_marks_and_spaces(file):
    file.write_bytes(b'text\tlabel\n"He said ""no\t 1\r\n\'a, b \t\n')
    result = list(tab_separated(file))
    assert [row for _, row in result] == [{"text": '"He said ""no', "label": " 1"}, {"text": "'a, b ", "label": ""}]
    assert [str(location) for location, _ in result] == [f"{file}:2", f"{file}:3"]


@TABLES
@pytest.mark.parametrize("fields", [1, 3])
def test_a_row_of_another_number_of_fields_is_rejected(file, reader, mark, fields):
    file.write_text(f"text{mark}label\na{mark}1\n{mark.join('bcd'[:fields])}\n")
    message = refusal(reader, file)
    assert message.startswith(f"{file}:3: {fields} fields instead of 2 (text, label)")


@TABLES
def test_an_empty_file_is_rejected_and_a_bare_header_has_no_rows(file, reader, mark):
    file.write_text("")
    assert refusal(reader, file).startswith(f"{file}: is empty")
    assert list(reader(file, ["text"])) == []
    file.write_text(f"text{mark}label\n")
    assert list(reader(file)) == []


@TABLES
def test_two_columns_of_one_name_are_rejected(file, reader, mark):
    file.write_text(mark.join(["text", "label", "text"]) + "\n" + mark.join("abc") + "\n")
    assert refusal(reader, file).startswith(f'{file}:1: the column name "text" occurs twice')
    file.write_text(mark.join(map(str, [*range(100_000), 99_999])) + "\n")
    assert refusal(reader, file).startswith(f'{file}:1: the column name "99999" occurs twice')


def test_a_line_of_a_million_objects_is_not_parsed(file):
    file.write_text('{"a": [' + "{}," * (1 << 20) + "0]}\n")
    assert refusal(json_lines, file).startswith(f"{file}:1: not JSON (more than 1,048,576 values)")


def test_quoted_fields_equal_the_standard_library_with_their_first_line(file):
    rows = [["text", "label"], ["a, b", "1"], ["two\nlines\r\nand a third\n", 'said "no"'], ["", " x "]]
    rows += [["\u2028 \\ \\n 'quoted' \t", "2"], ["last", "3"]]
    with open(file, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)  # ends rows with CR LF
    result = list(comma_separated(file))
    assert [list(row.values()) for _, row in result] == rows[1:]
    assert [location.line for location, _ in result] == [2, 3, 7, 8, 9]
    assert all(location.file == file for location, _ in result)


@pytest.mark.parametrize(
    ("text", "line", "problem", "hint"),
    [
        ('text,label\na,1\n"b,2\nc,3\n', 3, "not CSV (", "Close the quotation mark"),  # never closed
        ('text,label\n"a,1\n"b",2\n', 2, "not CSV (", "Close the quotation mark"),  # closed by the next row's
        ('text,label\n"a" b,1\n', 2, "not CSV (", "Close the quotation mark"),
        ("text,label\na\rb,1\n", 2, "not CSV (", "A line ends in CR"),
        ("text,label\ra,1\rb,2\r", 1, "not CSV (", "A line ends in CR"),
        ('"text";"label"\n"a";"1"\n', 1, "not CSV (", "Save it with commas"),
        ("text;label\na;1\n", 1, "contains one column", "Save it with commas"),
    ],
)
def test_malformed_csv_is_rejected_at_the_first_line_of_its_row_with_a_hint(file, text, line, problem, hint):
    file.write_text(text, newline="")
    message = refusal(comma_separated, file)
    assert message.startswith(f"{file}:{line}: {problem}") and hint in message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1', "not JSON ("),
        ('{"a": 1} {"a": 2}', "not JSON ("),
        ("[1]", "not a JSON object"),
        ('"a"', "not a JSON object"),
        ('{"a": NaN}', "not JSON (NaN is not a JSON number)"),
        ('{"a": 1, "b": 2, "a": 3}', 'not JSON (the key "a" occurs twice)'),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_line_without_a_json_object_is_rejected(file, line, problem):
    file.write_text('{"a": 0}\n' + line + "\n")
    assert refusal(json_lines, file).startswith(f"{file}:2: {problem}")


def test_a_missing_column_is_named_with_its_nearest(file):
    location = SourceLocation(file, 3)
    assert field({"text": "a"}, "text", location) == "a"
    with pytest.raises(DataError) as caught:
        field({"text": "a", "label": "b"}, "texts", location)
    assert str(caught.value) == f'{file}:3: missing column "texts". Did you mean "text"?'
    with pytest.raises(DataError, match=r"Known here: 0, 1, .* and 99,940 more$"):
        field({str(number): "" for number in range(100_000)}, "text", location)


def archive(file, *members):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members:
            out.writestr(name, content)
    return file


def test_the_one_file_of_a_zip_archive_is_read_where_it_is(tmp_path):
    file = archive(tmp_path / "a.zip", ("inner/", ""), ("inner/rows.csv", '\ufefftext,label\r\n"é\nb",1\n'.encode()))
    ((location, row),) = comma_separated(file)
    assert (str(location), row) == (f"{file}:2", {"text": "é\nb", "label": "1"})
    assert [line for _, line in lines(file)] == ["text,label", '"é', 'b",1']
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_a_damaged_zip_archive_is_rejected(tmp_path):
    file = archive(tmp_path / "a.zip", ("a.csv", "".join(f"{n * n}\n" for n in range(1000))))
    whole = file.read_bytes()
    for content in (whole[:-30], whole[:200] + bytes([whole[200] ^ 8]) + whole[201:], b"no archive"):
        file.write_bytes(content)
        assert refusal(lines, file).startswith(f"{file}: cannot be read (")
    encrypted = bytearray(whole)
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        encrypted[whole.index(mark) + offset] |= 1
    file.write_bytes(encrypted)
    assert "encrypted" in refusal(lines, file)
