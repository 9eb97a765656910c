"""etcd3's generated stubs, for today's protobuf; `etcd/etcd_connection.py` registers this package as `etcd3.etcdrpc`.

etcd3 0.12.0's own was made for protobuf 3 and is refused by later ones. The messages are generated from `rpc.proto`;
the stubs come from its services, one callable a method.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from bkctl.metadata.backends.etcd.etcdrpc import rpc_pb2
from bkctl.metadata.backends.etcd.etcdrpc.rpc_pb2 import *  # noqa: F403


class _Stub:
    """The methods of the service `name` on a `grpc.Channel`, as attributes."""

    def __init__(self, name: str, channel: Any) -> None:
        service = rpc_pb2.DESCRIPTOR.services_by_name[name]
        for method in service.methods:
            sides = ("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
            call = getattr(channel, "_".join(sides))(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


KVStub = partial(_Stub, "KV")
WatchStub = partial(_Stub, "Watch")
LeaseStub = partial(_Stub, "Lease")
ClusterStub = partial(_Stub, "Cluster")
MaintenanceStub = partial(_Stub, "Maintenance")
AuthStub = partial(_Stub, "Auth")
