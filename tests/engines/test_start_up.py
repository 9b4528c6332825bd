"""Ray's workers start before round 1, so no round counts their start; the run begins without a worker that cannot start."""

from pathlib import Path

import pytest
import ray

from fedloom.conf.schema import EngineConfig
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine, pool
from fedloom.sims.engines.local_ray import begin
from fedloom.sims.engines.pool import Pool
from fedloom.sims.engines.ray import CLIENT_APP, RayGrid
from fedloom.sims.engines.worker import WorkerSpec
from tests.server.averages import configured
from tests.server.parts import Recorder


class Watch(Recorder):
    """It notes how many of the engine's workers have started when a round begins."""

    def __init__(self, grid: RayGrid) -> None:
        super().__init__()
        self.grid, self.ready = grid, list[int]()

    def round_started(self, round: int, asked: int) -> None:
        self.ready.append(len(self.grid._pool._crew.ready()))


def test_all_workers_have_started_before_round_1(tmp_path: Path):
    ray.shutdown()
    config = configured(tmp_path, "engine.name=ray", "engine.workers=2", "strategy=fedavg", "rounds=1", "run.name=ray")
    with open_engine(config) as grid:
        assert isinstance(grid, RayGrid)
        run_experiment(grid, config, listener := Watch(grid))
    assert listener.ready == [2]


def test_a_worker_without_room_is_not_awaited_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ray.shutdown()
    begin(workers=1, num_cpus=1)
    monkeypatch.setattr(pool, "START_SECONDS", 0.5)
    spec = WorkerSpec(CLIENT_APP, "", 1, 2, str(tmp_path))
    crew = Pool(spec, 2, {"num_cpus": ray.cluster_resources()["CPU"]}, EngineConfig())  # one worker takes them all
    try:
        crew.begin()
        assert len(crew._crew.ready()) == 1
    finally:
        crew.close()
        ray.shutdown()
