"""Checkpoints on an independent S3 server: uploads in parts, and runs that resume on one machine after another.

Needs `pip install 'moto[server]' s3fs` (together, for one botocore); `dev` lacks it because it brings 45 packages."""

import random
import shutil
import time
from collections.abc import Iterator

import pytest
import s3fs
import torch

from megasparse.data import urls
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers.faults import Run, running
from tests.helpers.tiny import TinyModel, identity_of, tiny_config, tiny_engine

pytestmark = pytest.mark.soak


@pytest.fixture
def store(monkeypatch) -> Iterator[s3fs.S3FileSystem]:
    """moto's server, which has the bucket `runs`; the environment names it to s3fs."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    files = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    endpoint = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in {**names, **files, **endpoint}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    urls.store.cache_clear()
    store = s3fs.S3FileSystem(use_listings_cache=False)
    store.mkdir("runs")
    yield store
    store.rm("runs", recursive=True)
    server.stop()
    urls.store.cache_clear()


def test_a_checkpoint_is_uploaded_in_parts(store, tmp_path):
    """A file of 120 MB has three."""
    config = tiny_config(tmp_path / "run", checkpoint={"keep": 2, "bucket": "s3://runs/large"})
    saver, engine = Saver(identity_of(config), Ranks()), tiny_engine(config, model=TinyModel(width=3100))
    saver.begin_uploads()
    for step in range(1, 5):
        saver.save(engine, step, step * 8, {})
    saver.finish_uploads()
    elsewhere = tiny_config(tmp_path / "elsewhere", checkpoint={"keep": 2, "bucket": "s3://runs/large"})
    fetched, local = find_start(identity_of(elsewhere), Ranks()), Checkpoint.open(saver.directory / "00000004")
    assert fetched is not None and fetched.step == 4
    assert torch.equal(fetched.tensor("weight", "hidden.weight"), local.tensor("weight", "hidden.weight"))
    names = {name.split("/")[2] for name in store.find("runs/large")}
    assert names == {"00000003", "00000004", "latest", "owner"}


def test_runs_on_four_machines_each_killed_resume_from_the_bucket(store, data, clean, tmp_path, figures):
    """Two ranks each; all processes killed at a random moment, and the folder of the run deleted."""
    run = Run(tmp_path, data, checkpoint={"every": 1, "keep": 2, "bucket": "s3://runs/killed"})
    draw, losses = random.Random(0), {}

    def uploaded() -> int:
        return max((int(path.split("/")[-2]) for path in store.glob(f"runs/killed/*/{MANIFEST}")), default=0)

    with running(run):
        for machine in range(4):
            before = uploaded()
            run.start()
            if machine < 3:
                run.wait_for_step(before + 4)
                time.sleep(draw.uniform(0, 1))
                run.kill_all()
            else:
                ended = run.wait()
                assert ended.code == 0, ended.said
            steps = run.losses()
            assert min(steps) == before + 1
            assert all(losses.get(step, loss) == loss for step, loss in steps.items())
            losses |= steps
            if machine < 3:
                shutil.rmtree(run.directory)
    assert losses == clean.losses() and uploaded() == 20
    figures(machines=4, bit_differences=0)
