"""Memory and cores of a container: the limits of control groups of both versions, in trees as Linux shows them."""

from pathlib import Path

import pytest

from fedloom.conf import machine
from fedloom.conf.cgroups import Limits, limits

NONE, CPU = float("inf"), "cpu,cpuacct"
V2 = "30 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def tree(root: Path, mounts: str, groups: str, **files: str) -> Path:
    """A file system: `files` by their paths below /sys/fs/cgroup, with __ for / and _DOT_ for a dot."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("1 0 0:1 / / rw - overlay overlay rw\nbroken\n" + mounts)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_of_version_2(tmp_path: Path):
    root = tree(tmp_path, V2, "0::/\n", memory_DOT_max="1000\n", memory_DOT_current="700\n",
                memory_DOT_stat="anon 3\ninactive_file 200\n", cpu_DOT_max="150000 100000\n")  # fmt: skip
    assert limits(root) == Limits(1000, 500, 1.5)


def test_a_job_of_version_2_has_the_limits_of_the_groups_above_it(tmp_path: Path):
    root = tree(tmp_path, V2, "0::/slurm/job/step\n", slurm__job__step__memory_DOT_max="max\n",
                slurm__job__memory_DOT_max="2000\n", slurm__job__memory_DOT_current="2500\n",
                slurm__memory_DOT_max="9000\n", slurm__memory_DOT_current="100\n", slurm__cpu_DOT_max="400000 100000",
                slurm__job__cpu_DOT_max="max 100000", memory_DOT_stat="x\n")  # fmt: skip
    assert limits(root) == Limits(2000, 0, 4)


@pytest.mark.parametrize("inside, group", [("/docker/a1", "/docker/a1"), ("/", "/"), ("/", "/docker/a1"), ("/", "/../x")])
def test_a_container_of_version_1(tmp_path: Path, inside: str, group: str):
    root = tree(tmp_path, V1.format(root=inside), f"5:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:{group}\n",
                memory__memory_DOT_limit_in_bytes="3000\n", memory__memory_DOT_usage_in_bytes="1000\n",
                memory__memory_DOT_stat="total_inactive_file 400\n",
                **{f"{CPU}__cpu_DOT_cfs_quota_us": "50000\n", f"{CPU}__cpu_DOT_cfs_period_us": "100000\n"})  # fmt: skip
    assert limits(root) == Limits(3000, 2400, 0.5)


def test_a_group_of_version_1_that_is_not_the_topmost(tmp_path: Path):
    root = tree(tmp_path, V1.format(root="/"), "5:memory:/a/b\n4:cpu,cpuacct:/a\n",
                memory__a__b__memory_DOT_limit_in_bytes="100", memory__memory_DOT_limit_in_bytes=str(2**63 - 4096),
                **{f"{CPU}__a__cpu_DOT_cfs_quota_us": "-1", f"{CPU}__a__cpu_DOT_cfs_period_us": "100000"})  # fmt: skip
    assert limits(root).memory == 100 and limits(root).cores == NONE


def test_without_control_groups_there_are_no_limits(tmp_path: Path):
    assert limits(tmp_path) == Limits()
    assert limits(tree(tmp_path / "a", "", "")) == Limits()
    assert limits(tree(tmp_path / "b", V2, "0::/x\n", memory_DOT_max="much\n", cpu_DOT_max="max 100000\n")) == Limits()


def test_the_machine_has_no_more_than_its_container(monkeypatch: pytest.MonkeyPatch):
    cores = machine.cores()
    monkeypatch.setattr(machine, "limits", lambda: Limits(memory=2**20, free=2**10, cores=0.5))
    assert (machine.cores(), machine.memory(), machine.free_memory()) == (1, 2**20, 2**10)
    monkeypatch.setattr(machine, "limits", lambda: Limits())
    assert machine.cores() == cores and machine.memory() > 2**20
