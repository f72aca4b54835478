"""Document retrieval of Long Range Arena (Tay et al. 2021): does one paper of the ACL Anthology Network cite the other?

Official files: new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv of lra_release/tsv_data: a
label (0 or 1, also written 0.0 or 1.0), two ids and two texts between tabs, without a header. The texts there are as
Python shows bytes, b'...', with escapes such as \\n and \\xe2. They are read as they stand, which is what Tay et al.'s
input pipeline does, so these quotation marks and escapes are part of what the model reads.
"""

from typing import ClassVar

from megasparse.tasks.readers.rows import RowTask
from megasparse.tasks.task import Example, SourceLocation

NUMBERS = {"0.0": "0", "1.0": "1"}


class AAN(RowTask):
    name = "aan"
    metrics = ("accuracy",)
    segments = 2
    towers = True
    classes = ("0", "1")
    official: ClassVar = {
        "train": "new_aan_pairs.train.tsv",
        "validation": "new_aan_pairs.eval.tsv",
        "test": "new_aan_pairs.test.tsv",
    }
    columns = ("label", "id1", "id2", "text1", "text2")

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        label = self.class_of(NUMBERS.get(row["label"], row["label"]), location)
        return Example((row["text1"], row["text2"]), label, location, f"{row['id1']} {row['id2']}")
