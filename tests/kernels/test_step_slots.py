"""Both ends of a step equal their references, whichever slot is the step's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import IntegrityError
from engine.gpu import staging
from engine.gpu.staging import NUM_SLOTS, StepSlots
from kernels.inputs import expand_inputs_ref
from kernels.step_slots import DECODE_FIELDS, begin_decode, fetch_inputs
from kernels.table_updates import apply_block_changes_ref
from tests.kernels.util import DEVICE, IS_NATIVE

ROWS, COLUMNS, BLOCK_SIZE = 300, 9, 16
POISON = -77


def make_slots(count: int, num_inputs: int = DECODE_FIELDS * ROWS) -> StepSlots:
    """Slots after so many steps, with nonsense in them."""
    slots = StepSlots(num_inputs, ROWS, torch.device(DEVICE))
    slots.inputs.fill_(12345)
    slots.count.fill_(count)
    slots.next_step = count
    for step in range(count - NUM_SLOTS, count):
        slots._stamps[step % NUM_SLOTS] = step
    return slots


def decode_fields(size: int, num_live: int, gen: torch.Generator) -> torch.Tensor:
    """Inputs of a step of num_live rows, some of which do not sample, with changes of which most
    are for the very entries that the step writes to."""
    fields = torch.full((DECODE_FIELDS, size), -1, dtype=torch.int32)
    rows = torch.randperm(ROWS, generator=gen)[:num_live].int()
    computed = torch.randint(0, COLUMNS * BLOCK_SIZE, (num_live,), generator=gen).int()
    fields[3, :num_live], fields[4, :num_live] = rows, computed
    fields[5, :num_live] = torch.where(torch.arange(num_live) % 4 == 1, -1, rows)
    num_changes = num_live - num_live // 4
    fields[0, :num_changes] = rows[:num_changes].flip(0)
    fields[1, :num_changes] = (computed // BLOCK_SIZE)[:num_changes].flip(0)
    fields[2, :num_changes] = torch.arange(num_changes).int() + 1000
    return fields


@pytest.mark.parametrize("count", [0, 4, 2**33 + 2])
@pytest.mark.parametrize(("size", "num_live"), [(1, 1), (8, 5), (64, 64), (256, 200), (300, 300)])
def test_a_decode_step_begins_with_its_own_changes_in_the_block_table(
    size: int, num_live: int, count: int
) -> None:
    gen = torch.Generator().manual_seed(size + count)
    slots, fields = make_slots(count), decode_fields(size, num_live, gen)
    slots.next_inputs()[: fields.numel()] = fields.flatten().numpy()
    table = torch.randint(0, 1000, (ROWS, COLUMNS), generator=gen).int()
    outs = torch.full((6, 512), POISON, dtype=torch.int32, device=DEVICE)
    actual_table = table.clone().to(DEVICE)
    begin_decode(
        *outs[:, :size], slots.inputs, slots.count, actual_table, BLOCK_SIZE, pdl=IS_NATIVE
    )
    apply_block_changes_ref(fields[:3], table)
    rows, computed = fields[3], fields[4].clamp_min(0)
    expected = expand_inputs_ref(rows, computed, torch.arange(size + 1), table, BLOCK_SIZE)
    assert torch.equal(actual_table.cpu(), table)
    outs = outs.cpu()
    for out, wanted in zip(outs[:4, :size], expected, strict=True):
        assert out.tolist() == wanted.tolist()
    assert (outs[2, :num_live] >= 1000 * BLOCK_SIZE).any(), "no change was for this very step"
    assert outs[4, :size].tolist() == fields[5].tolist()
    assert outs[5, :num_live].tolist() == (computed + 1)[:num_live].tolist()
    assert (outs[:, size:] == POISON).all()


@pytest.mark.parametrize("num_inputs", [1, 37, 600])
def test_each_step_fetches_from_its_own_slot(num_inputs: int) -> None:
    slots = make_slots(0)
    for step in range(NUM_SLOTS + 2):
        slots.next_inputs()[:num_inputs] = range(100 * step, 100 * step + num_inputs)
        inputs = torch.full((1024,), POISON, dtype=torch.int32, device=DEVICE)
        fetch_inputs(inputs[:num_inputs], slots.inputs, slots.count)
        assert inputs[:num_inputs].tolist() == list(range(100 * step, 100 * step + num_inputs))
        assert (inputs[num_inputs:] == POISON).all()
        publish_nothing(slots)
        slots.launched()


def test_results_of_a_step_stay_until_its_slot_is_needed_again() -> None:
    slots = make_slots(0)
    tokens = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    wanted = {}
    for num_results in (3, ROWS, 0, 256, 1):
        bad = (tokens % 3 == num_results % 3).to(torch.int8)
        slots.publish((tokens + 1000 * num_results)[:num_results], bad[:num_results])
        launched = slots.launched()
        wanted[launched] = (num_results, bad.tolist())
        slots.wait(launched)
        for step in list(wanted)[-2:]:
            num, bad_flags = wanted[step]
            out_tokens, out_bad = slots.results(step)
            assert out_tokens[:num].tolist() == [1000 * num + i for i in range(num)]
            assert out_bad[:num].tolist() == bad_flags[:num]
    assert slots.count.item() == slots.next_step == 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pdl", [True, False])
def test_as_compiled_the_stamp_is_stored_behind_a_fence_of_every_thread(pdl: bool) -> None:
    script = f"""
