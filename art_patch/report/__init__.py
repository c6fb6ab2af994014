"""Is it worth it? What a stretch of time says of our champion against upstream. Pure: records in, records out.

`compare` says how much better the champion's answers are, with an interval; `money` what was paid and what would have
been; `verdict` makes of both "switch", "do not switch" or "not enough data", with its reasons in words. What is not
known is `None` and named, never zero: an unknown price leaves the money unknown, a run without a score is no bad run.
"""
