"""One page in a browser for what the command line knows: `art-patch web`. Needs the extra `web`.

`access` says who may see and change what, `pages` lists all pages, `actions` all changes, and `live` tells open pages
what has changed. `app` connects them, and `server` runs it. `templates/` and `static/` hold all that a browser gets;
nothing is fetched from elsewhere.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.web.projects import Given
    from art_patch.web.server import KEY_FILE, run_web
else:
    __getattr__ = lazily()
