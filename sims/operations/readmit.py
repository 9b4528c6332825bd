"""Forgotten sites take part again; a site is at another node than before."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.conf.errors import UserError, unknown
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.sims.engines import SIMULATED
from fedloom.sims.federation.machines import nodes, registered
from fedloom.sims.federation.plan import KEYS, server_of
from fedloom.sims.federation.programs import running


def readmit(path: Path, sites: Sequence[str], node: int | None = None) -> str:
    """Let forgotten sites take part again, or say that a site is at another node now; what to tell."""
    if node is not None:
        return _vouch(path, sites, node)
    config = read_config(path)
    with Ledger.open(path) as ledger:
        method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config))
        for request in ledger.waiting(applied=True):
            if under_way := set(sites) & set(request.sites):
                raise UserError(f"request '{request.id}' is not done with '{min(under_way)}' yet: resume the run first")
        method.state.readmit(sites)
        view = method.state.view()
        summed = all(any(view.has(slot, site) for slot in view.slots.declared) for site in sites)
        left = max(0, method.state.length(config.rounds) - method.unlearning().last_round())
    rounds = f"'fedloom resume' trains the {left} rounds left" if left else "no round is left that would train them"
    begins = "from the initial network on, which is in the sum" if summed else "as sites that have given nothing yet"
    return f"{', '.join(sites)} may take part again, {begins}; {rounds}"


def _vouch(path: Path, sites: Sequence[str], node: int) -> str:
    """The operator's word that a site's contributions belong to this node from now on; a running server hears of it."""
    if len(sites) != 1:
        raise UserError(f"--node: is that of one site; got {len(sites)} sites")
    if not 0 < node < 2**64:
        raise UserError(f"--node: got {node}, takes the id of one of Flower's nodes, as the server's warning names it")
    config = read_config(path)
    if config.engine.name in SIMULATED:
        reason = f"the sites of this run are simulated (engine.name={config.engine.name}) and have no nodes of their own"
        raise UserError(f"--node: {reason}")
    with Ledger.open(path, server=False) as ledger:
        if sites[0] not in (names := ledger.sites()):
            raise unknown("site", sites[0], names)
        bound = ledger.bound()
        before = bound.get(sites[0])
        _refuse_node(config.engine.address, sites[0], node, bound)
        ledger.bind({sites[0]: node}, by="operator")
    reason = f"{sites[0]} is at node {node}" + (f", no longer at {before}" if before not in (None, node) else "")
    return f"{reason}: it may have what the site gave; a running server knows it before its next round"


def _refuse_node(address: str, site: str, node: int, bound: Mapping[str, int]) -> None:
    """UserError for a node that is another site's, or that the federation at this address, if it is here, does not know."""
    if other := next((name for name, bound_node in bound.items() if bound_node == node and name != site), ""):
        raise UserError(f"--node: node {node} is that of '{other}' in this run; give the one that '{site}' is at now")
    if not address or not (server := server_of(Path(address))).is_dir():
        return
    known = {registered(path): path.stem for path in sorted((server / KEYS).glob("*.pub")) if registered(path)}
    if known and known.get(str(node)) != site:
        reason = f"is that of '{known[str(node)]}'" if str(node) in known else "is no site's"
        now = next((id for id, name in known.items() if name == site), "none")
        raise UserError(f"--node: node {node} {reason} in {address}; that of '{site}' is {now}")
    if not known and running(server) and str(node) not in (ids := [bound_node["node-id"] for bound_node in nodes(server)]):
        raise UserError(f"--node: {address} has no node {node} (there: {', '.join(ids)})")
