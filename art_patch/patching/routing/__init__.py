"""Where a call goes: the route, eligibility, sessions, breakers and pins; and one routed call from start to end."""
