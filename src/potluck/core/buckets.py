"""A token bucket: a few at once, and then no more than a rate allows.

What one event may cause at once (heartbeats out of turn, probes, connections, campaigns) is bounded
by one of these, so that no storm of events becomes a storm of messages.
"""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """Holds at most ``burst`` tokens and gains ``rate`` of them in a second; full at first.

    >>> bucket = TokenBucket(rate=2.0, burst=2, now=0.0)
    >>> [bucket.take(0.0) for _ in range(3)]
    [True, True, False]
    >>> bucket.take(0.4), bucket.take(0.5)
    (False, True)
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        if not (rate > 0 and burst >= 1):
            msg = f"A token bucket needs a positive rate and room for one; got {rate} and {burst}"
            raise ValueError(msg)
        self.rate = rate
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def _fill(self, now: float) -> None:
        if now > self._at:  # a clock that was set back adds nothing, and takes nothing away
            self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self.rate)
        self._at = now

    def has(self, now: float) -> bool:
        """Whether there is a token."""
        self._fill(now)
        return self._tokens >= 1.0

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take tokens; False if there is none.  More than there are leave a debt to wait for."""
        if not self.has(now):
            return False
        self._tokens -= tokens
        return True

    def when(self, now: float) -> float:
        """When there is a token: ``now`` if there is one already."""
        self._fill(now)
        return now + max(0.0, 1.0 - self._tokens) / self.rate
