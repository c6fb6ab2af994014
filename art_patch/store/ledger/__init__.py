"""Stores the decisions of the job and the operator: groups, policies, the route, leases and the audit log."""
