"""Stores the decisions of the job and the operator: groups, policies, the route, leases and the audit log.

Every write is durable, and only one process at a time changes policies and the route.
"""
