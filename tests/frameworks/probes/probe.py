"""How every probe begins and ends. A probe is an app of one framework: `probes/NAME_probe.py STORE URL`.

    from probe import URL, done     # patches, before the framework is imported

It uses each door of the framework once, under a model name of the door's own (`gpt-chat`, `gpt-stream`, `gpt-tools`),
by which `run.py` tells them apart; `done()` prints the patch's `status()` as the last line.
"""

import json
import logging
import os
import sys

import art_patch as art

STORE, URL = sys.argv[1:3]
os.environ |= {
    "OPENAI_API_KEY": "sk-test",
    "OPENAI_BASE_URL": URL,
    "OPENAI_API_BASE": URL,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM would ask the network for prices
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_STORAGE_DIR": os.path.dirname(STORE.removeprefix("sqlite:///")),  # releases do not share one
}
_warned: list[str] = []
_handler = logging.Handler()
_handler.emit = lambda record: _warned.append(record.getMessage())
logging.getLogger("art_patch").addHandler(_handler)
art.patch(store=STORE, flush_interval_s=0.01)


def done() -> None:
    """Print what the patch says, and what it warned of."""
    assert art.flush(30)
    told = art.status()
    art.unpatch()
    shown = {
        "instrumented": told.instrumented,
        "errors": dict(told.errors),
        "bypasses": dict(told.bypasses),
        "warned": _warned,
    }
    print("\n" + json.dumps(shown), flush=True)  # some frameworks leave the line open
