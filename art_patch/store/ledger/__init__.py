"""Groups, policies, the route, leases and the audit log: durable, and decided by one writer at a time."""
