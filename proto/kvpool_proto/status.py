"""Errors on the wire: a KVPoolError as a gRPC status with google.rpc.ErrorInfo, and back.

The status detail is packed by hand into `grpc-status-details-bin`, as grpcio-status does, but without that
package's tight version pin.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from kvpool_proto.errors import BY_REASON, DOMAIN, KVPoolError, MessageTooLarge, Unreachable

DETAILS_KEY = "grpc-status-details-bin"
CODES: dict[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}


def trailing_metadata(error: KVPoolError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries the error's reason."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"action": error.action})
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=CODES[error.code].value[0], message=str(error), details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(rpc_error: Any) -> KVPoolError:
    """The KVPoolError that a grpc.RpcError of a call stands for.

    Without a reason of ours it is gRPC's own: MessageTooLarge for a message over the other side's limit, else
    Unreachable.
    """
    for key, value in rpc_error.trailing_metadata() or ():
        if key != DETAILS_KEY:
            continue
        status = status_pb2.Status.FromString(value)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in BY_REASON:
                return BY_REASON[info.reason](status.message)
    if rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(f"{rpc_error.details()} (message_bytes_max of the Master)")
    return Unreachable(f"{rpc_error.code().name}: {rpc_error.details()}")
