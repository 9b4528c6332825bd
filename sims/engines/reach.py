"""Ask whether a Ray cluster answers at engine.address before joining it.

Without an answer, Ray itself waits for minutes and ignores signals.
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

ANSWER_SECONDS = 20.0  # to wait for an answer; gRPC tries to connect for as long
AUTO, CLIENT = "auto", "ray://"
FORM = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
MEND = ("is `ray start --head --port=6379` running there, and is this its port (engine.address=HOST:6379)? "
        "Check it with `ray status --address={place}`")  # fmt: skip
MEND_CLIENT = "is Ray's client server there (engine.address=ray://HOST:10001)? On a machine of the cluster, use HOST:6379"
WORDS: Any = gcs_service_pb2  # generated, without types
CLIENT_WORDS: Any = ray_client_pb2
NO_RAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)


def reach(address: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the cluster's address, host:port or ray://host:port, after the cluster has answered.

    Raises:
        UserError: The address is not valid, or no Ray answers within `seconds`.
    """
    cluster = _automatic() if address == AUTO else address
    client, place = cluster.startswith(CLIENT), cluster.removeprefix(CLIENT)
    if not (form := FORM.fullmatch(place)) or not 0 < int(form[2]) < 2**16:
        raise UserError(f"engine.address: got {plain(address)}, takes HOST:PORT of a cluster's head (HOST:6379), "
                        "ray://HOST:10001 or auto; leave it out to start Ray on this machine")  # fmt: skip
    if reason := _silent(place, client, seconds):
        mend = MEND_CLIENT if client else MEND.format(place=place)
        raise UserError(f"engine.address: there is no Ray cluster at {cluster} ({reason}): {mend}")  # plain: ignore
    return cluster


def _automatic() -> str:
    """The address that Ray uses for auto: $RAY_ADDRESS, or the cluster that was last started on this machine."""
    try:
        return get_ray_address_from_environment(AUTO, None) or ""
    except (ConnectionError, ValueError):
        raise UserError("engine.address: got auto, but no cluster runs on this machine, and RAY_ADDRESS is not set: start "
                        "one (`ray start --head --port=6379`), or set engine.address=HOST:6379") from None  # fmt: skip


def _silent(place: str, client: bool, seconds: float) -> str:
    """Why no Ray answers; empty if one does. Ray may still refuse: joining then reports the reason."""
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
