"""Both ends of a step equal their references, whichever slot is the step's."""

from __future__ import annotations

import pytest
import torch

from engine.errors import IntegrityError
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
        wanted[slots.launched()] = (num_results, bad.tolist())
        synchronize()
        for step in list(wanted)[-2:]:
            num, bad_flags = wanted[step]
            out_tokens, out_bad = slots.results(step)
            assert out_tokens[:num].tolist() == [1000 * num + i for i in range(num)]
            assert out_bad[:num].tolist() == bad_flags[:num]
    assert slots.count.item() == slots.next_step == 5


def test_a_step_that_only_the_host_counted_is_found_when_it_is_collected() -> None:
    slots = make_slots(5)
    publish_nothing(slots)
    slots.results(slots.launched())
    step = slots.launched()  # nothing was published
    with pytest.raises(IntegrityError, match=f"not of {step}"):
        slots.results(step)


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
