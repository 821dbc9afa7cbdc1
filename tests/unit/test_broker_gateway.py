"""Streams and the sender: logs, credit, full sockets, peers that are gone. No socket."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.engine_watchdog import Watchdog
from broker.gateway.digest import digest_of
from broker.gateway.router import Sent
from broker.gateway.sender import Sender
from broker.gateway.sessions import MUTE_S, STRIKES, Client, Peer
from broker.gateway.stream import Stream
from broker.messages import Done, Prepared, Tokens, Usage
from broker.ring.records import Sampling
from broker.text.detokenizer import Detokenizer
from broker.text.vocabulary import letters, make_vocabulary
from tokenbus.errors import Gone
from tokenbus.protocol import MessageType
from tokenbus.request import JobRequest, SamplingParams

LETTERS = letters(26)


class Nobody:
    """Takes every message."""

    def tell(self, message: object) -> bool:
        return True


OWNER = Nobody()


class StubRouter:
    """Takes `room` messages, then says FULL; or says GONE."""

    def __init__(self) -> None:
        self.room = 1_000_000
        self.is_gone = False
        self.num_tries = 0
        self.sent: list[tuple[MessageType, dict[str, Any]]] = []

    def send(self, peer: bytes, frames: list[bytes]) -> Sent:
        if self.is_gone:
            return Sent.GONE
        self.num_tries += 1
        if self.room == 0:
            return Sent.FULL
        self.room -= 1
        self.sent.append((MessageType(frames[0][3]), msgpack.unpackb(frames[1])))
        return Sent.OK

    def take(self) -> list[tuple[MessageType, dict[str, Any]]]:
        sent, self.sent = self.sent, []
        return sent

    def rows(self) -> list[list[Any]]:
        """Events of the TOKENS messages sent since the last look."""
        return [row for _, body in self.take() for row in body.get("events", [])]


class Setup:
    """One client with streams."""

    def __init__(self, credit: int = 1_000, log_tokens: int = 100) -> None:
        self.router = StubRouter()
        self.pauses: list[tuple[str, bool]] = []
        self.sender = Sender(self.router, log_tokens)  # type: ignore[arg-type]
        self.sender.on_backlog = self._on_backlog
        self.client = Client("c")
        self.peer = Peer(b"p", 0.0)
        self.client.begin_session(self.peer, credit, "", 0.0)

    def _on_backlog(self, stream: Stream, is_over: bool) -> None:
        stream.is_paused = is_over
        self.pauses.append((stream.job, is_over))

    def stream(self, name: str, have: tuple[int, ...] = ()) -> Stream:
        stream = Stream(name, self.client, None, "", OWNER)
        open_stream(stream, have)
        self.client.streams[name] = stream
        return stream

    def publish(self, *events: tuple[Stream, list[int]]) -> None:
        """One step."""
        for stream, ids in events:
            text = "".join(chr(97 + i) for i in ids)
            self.sender.add(stream, Tokens(stream.job, 1, stream.last_seq + 1, ids, text))
        self.sender.flush_batch()

    def end(self, stream: Stream) -> None:
        usage = Usage(1, 1, 0, 0.0, 0.0, 0.0)
        stream.end(Done(stream.job, 1, stream.last_seq, "length", "", usage, 0))
        self.client.waiting[stream.job] = stream
        self.sender.flush_client(self.client)


def open_stream(stream: Stream, have: tuple[int, ...], stops: tuple[str, ...] = ()) -> None:
    request = JobRequest(job=stream.job, prompt="x", have=have, params=SamplingParams(stop=stops))
    prepared = Prepared(request, np.array([1], np.int32), Sampling(), (), 10, 0)
    stream.open(prepared, Detokenizer(LETTERS, stops))


# ------------------------------------------------------------ sender


def test_all_jobs_of_a_client_go_out_in_one_message_a_step() -> None:
    s = Setup()
    a, b = s.stream("a"), s.stream("b")
    s.publish((a, [0]), (b, [1, 2]))
    assert s.router.take() == [
        (MessageType.TOKENS, {"events": [["a", 1, 1, [0], "a"], ["b", 1, 1, [1, 2], "bc"]]})
    ]


def test_without_credit_events_merge_and_go_out_in_order_when_it_comes() -> None:
    s = Setup(credit=1)
    a = s.stream("a")
    for token in range(5):
        s.publish((a, [token]))
    s.end(a)
    assert s.router.take() == [(MessageType.TOKENS, {"events": [["a", 1, 1, [0], "a"]]})]
    s.client.credit = 2
    s.sender.flush_client(s.client)
    (tokens, done) = s.router.take()
    assert tokens[1]["events"] == [["a", 1, 2, [1, 2, 3, 4], "bcde"]]
    assert (done[0], done[1]["seq"]) == (MessageType.DONE, 5)
    assert not s.client.waiting


def test_a_full_socket_loses_nothing_and_the_end_comes_last() -> None:
    s = Setup()
    a, b = s.stream("a"), s.stream("b")
    s.publish((a, [0]), (b, [0]))
    s.router.room = 0
    s.publish((a, [1]), (b, [1]))
    s.publish((a, [2]))
    s.end(b)
    s.sender.answer(s.peer, MessageType.WELCOME, {"answer": 1})
    s.router.take()
    s.sender.unblock()
    assert s.router.take() == []
    s.router.room = 100
    s.sender.unblock()
    kinds = [kind for kind, _ in s.router.sent]
    assert kinds == [MessageType.WELCOME, MessageType.TOKENS, MessageType.DONE]
    assert sorted(s.router.rows()) == [["a", 1, 2, [1, 2], "bc"], ["b", 1, 2, [1], "b"]]
    assert s.client.used == 4


def test_a_socket_that_stays_full_is_tried_less_and_less_often() -> None:
    """Every try encodes the whole backlog; the other clients wait for that."""
    s = Setup()
    a = s.stream("a")
    s.router.room = 0
    s.publish((a, [0]))
    s.publish((a, [1]))
    s.router.num_tries = 0
    for _ in range(200):  # a second
        s.sender.unblock()
    assert 6 <= s.router.num_tries <= 12
    s.router.room = 100
    for _ in range(32):
        s.sender.unblock()
    assert s.router.rows() == [["a", 1, 1, [0, 1], "ab"]]
    s.router.room = 0
    s.publish((a, [2]))
    s.router.room = 100
    s.sender.unblock()  # it took something in between: tried at once
    assert s.router.rows() == [["a", 1, 3, [2], "c"]]


def test_two_events_of_a_job_in_one_burst_come_back_whole_from_a_full_socket() -> None:
    s = Setup()
    a = s.stream("a")
    s.router.room = 0
    s.publish((a, [0, 1]), (a, [2, 3, 4]))
    s.router.room = 100
    s.sender.unblock()
    assert s.router.rows() == [["a", 1, 1, [0, 1, 2, 3, 4], "abcde"]]


def test_a_peer_that_is_gone_ends_the_session_and_the_log_goes_on() -> None:
    s = Setup()
    a = s.stream("a")
    s.router.is_gone = True
    s.publish((a, [0]))
    s.publish((a, [1]))
    assert s.client.peer is None
    assert (a.last_seq, a.sent_seq) == (2, 0)


def test_a_long_backlog_pauses_that_job_only_and_its_sending_resumes_it() -> None:
    s = Setup(credit=0, log_tokens=20)
    a, b = s.stream("a"), s.stream("b")
    s.publish((b, [0]))
    for token in range(11):
        s.publish((a, [token]))
    assert s.pauses == [("a", True)]
    s.client.credit = 10
    s.sender.flush_client(s.client)
    assert s.pauses == [("a", True), ("a", False)]


def test_a_new_session_gets_nothing_until_it_says_from_where() -> None:
    s = Setup()
    a = s.stream("a")
    s.publish((a, [0]), (a, [1]))
    s.router.take()
    s.client.begin_session(Peer(b"q", 0.0), 100, "", 0.0)
    s.publish((a, [2]))
    s.sender.flush_client(s.client)
    assert s.router.take() == []
    a.rewind(1)
    s.client.waiting["a"] = a
    s.sender.flush_client(s.client)
    assert s.router.rows() == [["a", 1, 2, [1, 2], "bc"]]


def test_large_backlogs_are_cut_into_several_messages() -> None:
    s = Setup(credit=0, log_tokens=1_000_000)
    streams = [s.stream(f"s{i}") for i in range(4)]
    for stream in streams:
        s.publish((stream, [1] * 20_000))
    s.client.credit = 100
    s.sender.flush_client(s.client)
    assert len(s.router.take()) > 1


# ------------------------------------------------------------ stream


@given(
    st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(8, 40),
    st.data(),
)
def test_rewind_gives_ids_and_text_from_any_seq_in_the_log_also_after_trimming(
    batches: list[list[int]], max_tokens: int, data: st.DataObject
) -> None:
    pieces = [bytes((97 + i,)) for i in range(24)] + ["\u00e9".encode()[:1], "\u00e9".encode()[1:]]
    vocabulary = make_vocabulary(pieces)
    stream = Stream("j", Client("c"), None, "", OWNER)
    request = JobRequest(job="j", prompt="x")
    prepared = Prepared(request, np.array([1], np.int32), Sampling(), (), 10, 0)
    stream.open(prepared, Detokenizer(vocabulary))
    source = Detokenizer(vocabulary)
    shown = [""]  # text after n tokens
    ids: list[int] = []
    for batch in batches:
        text = ""
        for token in batch:
            piece, _ = source.feed([token])
            text += piece
            shown.append(shown[-1] + piece)
        event = Tokens("j", 1, len(ids) + 1, batch, text)
        stream.append(event)
        ids += batch
        if data.draw(st.booleans()):
            stream.mark_all_sent()
            stream.trim(max_tokens)
    for after in range(len(ids) + 2):
        if after < stream.base_seq or after > len(ids):
            with pytest.raises(Gone):
                stream.rewind(after)
            continue
        stream.rewind(after)
        _, _, seq, rest, text = stream.unsent()
        assert (seq, rest) == (after + 1, ids[after:])
        assert text == shown[-1][len(shown[after]) :]


def test_a_stream_that_continues_begins_after_what_the_client_has() -> None:
    stream = Stream("j", Client("c"), None, "", OWNER)
    open_stream(stream, (1, 2, 3))
    assert (stream.base_seq, stream.last_seq, stream.has_unsent) == (3, 3, False)
    stream.append(Tokens("j", 1, 4, [4], "e"))
    stream.rewind(3)
    assert stream.unsent() == ["j", 1, 4, [4], "e"]
    with pytest.raises(Gone):
        stream.rewind(2)


# ------------------------------------------------------------ small parts


def test_ten_strikes_in_ten_seconds_mute_and_slow_ones_do_not() -> None:
    peer = Peer(b"p", 0.0)
    assert [peer.strike(i * 0.5) for i in range(STRIKES)] == [False] * 9 + [True]
    assert peer.muted_until_s == 4.5 + MUTE_S
    slow = Peer(b"q", 0.0)
    assert not any(slow.strike(i * 1.5) for i in range(30))


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "b"},
        {"prompt": None, "input_ids": (97,)},
        {"params": SamplingParams(seed=1)},
        {"priority": "high"},
        {"tenant": "t"},
        {"model": "m"},
    ],
)
def test_the_digest_differs_with_everything_that_decides_the_answer(other: dict[str, Any]) -> None:
    base: dict[str, Any] = {"job": "j", "prompt": "a"}
    same = digest_of(JobRequest(**base))
    assert digest_of(JobRequest(**{**base, "deadline_ms": 5, "have": (1,)})) == same
    assert digest_of(JobRequest(**{**base, **other})) != same


def barks_at(watchdog: Watchdog, from_s: int, to_s: int) -> int | None:
    """Look each second; when it is found hung."""
    return next((now_s for now_s in range(from_s, to_s) if watchdog.is_hung(now_s)), None)


def test_the_watchdog_barks_after_silence_but_not_at_long_steps_or_while_loading() -> None:
    watchdog = Watchdog(hang_s=60)
    assert barks_at(watchdog, 900, 1_000) is None
    watchdog.ready(1_000)
    assert barks_at(watchdog, 1_000, 1_100) == 1_061
    watchdog.heard(1_061)
    watchdog.note_step(20_000_000)
    assert barks_at(watchdog, 1_062, 1_300) == 1_262
    watchdog.forget()
    assert barks_at(watchdog, 1_263, 1_500) is None


def test_a_watchdog_that_was_frozen_itself_begins_anew() -> None:
    watchdog = Watchdog(hang_s=60)
    watchdog.ready(1_000)
    assert barks_at(watchdog, 1_001, 1_010) is None
    assert barks_at(watchdog, 5_000, 5_100) == 5_061