import torch
from bench.offline import pretend
from kernels import step_slots
pretend()
def new(*shape, dtype=torch.int32): return torch.empty(*shape, dtype=dtype, device="meta")
step_slots.publish_results(
    new(3, 256), new(3, 256, dtype=torch.int8), new(3, dtype=torch.int64),
    new(1, dtype=torch.int64), new(256), new(256, dtype=torch.int8), {pdl},
)
(cache,) = step_slots._publish_kernel.device_caches.values()
(kernel,) = cache[0].values()
print(kernel.asm["ptx"])
"""
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "clients" / "python")])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"(@%p\d+ )?(st\.global\.b\d+|fence[\w.]+|bar\.sync)", done.stdout)
    # 256 results by 128 threads. The last two stores are the stamp and the count.
    assert [name for _, name in found] == [
        *["st.global.b32"] * 2, *["st.global.b8"] * 2,
        "fence.acq_rel.sys", "bar.sync", *["st.global.b64"] * 2,
    ]  # fmt: skip
    assert ("", "fence.acq_rel.sys") in found, "some threads do not fence"


def test_a_step_that_only_the_host_counted_is_found_when_it_is_collected() -> None:
    slots = make_slots(5)
    publish_nothing(slots)
    slots.results(slots.launched())
    step = slots.launched()  # nothing was published
    with pytest.raises(IntegrityError, match=f"not of {step}"):
        slots.results(step)


class Device:
    """Stands in for the current stream of a device that does something each time it is asked."""

    def __init__(self, *queries: Callable[[], bool]) -> None:
        self._queries = list(queries)

    def query(self) -> bool:
        """Whether all is done; IndexError where that was asked too often."""
        return self._queries.pop(0)()

    def take_over(self, slots: StepSlots, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the device that these slots wait for."""
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(slots, "_is_async", True)


def test_a_step_that_has_ended_is_not_waited_for(monkeypatch) -> None:
    slots = make_slots(5)
    publish_nothing(slots)
    step = slots.launched()
    Device().take_over(slots, monkeypatch)
    monkeypatch.setattr(staging, "_LOOK_EVERY_S", -1.0)  # a stamp that is not seen at once fails
    slots.wait(step)
    slots.wait(step - 1)
    slots.wait(step - 2)


def test_a_stamp_that_comes_later_is_waited_for(monkeypatch) -> None:
    slots = make_slots(5)
    step = slots.launched()
    was_asked = threading.Event()

    def work() -> None:
        was_asked.wait(10)
        slots._tokens[step % NUM_SLOTS, :2] = 17, 4
        slots._stamps[step % NUM_SLOTS] = step

    def is_idle() -> bool:
        was_asked.set()
        return False

    Device(*[is_idle] * 500).take_over(slots, monkeypatch)
    worker = threading.Thread(target=work)
    worker.start()
    slots.wait(step)
    assert was_asked.is_set(), "the stamp was not there yet"
    assert slots.results(step)[0][:2].tolist() == [17, 4]
    worker.join()


def test_a_stamp_that_comes_while_the_device_is_asked_counts(monkeypatch) -> None:
    slots = make_slots(5)
    step = slots.launched()

    def is_idle() -> bool:
        slots._stamps[step % NUM_SLOTS] = step
        return True

    Device(is_idle).take_over(slots, monkeypatch)
    slots.wait(step)


@pytest.mark.timeout(20)
def test_a_step_that_never_ran_is_found_and_not_waited_for() -> None:
    slots = make_slots(5)
    step = slots.launched()
    with pytest.raises(
        IntegrityError, match=f"holds the results of step {step - 3}, not of {step}"
    ):
        slots.wait(step)


@pytest.mark.timeout(20)
def test_a_step_that_never_ran_is_found_once_the_device_is_idle(monkeypatch) -> None:
    slots = make_slots(5)
    step = slots.launched()
    Device(lambda: False, lambda: True).take_over(slots, monkeypatch)
    with pytest.raises(IntegrityError, match=f"not of {step}"):
        slots.wait(step)


@pytest.mark.timeout(20)
def test_a_failure_of_the_device_ends_the_wait(monkeypatch) -> None:
    slots = make_slots(5)
    step = slots.launched()

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    Device(lambda: False, fail).take_over(slots, monkeypatch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        slots.wait(step)


def test_a_step_that_only_the_device_counted_is_found_before_the_next_one() -> None:
    slots = make_slots(5)
    publish_nothing(slots)
    slots.launched()
    slots.next_inputs()
    publish_nothing(slots)
    with pytest.raises(IntegrityError, match="holds the results of step 6"):
        slots.next_inputs()


def publish_nothing(slots: StepSlots) -> None:
    """The end of a step without results, waited for."""
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    slots.publish(none, none.to(torch.int8))
    synchronize()


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if IS_NATIVE:
        torch.cuda.synchronize()
