"""Everything that can go wrong with a ring or a link, one class a case."""

from __future__ import annotations


class RingError(Exception):
    """Base of all ring and link errors."""


class RingLayoutError(RingError):
    """The buffer is not a ring of this layout: wrong size, alignment, magic or version."""


class RecordTooLarge(RingError):
    """The record needs more than half of the ring and might never fit; nothing was written."""


class RingCorrupt(RingError):
    """A published record kept failing its stamp or CRC check: a stray write or a broken peer.

    The reader has not moved past the record, and no later record can be trusted: drop the link.
    """


class LinkError(RingError):
    """Base of errors while two processes join their rings."""


class LinkPathTooLong(LinkError):
    """The socket path does not fit into a unix socket address."""


class LinkPathUnsafe(LinkError):
    """Another user could replace the socket, or something else lies at its path."""


class LinkInUse(LinkError):
    """Another live process listens on the path."""


class LinkUnavailable(LinkError):
    """Nobody listens on the path, or nobody connected, within the time given."""


class LinkRefused(LinkError):
    """The peer runs under another user, or speaks no link protocol at all."""


class LinkVersionMismatch(LinkError):
    """Both sides speak the link protocol, in different versions."""


class LinkPeerGone(LinkError):
    """The peer closed the connection, or died, before the rings were joined."""


class LinkNoResources(LinkError):
    """The system gave no memory or no descriptor for another pair of rings."""
