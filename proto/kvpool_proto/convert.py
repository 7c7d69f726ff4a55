"""NamespaceSpec as a message and back. Apart from namespace.py, because the core knows no protobuf."""

from __future__ import annotations

from dataclasses import asdict

from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadNamespaceSpec
from kvpool_proto.namespace import Entry, NamespaceSpec

_ENTRIES: dict[int, Entry] = {pb.ENTRY_ROOT: "root", pb.ENTRY_ANY: "any"}


def spec_to_message(spec: NamespaceSpec) -> pb.NamespaceSpec:
    """The spec as it travels."""
    fields = asdict(spec)
    fields["entry"] = pb.ENTRY_ANY if spec.entry == "any" else pb.ENTRY_ROOT
    return pb.NamespaceSpec(**fields)


def spec_from_message(message: pb.NamespaceSpec) -> NamespaceSpec:
    """The spec of a message, checked. Raises BadNamespaceSpec."""
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    if message.entry not in _ENTRIES:
        raise BadNamespaceSpec(f"entry = {message.entry}: root or any")
    fields["entry"] = _ENTRIES[message.entry]
    fields["replicas"] = message.replicas or 1
    spec = NamespaceSpec(**fields)
    spec.check()
    return spec
