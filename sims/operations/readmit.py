"""Readmit forgotten sites to a run, and move a site to another node."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.sims.engines import SIMULATED
from fedloom.sims.federation.machines import registered
from fedloom.sims.federation.plan import KEYS, server_of
from fedloom.sims.federation.programs import running
from fedloom.sims.operations.site_names import site_names


def readmit(path: Path, sites: Sequence[str], node: int | None = None) -> str:
    """Readmit forgotten sites, or with `node` move one site to that node. Return a message for the user."""
    config = read_config(path)
    sites = site_names(path, config, sites)
    if node is not None:
        return _vouch(path, config, sites, node)
    with Ledger.open(path) as ledger:
        method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config))
        for request in ledger.waiting(applied=True):
            if under_way := set(sites) & set(request.sites):
                raise UserError(
                    f"request '{request.id}' to forget '{min(under_way)}' is not finished; run 'fedloom resume {path}' first"
                )
        method.state.readmit(sites)
        view = method.state.view()
        summed = all(any(view.has(slot, site) for slot in view.slots.declared) for site in sites)
        left = max(0, method.state.length(config.rounds) - method.unlearning().last_round())
    rounds = f"Run 'fedloom resume {path}' to train the remaining {count(left, 'round')}." if left else "No rounds remain."
    if summed:
        start = f"In the sum, {'its contribution is' if len(sites) == 1 else 'their contributions are'} the initial network."
    else:
        start = f"{'It starts' if len(sites) == 1 else 'They start'} without a contribution."
    return f"{', '.join(sites)} can participate again. {start} {rounds}"


def _vouch(path: Path, config: Config, sites: Sequence[str], node: int) -> str:
    """Record in the ledger that a site is at another node, which then owns the site's contributions."""
    if len(sites) != 1:
        raise UserError(f"--node: takes one site, got {len(sites)} sites")
    if not 0 < node < 2**64:
        raise UserError(f"--node: got {node}, takes the id of a Flower node, as shown in the server's warning")
    if config.engine.name in SIMULATED:
        reason = f"the sites of this run are simulated (engine.name={config.engine.name}) and have no nodes"
        raise UserError(f"--node: {reason}")
    with Ledger.open(path, server=False) as ledger:
        if sites[0] not in (names := ledger.sites()):
            raise unknown("site", sites[0], names)
        bound = ledger.bound()
        before = bound.get(sites[0])
        _refuse_node(config.engine.address, sites[0], node, bound)
        ledger.bind({sites[0]: node}, by="operator")
    reason = f"{sites[0]} is at node {node} now" + (f", no longer at {before}" if before not in (None, node) else "")
    return (
        f"{reason}. The node receives the site's earlier contributions. A running server applies this before its next round."
    )


def _refuse_node(address: str, site: str, node: int, bound: Mapping[str, int]) -> None:
    """Raise UserError for a node of another site, or one that a local federation at this address does not know."""
    if other := next((name for name, bound_node in bound.items() if bound_node == node and name != site), ""):
        raise UserError(f"--node: node {node} belongs to '{other}' in this run; name the node of '{site}'")
    if not address or not (server := server_of(Path(address))).is_dir():
        return
    known = {registered(path): path.stem for path in sorted((server / KEYS).glob("*.pub")) if registered(path)}
    if known and known.get(str(node)) != site:
        reason = f"belongs to '{known[str(node)]}'" if str(node) in known else "belongs to no site"
        now = next((id for id, name in known.items() if name == site), "none")
        raise UserError(f"--node: node {node} {reason} in {address}; the node of '{site}' is {now}")
    if not known and running(server) and str(node) not in (ids := _ids(server)):
        raise UserError(f"--node: {address} has no node {node} (there: {', '.join(ids)})")


def _ids(server: Path) -> list[str]:
    """Return the ids of the nodes that the SuperLink of a server's folder knows."""
    from fedloom.sims.federation.control import nodes

    return list(nodes(server))
