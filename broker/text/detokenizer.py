"""Output ids of one run -> text, as it may be shown: whole characters, cut at stop strings.

The text shown after N tokens is a function of those N ids and the request alone, however the ids
were cut into calls. So an attempt that continues from a log feeds the logged ids first, throws that
text away, and repeats nothing. What is not shown yet is an incomplete character, or the start of
what may become a stop string.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from broker.text.vocabulary import Vocabulary


class Detokenizer:
    """Text of one run. Costs a table lookup a token; with stop strings a search in the new text.

    A stop string that is complete before `min_tokens` tokens are out does not count.
    """

    __slots__ = ("_held", "_max_held", "_min_tokens", "_stops", "_strips", "_tail", "_vocabulary",
                 "is_stopped", "num_tokens")  # fmt: skip

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._max_held = max(map(len, self._stops), default=1) - 1
        self._min_tokens = min_tokens
        self._tail = b""  # start of a character whose rest has not come
        self._held = ""  # start of what may become a stop string
        self._strips = vocabulary.strip_leading_space  # until the first text
        self.num_tokens = 0  # ids taken so far
        self.is_stopped = False

    def feed(self, ids: Sequence[int]) -> tuple[str, int]:
        """Take ids; returns the text that is now free, and how many ids were used.

        Fewer are used only if a stop string was found: `is_stopped` is set, the text ends before
        the stop string, and the last used id is the one that completed it.
        """
        if not self._stops:
            num_ids = len(ids)
            self.num_tokens += num_ids
            if num_ids == 1 and not self._tail and not self._strips:
                texts = self._vocabulary.texts
                text = texts[ids[0]] if ids[0] < len(texts) else ""
                if text is not None:
                    return text, 1
            return self._decode(ids), num_ids
        if len(ids) > 1 and self.num_tokens + 1 >= self._min_tokens:
            text = self._feed_at_once(ids)
            if text is not None:
                return text, len(ids)
        shown = ""
        for used, token_id in enumerate(ids, start=1):
            shown += self._feed_one(token_id)
            if self.is_stopped:
                return shown, used
        return shown, len(ids)

    def flush(self) -> str:
        """Text still held back, at the run's end. An incomplete character becomes U+FFFD."""
        text = self._held + utf_8_decode(self._tail, "replace", True)[0]
        self._held, self._tail = "", b""
        return "" if self.is_stopped else text

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same state."""
        other = Detokenizer(self._vocabulary, self._stops, self._min_tokens)
        other._tail, other._held, other._strips = self._tail, self._held, self._strips
        other.num_tokens, other.is_stopped = self.num_tokens, self.is_stopped
        return other

    def _feed_at_once(self, ids: Sequence[int]) -> str | None:
        """All ids in one search; None, and nothing changed, if a stop string is in there."""
        before = self._tail, self._strips
        num_held = len(self._held)
        text = self._held + self._decode(ids)
        if _find_stops(text, self._stops, num_held):
            self._tail, self._strips = before
            return None
        self.num_tokens += len(ids)
        return self._hold_back(text)

    def _feed_one(self, token_id: int) -> str:
        num_held = len(self._held)
        text = self._held + self._decode((token_id,))
        self.num_tokens += 1
        if self.num_tokens >= self._min_tokens:
            found = _find_stops(text, self._stops, num_held)
            if found:
                self.is_stopped = True
                self._held = ""
                return text[: min(found)]
        return self._hold_back(text)

    def _hold_back(self, text: str) -> str:
        """Keep the longest suffix that is the start of a stop string; return the rest."""
        first = max(0, len(text) - self._max_held)
        cut = len(text)
        for stop in self._stops:
            at = text.find(stop[0], first, cut)
            while at >= 0:
                if stop.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(stop[0], at + 1, cut)
        self._held = text[cut:]
        return text[:cut]

    def _decode(self, ids: Sequence[int]) -> str:
        if not self._tail and not self._strips:
            texts = self._vocabulary.texts
            try:
                return "".join([texts[i] for i in ids])  # type: ignore[misc]
            except (TypeError, IndexError):  # part of a character, or an id without text
                pass
        table = self._vocabulary.token_bytes
        size = len(table)
        data = self._tail + b"".join([table[i] for i in ids if i < size])
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        if self._strips and text:
            self._strips = False
            return text[1:] if text[0] == " " else text
        return text


def _find_stops(text: str, stops: Sequence[str], num_held: int) -> list[int]:
    """Where stop strings begin that end in the new text. What ends in the first num_held characters
    was seen before, and did not count.
    """
    found = []
    for stop in stops:
        at = text.find(stop, max(0, num_held - len(stop) + 1))
        if at >= 0:
            found.append(at)
    return found
