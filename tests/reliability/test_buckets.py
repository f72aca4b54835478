"""Checkpoints on an independent server of S3 that fails: complete or absent, and each machine goes on from there.

Needs `pip install 'moto[server]'`, which is not among what `dev` installs: it brings 45 packages.
"""

import random
import shutil
import time
from collections.abc import Iterator

import pytest
import s3fs
import torch
from tests.helpers.s3_proxy import S3Proxy, proxied

from megasparse.callbacks import silent
from megasparse.data import urls
from megasparse.training.checkpoints.bucket import Bucket
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers.faults import Run, running
from tests.helpers.tiny import TinyModel, identity_of, tiny_config, tiny_engine

pytestmark = pytest.mark.soak
BUCKET = "runs"
FAULTS: list[int | str] = ["refuse", "cut", "slow", "lost", 500, 503]


@pytest.fixture
def proxy(monkeypatch) -> Iterator[S3Proxy]:
    """A proxy before moto's server, which has the bucket `runs`; the environment says so to s3fs."""
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(urls, "LONGEST_PAUSE", 0.1)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        with proxied(*server.get_host_and_port()) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            s3fs.S3FileSystem.clear_instance_cache()
            urls.store.cache_clear()
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield proxy
            proxy.fault = lambda method, path: None
            s3fs.S3FileSystem().rm(BUCKET, recursive=True)
    finally:
        server.stop()
        urls.store.cache_clear()


def failing(proxy: S3Proxy, rate: float, seed: int) -> None:
    """Let a part of the requests fail from now on."""
    draw = random.Random(seed)
    proxy.fault = lambda method, path: draw.choice(FAULTS) if draw.random() < rate else None


@pytest.mark.parametrize("late", [False, True])
def test_every_kind_of_fault_at_every_kind_of_request(proxy, tmp_path, late, figures):
    """Uploads in parts too: a file of 120 MB has three. A checkpoint that is there opens, and the newest is found."""
    config = tiny_config(tmp_path / "run", checkpoint={"keep": 2, "bucket": "s3://runs/large"})
    saver, engine = Saver(identity_of(config), Ranks()), tiny_engine(config, model=TinyModel(width=3100))
    proxy.late = late
    saver.begin_uploads()
    for step in range(1, 7):
        failing(proxy, 0.2, step)
        saver.save(engine, step, step * 8, {})
        saver.finish_uploads()
        proxy.fault = lambda method, path: None
        assert Bucket("s3://runs/large", silent).newest() == step
    failing(proxy, 0.2, 0)
    elsewhere = tiny_config(tmp_path / "elsewhere", checkpoint={"keep": 2, "bucket": "s3://runs/large"})
    found = find_start(identity_of(elsewhere), Ranks())
    assert found is not None and found.step == 6
    there = Checkpoint.open(saver.directory / "00000006")
    assert torch.equal(found.tensor("weight", "hidden.weight"), there.tensor("weight", "hidden.weight"))
    happened = {line.split()[0] for line in proxy.faults}
    assert happened == {str(fault) for fault in FAULTS}
    assert any("partNumber" in line for line in proxy.faults)
    figures(faults=len(proxy.faults), checkpoints=6)
    proxy.fault = lambda method, path: None
    steps = {name.split("/")[2] for name in s3fs.S3FileSystem(use_listings_cache=False).find("runs/large")}
    assert {"00000005", "00000006", "latest", "owner"} <= steps and len(steps) <= (5 if late else 4)


def test_runs_on_four_machines_each_killed_go_on_from_the_bucket(proxy, data, clean, tmp_path, figures):
    """Two ranks each; all processes killed at a random moment, and the folder of the run deleted."""
    run = Run(tmp_path, data, checkpoint={"every": 1, "keep": 2, "bucket": "s3://runs/killed"})
    draw, losses, firsts = random.Random(0), {}, []
    store = s3fs.S3FileSystem(use_listings_cache=False)

    def uploaded() -> int:
        return max((int(path.split("/")[-2]) for path in store.glob(f"runs/killed/*/{MANIFEST}")), default=0)

    with running(run):
        for machine in range(4):
            failing(proxy, 0.1, machine)
            before, last = uploaded(), machine == 3
            run.start()
            if not last:
                run.wait_for_step(before + 4)
                time.sleep(draw.uniform(0, 1))
                run.kill_all()
            else:
                ended = run.wait()
                assert ended.code == 0, ended.said
            own = run.losses()
            assert all(losses.get(step, loss) == loss for step, loss in own.items())
            losses |= own
            firsts.append((min(own), before + 1))
            if not last:
                shutil.rmtree(run.directory)
    assert all(first == expected for first, expected in firsts), firsts
    assert losses == clean.losses()
    assert uploaded() == 20 and len(proxy.faults) > 10
    figures(machines=4, bit_differences=0, faults=len(proxy.faults))
