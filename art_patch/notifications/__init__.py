"""Messages about decisions, to the addresses in ART_PATCH_NOTIFY: Slack, mail, webhooks and others, through apprise.

`messages` puts decisions into words, `sending` sends them, and `notifier` decides with the store what is to be sent, so
that each message is sent once. A message that cannot be sent is logged, and nothing else fails for it.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.notifications.messages import Message, of_test
    from art_patch.notifications.notifier import Notifier
    from art_patch.notifications.sending import Address, addresses
else:
    __getattr__ = lazily()
