"""DeepSpeed's engine in one process; on two ranks see tests/distributed/test_engine.py."""

import logging
import sys

from megasparse.training.engines.deepspeed import _lines_in


def test_what_deepspeed_prints_and_logs_goes_into_the_runs_folder(tmp_path, capsys, monkeypatch):
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stdout)])  # as DeepSpeed makes one when imported
    for run, word in ((tmp_path, "first"), (tmp_path, "second"), (tmp_path / "missing", "third")):
        with _lines_in(run):
            print(f"{word} MA 0.51 GB")
            logger.warning("%s setting", word)
    logger.warning("afterwards")
    log = (tmp_path / "deepspeed.log").read_text()
    assert log == "first MA 0.51 GB\nfirst setting\nsecond MA 0.51 GB\nsecond setting\n"
    assert capsys.readouterr().out == "afterwards\n" and not (tmp_path / "missing").exists()
