"""The XML files of the RTE challenges, in small files of their form."""

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.catalog import build_task
from tests.helpers.commands import refusal

TASK = build_task(TaskConfig(name="rte_challenge"))

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
        message = refusal(lambda: TASK.read(file))
        assert message.startswith(str(file))
        return message.removeprefix(str(file))

    return read


def test_pairs_labels_ids_and_lines_equal_the_file(tmp_path):
    file = tmp_path / "rte1_dev.xml"
    file.write_text(FIRST, encoding="utf-8")
    first, second = TASK.read(file)
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


@pytest.mark.parametrize(
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
