"""The networks of a run by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from fedloom.clients.networks import architecture_of, load_network
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.server.run_folder.folder import AGGREGATE
from fedloom.sims.operations.compose import name_of

MOST_NAMES = 5  # in a Networks' text


class UnknownNetworkError(UserError, KeyError):
    """The error for a network that a run does not have; a KeyError, as of any mapping."""

    __str__ = Exception.__str__  # KeyError's own has quotes


class Networks(Mapping[str, nn.Module]):
    """The networks of a run by name. Each access builds a new network in evaluation mode.

    An unknown name raises UnknownNetworkError. With evaluation.statistics=batch, the running statistics of BatchNorm differ
    from those that the run measured with.
    """

    def __init__(self, folder: Path, config: Config, aggregate: str) -> None:
        self._config = config
        self._files = {path.stem: path for path in sorted((folder / "states").glob("*.safetensors"))}
        if aggregate and AGGREGATE in self._files:
            self._files = {aggregate: self._files.pop(AGGREGATE), **self._files}
        for mode in config.baselines:
            if (path := folder / "baselines" / mode / "states" / f"{AGGREGATE}.safetensors").is_file():
                self._files[mode] = path

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self._files:
            raise UnknownNetworkError(str(unknown("network", name, self._files)))
        site = next((site for site in self._config.roster if site.name == name), None)
        with ordinary():
            return load_network(self._files[name], name_of(architecture_of(self._config, site)))[0]

    def __repr__(self) -> str:
        more = f", ... {len(self)} in all" if len(self) > MOST_NAMES else ""
        return f"Networks({', '.join(list(self)[:MOST_NAMES])}{more})"

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
