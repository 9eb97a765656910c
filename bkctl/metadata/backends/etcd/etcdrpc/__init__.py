"""etcd3's generated stubs, for today's protobuf; `etcd/connection.py` registers this package as `etcd3.etcdrpc`.

etcd3 0.12.0's own was made for protobuf 3 and is refused by later ones. The messages are generated from `kv.proto` and
`rpc.proto`; the stubs come from the services in `rpc.proto`, one callable a method.
"""

from __future__ import annotations

from typing import Any, ClassVar

from google.protobuf.message_factory import GetMessageClass

from bkctl.metadata.backends.etcd.etcdrpc import rpc_pb2
from bkctl.metadata.backends.etcd.etcdrpc.rpc_pb2 import *  # noqa: F403


class _Stub:
    """The methods of one service on a `grpc.Channel`, as attributes."""

    service: ClassVar[str]

    def __init__(self, channel: Any) -> None:
        service = rpc_pb2.DESCRIPTOR.services_by_name[self.service]
        for method in service.methods:
            sides = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
            call = getattr(channel, "_".join(sides))(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


class KVStub(_Stub):
    """Range, Put, DeleteRange, Txn, Compact."""

    service = "KV"


class WatchStub(_Stub):
    """Watch."""

    service = "Watch"


class LeaseStub(_Stub):
    """LeaseGrant, LeaseRevoke, LeaseKeepAlive, LeaseTimeToLive."""

    service = "Lease"


class ClusterStub(_Stub):
    """MemberList."""

    service = "Cluster"


class MaintenanceStub(_Stub):
    """Status."""

    service = "Maintenance"


class AuthStub(_Stub):
    """Authenticate."""

    service = "Auth"
