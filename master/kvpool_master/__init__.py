"""The Master Service: the directory, space, leases, eviction and liveness of one pool."""
