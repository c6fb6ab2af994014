"""The HTTP library that the installed openai uses by itself: httpx up to 2.x, httpx2 from 3.0."""

from openai import _base_client

if hasattr(_base_client, "httpx2"):
    from httpx2 import *  # noqa: F403
else:
    from httpx import *  # noqa: F403
