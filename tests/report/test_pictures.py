"""Texts and pictures read from TensorBoard's files, against its own reader."""

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megasparse.report.pictures import read_board


def test_texts_and_pictures_are_those_of_tensorboards_own_reader(tmp_path):
    pictures = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for start in (0, 2):  # two processes, the second of which does step 2 again
        with SummaryWriter(str(tmp_path), filename_suffix=str(start)) as board:
            for step in range(start, start + 3):
                board.add_scalar("train/loss", 1.0, step)
                board.add_text("evaluation/sample", f"```\ntext {start} {step}\n```", step)
                board.add_image("quality/lsh/maps", pictures[step - start], step)
    theirs = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0})
    theirs.Reload()
    ours = read_board(tmp_path)
    assert ours.keys() == {"evaluation/sample", "quality/lsh/maps"}
    last = {event.step: event.encoded_image_string for event in theirs.Images("quality/lsh/maps")}
    assert dict(ours["quality/lsh/maps"]) == last and sorted(last) == [0, 1, 2, 3, 4]
    assert [shown.content for shown in ours["evaluation/sample"]] == [
        f"text {s} {n}" for s, n in zip("00222", range(5), strict=True)
    ]
    file = sorted(tmp_path.glob("events.*"))[-1]
    file.write_bytes(file.read_bytes()[:-10])  # it is being written
    assert len(read_board(tmp_path)["quality/lsh/maps"]) >= 4
