"""Messages about decisions, to the addresses in ART_PATCH_NOTIFY: Slack, mail, webhooks and others, through apprise.

`notifier` decides with the store what is to be sent, so that each message is sent once; `sender` is the process that
sends it. A message that cannot be sent is logged, and nothing else fails for it.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.notifications.notifier import Address, Message, Notifier, addresses, of_test
else:
    __getattr__ = lazily()
