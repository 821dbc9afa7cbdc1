"""New rows: the kernel equals its reference, and what the host packs arrives whole, in however many
packets."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from broker.ring.records import Sampling
from engine.errors import PlanError
from engine.gpu import new_row_upload, row_tables
from engine.gpu.memory import StepLimits
from engine.gpu.new_row_upload import _HEADER, NewRowUpload
from engine.gpu.row_tables import RowTables, SampleKind
from engine.gpu.staging import NUM_SLOTS
from engine.plan import NewRow
from kernels.new_rows import HEADER_INTS, write_new_rows, write_new_rows_ref
from kernels.penalties import PenaltyTables, new_penalty_tables
from kernels.sampling_tables import MAX_STOP_IDS, SamplingTables, new_sampling_tables
from tests.kernels.util import DEVICE

VOCAB = 90
POISON = -77
GREEDY = Sampling()
PENALTIES = Sampling(repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=0.75)


def poisoned_tables(
    num_rows: int, num_columns: int, device: str
) -> tuple[torch.Tensor, SamplingTables, PenaltyTables]:
    """Tables full of NaN and nonsense: what a kernel forgets, or should not write, shows."""
    tokens = torch.empty(num_rows, num_columns, dtype=torch.int32, device=device)
    sampling = new_sampling_tables(num_rows, torch.device(device))
    penalties = new_penalty_tables(num_rows, VOCAB, torch.device(device))
    for tensor in (tokens, *tensors_of(sampling, penalties)):
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)
    return tokens, sampling, penalties


def tensors_of(*tables: SamplingTables | PenaltyTables) -> list[torch.Tensor]:
    return [getattr(table, field.name) for table in tables for field in fields(table)]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def make_packet(rows: list[int], lengths: list[int], seed: int) -> torch.Tensor:
    """Headers of any numbers at all, and ids in the order of the last header first."""
    gen = torch.Generator().manual_seed(seed)
    headers = torch.randint(-(2**31), 2**31, (len(rows), HEADER_INTS), generator=gen).int()
    headers[:, 3:9] = torch.randn(len(rows), 6, generator=gen).view(torch.int32)
    headers[:, 0], headers[:, 1] = torch.tensor(rows), torch.tensor(lengths)
    ids_at = headers.numel() + 5
    for index in reversed(range(len(rows))):
        headers[index, 2] = ids_at
        ids_at += lengths[index]
    ids = torch.randint(0, VOCAB, (ids_at - headers.numel(),), generator=gen).int()
    return torch.cat([headers.flatten(), ids])


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([3], [1]),
        ([0], [0]),
        ([-1], [7]),
        ([6, -1, 0, 5], [1023, 1500, 0, 1025]),
        ([2, 4, 1, 3, 0, 6, 5], [1, 16, 2500, 1024, 0, 3, 2049]),
    ],
)
def test_new_rows_land_and_all_others_stay(rows: list[int], lengths: list[int]) -> None:
    packet = make_packet(rows, lengths, seed=len(rows))
    tokens, *tables = poisoned_tables(7, 2501, DEVICE)
    expected_tokens, *expected = poisoned_tables(7, 2501, "cpu")
    write_new_rows(packet.to(DEVICE), len(rows), max(lengths), tokens, *tables)
    write_new_rows_ref(packet, len(rows), expected_tokens, *expected)
    assert_same_bits([tokens, *tensors_of(*tables)], [expected_tokens, *tensors_of(*expected)])
    stay = [row for row in range(7) if row not in rows]
    assert (tokens[stay] == POISON).all()
    assert tables[0].temperature[stay].isnan().all()
    assert (tables[1].counts == POISON).all()


def limits_of(max_rows: int, max_tokens: int, max_len: int) -> StepLimits:
    return StepLimits(max_rows, max_tokens, max_len, block_size=16)


def new_row(row: int, num_ids: int, sampling: Sampling = GREEDY, num_stops: int = 0) -> NewRow:
    rng = np.random.default_rng(1000 * row + num_ids)
    ids = rng.integers(0, VOCAB, num_ids).astype(np.int32)
    stops = np.arange(num_stops, dtype=np.int32) + row
    return NewRow(row, ids, num_ids // 2, sampling, stops, min_position=num_ids + 3)


def poisoned_row_tables(limits: StepLimits) -> RowTables:
    tables = RowTables(limits, VOCAB, torch.device(DEVICE))
    tables.token_table, tables.sampling, tables.penalties = poisoned_tables(
        limits.max_num_seqs, limits.max_model_len + 1, DEVICE
    )
    return tables


def assert_holds(tables: RowTables, new: NewRow) -> None:
    """The row has what the request says, number by number."""
    s, table, row, num = new.sampling, tables.sampling, new.row, len(new.token_ids)
    assert tables.token_table[row, :num].tolist() == new.token_ids.tolist()
    assert (tables.token_table[row, num:] == POISON).all()
    wanted = {
        "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p,
        "min_position": new.min_position,
    }  # fmt: skip
    for name, value in wanted.items():
        held = getattr(table, name)[row]
        assert held.item() == torch.tensor(value).to(held.dtype).item(), name
    assert table.seed[row].item() % 2**64 == s.seed
    stops = new.stop_token_ids.tolist()[:MAX_STOP_IDS]
    assert table.stop_ids[row].tolist() == stops + [-1] * (MAX_STOP_IDS - len(stops))
    p = tables.penalties
    numbers = [p.repetition[row].item(), p.presence[row].item(), p.frequency[row].item()]
    assert numbers == [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]


def assert_counted(tables: RowTables, new: NewRow) -> None:
    counts = np.bincount(new.token_ids[new.num_prompt_tokens :], minlength=VOCAB) * 2
    counts[np.unique(new.token_ids[: new.num_prompt_tokens])] += 1
    assert tables.penalties.counts[new.row].tolist() == counts.tolist()


def test_a_header_is_as_wide_as_the_kernel_says() -> None:
    assert _HEADER.itemsize == 4 * HEADER_INTS


def test_every_setting_of_a_request_arrives() -> None:
    tables = poisoned_row_tables(limits_of(5, 64, 128))
    settings = Sampling(2**64 - 1, 0.7, 0.9, 0.05, 40, 1.25, 0.5, -0.5)
    rows = [
        new_row(4, 129, settings, num_stops=3),
        new_row(0, 1, Sampling(seed=2**63 + 5), num_stops=MAX_STOP_IDS + 2),
        new_row(2, 0, Sampling(seed=2**32 - 1, temperature=0.1, top_k=3)),
        new_row(3, 30, PENALTIES._replace(seed=2**31)),
    ]
    tables.take_over(rows)
    for new in rows:
        assert_holds(tables, new)
    assert_counted(tables, rows[0])
    assert_counted(tables, rows[3])
    assert (tables.penalties.counts[:3] == POISON).all(), "no penalties, none before"
    assert (tables.token_table[1] == POISON).all()
    assert tables.sampling.top_p[1].isnan()
    kinds = (SampleKind.PLAIN, SampleKind.PLAIN, SampleKind.FILTERED)
    assert tables.kinds.tolist() == [*kinds, SampleKind.PENALISED, SampleKind.PENALISED]


def test_a_minimum_beyond_all_positions_holds_stop_ids_back_for_ever() -> None:
    tables = poisoned_row_tables(limits_of(1, 64, 64))
    tables.take_over([replace(new_row(0, 4), min_position=4 + 2**31 - 1)])
    assert tables.sampling.min_position.tolist() == [2**31 - 1]


def test_a_row_that_had_penalties_is_neutral_for_the_next_run() -> None:
    tables = poisoned_row_tables(limits_of(2, 64, 64))
    tables.take_over([new_row(1, 20, PENALTIES)])
    after = new_row(1, 40)
    tables.take_over([after])
    assert_holds(tables, after)
    assert_counted(tables, after)


def test_rows_that_do_not_fit_into_one_packet_go_in_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fresh = new_row_upload._fresh
    monkeypatch.setattr(new_row_upload, "_fresh", lambda num: sizes.append(num) or fresh(num))
    tables = poisoned_row_tables(limits_of(8, 16, 40))  # 41 ids a packet
    lengths = [41, 0, 1, 40, 30, 12, 29, 41]  # | 41 0 | 1 40 | 30 | 12 29 | 41
    rows = [new_row(i, num, PENALTIES._replace(seed=i)) for i, num in enumerate(lengths)]
    tables.take_over(rows)
    for new in rows:
        assert_holds(tables, new)
        assert_counted(tables, new)
    assert len(sizes) == 4
    tables.take_over([new_row(3, 41)])
    assert len(sizes) == 4


def test_more_rows_than_headers_go_in_more_packets() -> None:
    upload = NewRowUpload(limits_of(2, 64, 64), torch.device(DEVICE))
    sent = upload.send([new_row(i, 3) for i in range(5)], {0, 3, 4})
    assert [(s.num_rows, s.runs[0].tolist()) for s in sent] == [(2, [0]), (2, [3]), (1, [4])]


def test_what_is_sent_once_more_is_packed_into_the_same_three_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = limits_of(6, 64, 48)
    tables = poisoned_row_tables(limits)
    made: list[object] = []
    pin, empty, zeros = torch.Tensor.pin_memory, torch.empty, torch.zeros

    def counted(make):
        return lambda *args, **options: made.append(args) or make(*args, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", counted(pin))
    monkeypatch.setattr(torch, "empty", counted(empty))
    monkeypatch.setattr(torch, "zeros", counted(zeros))
    used = set()
    take = tables._upload._host.take

    def seen():
        tensor, array = take()
        used.add(tensor.data_ptr())
        return tensor, array

    monkeypatch.setattr(tables._upload._host, "take", seen)
    latest: dict[int, NewRow] = {}
    for step in range(3 * NUM_SLOTS + 1):
        rows = [new_row((step + i) % 6, 3 + step + i, Sampling(seed=step)) for i in range(3)]
        rows.append(new_row((step + 3) % 6, 15, PENALTIES))
        tables.token_table[[new.row for new in rows]] = POISON
        tables.take_over(rows)
        latest.update((new.row, new) for new in rows)
        for new in latest.values():
            assert_holds(tables, new)
    assert made == []
    assert len(used) == NUM_SLOTS


def test_without_new_rows_nothing_is_launched_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = poisoned_row_tables(limits_of(2, 16, 16))
    monkeypatch.setattr(row_tables, "write_new_rows", None)
    monkeypatch.setattr(tables, "_upload", None)
    tables.take_over([])


def test_a_row_of_more_ids_than_the_table_has_is_refused_before_anything_is_sent() -> None:
    tables = poisoned_row_tables(limits_of(2, 64, 16))
    with pytest.raises(PlanError, match="row 1 got 18 of 17 ids"):
        tables.take_over([new_row(0, 3), new_row(1, 18, PENALTIES)])
    assert (tables.token_table == POISON).all()
    assert tables.kinds.tolist() == [SampleKind.PLAIN] * 2


def test_warming_up_writes_nothing() -> None:
    tables = poisoned_row_tables(limits_of(2, 64, 16))
    untouched = poisoned_tables(2, 17, "cpu")
    tables.warm_up()
    assert_same_bits(
        [tables.token_table, *tensors_of(tables.sampling, tables.penalties)],
        [untouched[0], *tensors_of(*untouched[1:])],
    )
