"""An app of the tests: patched, asked over stdin for one call or for what its patch sees, answering on stdout.

`python -m tests.promotion.app STORE UPSTREAM [POLL_INTERVAL_S]`; a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import sys

import openai

import art_patch as art


def main(store: str, upstream: str, poll_interval_s: str = "0.2") -> None:
    """Serve until stdin ends."""
    art.patch(store=store, poll_interval_s=float(poll_interval_s), connect_timeout_s=2.0, first_token_timeout_s=30.0)
    with openai.OpenAI(api_key="k", base_url=upstream, max_retries=0) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            if not asked:
                now = art.status()
                told = {"champion": now.champion, "challenger": now.challenger, "engine": now.base_url}
            else:
                with art.trajectory(id=asked.get("run"), session_id=asked["session"]):
                    answer = client.chat.completions.create(
                        model="gpt-x",
                        messages=[{"role": "user", "content": "plums?"}],
                        max_completion_tokens=2,
                        temperature=0,  # sampled, a model of random weights now and then says nothing: a fallback
                    )
                    by = answer.system_fingerprint or "upstream"
                    if by in asked.get("thumbs", {}):
                        art.score("thumbs", asked["thumbs"][by])
                told = {"by": by}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
