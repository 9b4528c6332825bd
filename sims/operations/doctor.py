"""Report what this machine has for Fedloom: versions, cores, memory, GPUs, disk, a test of torch, sources of data."""

import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from fedloom.conf import machine
from fedloom.conf.schema import DataConfig
from fedloom.sims.report.tables import Table

Finding = tuple[str, str, bool]
PACKAGES = {  # the name for pip, and the name for Python
    "torch": "torch",
    "torchvision": "torchvision",
    "flwr": "flwr",
    "ray": "ray",
    "pot": "ot",
    "omegaconf": "omegaconf",
}
HINTS = {"ray": "; engine.name=inline works"}
GIB = 2**30
DOMAIN, ABSENT, DOWNLOAD = "domain ", "not available: nothing at ", "data.download=true"  # texts of clients.data.domains
MIN_GROUPED = 3  # this many absent domains share one line
PATIENCE = 120.0  # seconds; the layer needs less than one
NARROW = """
import torch

torch.set_num_threads(1)
for _ in range(4):
    images = torch.randn(32, 128, 128, 4).permute(0, 3, 1, 2)  # channels last
    layer = torch.nn.Conv2d(4, 8, 1, stride=2, bias=False)
    (ours,) = torch.autograd.grad(layer(images).square().sum(), [layer.weight])
    with torch.backends.mkldnn.flags(enabled=False):
        (plain,) = torch.autograd.grad(layer(images).square().sum(), [layer.weight])
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
"""  # oneDNN issue 6035: with fewer channels than its vectors hold, it overruns its workspace
CURE = (
    "Fedloom's own networks avoid it. In your network, use 16 channels or more or x.contiguous(), or set "
    "torch.backends.mkldnn.enabled = False"
)


def doctor(data: DataConfig) -> list[Finding]:
    """Return (what, finding, ok) for everything that a run needs. It never raises; a failed check is a finding."""
    machine: dict[str, Callable[[], tuple[str, bool]]] = {
        "CPU cores": _cores,
        "memory": _memory,
        "GPUs": _gpus,
        "free disk": _disk,
        "narrow convolutions": narrow_convolutions,
    }
    return [
        ("fedloom", _fedloom(), True),
        ("python", platform.python_version(), True),
        *((package, *_package(package)) for package in PACKAGES),
        *((what, *_guarded(look)) for what, look in machine.items()),
        *_domains(data),
    ]


def doctor_table(findings: list[Finding]) -> Table:
    """Return the findings of `doctor` as a table."""
    together = _together(findings)
    rows = [[what, finding, "yes" if ok else "NO"] for what, finding, ok in together]
    missing = sum(not ok for _, _, ok in together)
    lacking = f"Not available: {missing} of {len(rows)}. Only runs that need these parts will fail."
    return Table("Fedloom doctor", ["what", "finding", "ok"], rows, lacking if missing else "Everything is available.")


def _together(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with a single one for all absent domains."""
    absent = [finding for finding in findings if finding[0].startswith(DOMAIN) and finding[1].startswith(ABSENT)]
    if len(absent) < MIN_GROUPED:
        return list(findings)
    names = [what.removeprefix(DOMAIN) for what, _, _ in absent]
    never = [what.removeprefix(DOMAIN) for what, finding, _ in absent if not finding.endswith(DOWNLOAD)]
    fetched = f"{DOWNLOAD} fetches them" + (f", except {', '.join(never)}" if never else "")
    advice = f"not in the data folder: set FEDLOOM_DATA (here: --data) to a folder that has them; or {fetched}"
    return [
        *(finding for finding in findings if finding not in absent),
        (f"{len(names)} more domains", f"{', '.join(names)}: {advice}", False),
    ]


def narrow_convolutions(script: str = NARROW, patience: float = PATIENCE) -> tuple[str, bool]:
    """Train a layer of few channels in a new process. Return (finding, whether that works). `patience`: seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        how = f"does not end within {patience:g} s"
    else:
        if done.returncode == 0:
            return "trained, with the right gradients", True
        last = done.stderr.strip().rpartition("\n")[2]
        died = f"kills its process ({signal.Signals(-done.returncode).name})" if done.returncode < 0 else "fails"
        how = f"{died}{': ' if last else ''}{last}"
    return f"a 1x1 convolution of stride 2 with 4 channels, channels last, {how}. {CURE}", False


def _fedloom() -> str:
    try:
        return metadata.version("fedloom")
    except metadata.PackageNotFoundError:
        return f"run from {Path(__file__).parents[1]}, not installed"


def _package(package: str) -> tuple[str, bool]:
    """Return the version of a package, or why it cannot be imported."""
    try:
        module = importlib.import_module(PACKAGES[package])
    except ModuleNotFoundError as error:
        if error.name != PACKAGES[package]:
            return f"cannot be imported: {error}", False
        return f"not installed{HINTS.get(package, '')}", False
    except Exception as error:  # a broken package may raise anything
        return f"cannot be imported: {error}{HINTS.get(package, '')}", False
    return str(getattr(module, "__version__", None) or metadata.version(package)), True


def _guarded(look: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
    try:
        return look()
    except Exception as error:  # the other checks still run
        return f"cannot be determined: {error}", False


def _cores() -> tuple[str, bool]:
    return f"{machine.cores()} usable of {os.cpu_count()}", True


def _memory() -> tuple[str, bool]:
    here, total = machine.memory(), psutil.virtual_memory().total
    if here < total:
        return f"{here / GIB:.1f} GiB (a limit on this container; the machine has {total / GIB:.1f} GiB)", True
    return f"{total / GIB:.1f} GiB", True


def _gpus() -> tuple[str, bool]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) if names else "none; runs use the CPU", True


def _disk() -> tuple[str, bool]:
    free = shutil.disk_usage(Path.cwd()).free
    return f"{free / GIB:.1f} GiB in {Path.cwd()}", free > GIB


def _domains(data: DataConfig) -> list[Finding]:
    """Return the source of each domain. The data module is imported here, since its packages may be missing."""
    try:
        from fedloom.clients.data import domain_names, where

        names = list(domain_names())
    except Exception as error:
        return [("domains", f"cannot be listed: {error}", False)]
    return [(f"domain {name}", *_guarded(lambda name=name: _domain(where(name, data)))) for name in names]


def _domain(line: str) -> tuple[str, bool]:
    return line, not line.startswith("not available")
