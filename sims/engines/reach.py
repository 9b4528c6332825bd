"""Whether a Ray cluster answers at engine.address, asked before it is joined.

Where nobody does, Ray itself waits for minutes and hears no signal.
"""

import contextlib
import re
from typing import Any

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.services import get_ray_address_from_environment
from ray.core.generated import gcs_service_pb2, ray_client_pb2
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.core.generated.ray_client_pb2_grpc import RayletDriverStub

from fedloom.conf.errors import UserError, plain

ANSWER_SECONDS = 20.0  # for which a cluster may say nothing; for as long gRPC tries to connect
AUTO, CLIENT = "auto", "ray://"
FORM = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
MEND = ("is 'ray start --head --port=6379' running there, and is this its port (engine.address=HOST:6379)? "
        "'ray status --address={place}' asks it")  # fmt: skip
MEND_CLIENT = "is Ray's client server there (engine.address=ray://HOST:10001)? On a machine of the cluster take HOST:6379"
WORDS: Any = gcs_service_pb2  # generated: without types
CLIENT_WORDS: Any = ray_client_pb2
NO_RAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)


def reach(address: str, seconds: float = ANSWER_SECONDS) -> str:
    """Where the cluster is that engine.address names, host:port or ray://host:port, once it has answered.

    Raises UserError for an address that is none, or where no Ray answers within `seconds`.
    """
    found = _found() if address == AUTO else address
    client, place = found.startswith(CLIENT), found.removeprefix(CLIENT)
    if not (form := FORM.fullmatch(place)) or not 0 < int(form[2]) < 2**16:
        raise UserError(f"engine.address: got {plain(address)}, takes HOST:PORT of a cluster's head (HOST:6379), "
                        "ray://HOST:10001 or auto; without it a Ray of this machine is started")  # fmt: skip
    if reason := _silent(place, client, seconds):
        mend = MEND_CLIENT if client else MEND.format(place=place)
        raise UserError(f"engine.address: there is no Ray cluster at {found} ({reason}): {mend}")
    return found


def _found() -> str:
    """What Ray takes auto to be: $RAY_ADDRESS, or the cluster that was started on this machine last."""
    try:
        return get_ray_address_from_environment(AUTO, None) or ""
    except (ConnectionError, ValueError):
        raise UserError("engine.address: got auto, and no cluster runs on this machine, nor does RAY_ADDRESS name one: "
                        "start it ('ray start --head --port=6379'), or give engine.address=HOST:6379") from None  # fmt: skip


def _silent(place: str, client: bool, seconds: float) -> str:
    """Why nobody answers there as Ray does; empty if it does, or refuses us for a reason that joining it will tell."""
    connection: Any = init_grpc_channel(place, GLOBAL_GRPC_OPTIONS)
    with contextlib.closing(connection) as channel:
        try:
            if client:
                ping = CLIENT_WORDS.ClusterInfoRequest(type=CLIENT_WORDS.ClusterInfoType.PING)
                RayletDriverStub(channel).ClusterInfo(ping, timeout=seconds)
            else:
                NodeInfoGcsServiceStub(channel).CheckAlive(WORDS.CheckAliveRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return _why(error.code(), error.details(), seconds)  # type: ignore[attr-defined]
    return ""


def _why(code: grpc.StatusCode, details: str, seconds: float) -> str:
    if code not in NO_RAY:
        return ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED or "timed out" in details:
        return f"no answer within {seconds:g} s"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "what answers there is not Ray's"
    return plain(details.rpartition(": ")[2].rstrip("]"))
