"""The simulated accelerator itself: what other tests rely on, and each mistake that it must find."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import sim as sim_package
from tests.sim import Simulator


def late_copy(stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
    with stream:
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# --------------------------------------------------------------------------------------------------- memory


def test_bytes_are_counted_exactly(sim: Simulator) -> None:
    before = sim.now()
    kept = torch.empty(3, 5, dtype=torch.bfloat16, device="sim")
    assert sim.now() - before == 30
    temporary = kept + 1
    del temporary
    assert (sim.now() - before, sim.peak() - before) == (30, 60)
    sim.reset_peak()
    assert sim.peak() == sim.now()
    kept.untyped_storage().resize_(0)
    assert sim.now() == before


def test_memory_statistics_by_either_door(sim: Simulator) -> None:
    before = torch.accelerator.memory_allocated()
    held = torch.zeros(100, device="sim")
    device_module = torch.get_device_module("sim")
    assert torch.accelerator.memory_allocated() - before == device_module.memory_allocated() - before == 400
    del held
    assert torch.accelerator.max_memory_allocated() == device_module.max_memory_allocated() >= before + 400
    torch.accelerator.reset_peak_memory_stats()
    assert device_module.max_memory_allocated() == before
    sim.set_cap(before + 1000)
    assert torch.accelerator.get_memory_info() == device_module.mem_get_info() == (1000, before + 1000)


def test_allocation_beyond_the_cap_raises(sim: Simulator) -> None:
    before = sim.now()
    sim.set_cap(before + 100)
    torch.empty(100, dtype=torch.uint8, device="sim")
    with pytest.raises(
        torch.OutOfMemoryError, match=rf"asked for 101 bytes with {before} of {before + 100} bytes"
    ):
        torch.empty(101, dtype=torch.uint8, device="sim")
    assert sim.now() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fresh_and_released_memory_is_nan(sim: Simulator, dtype: torch.dtype) -> None:
    slot = torch.empty(8, dtype=dtype, device="sim")
    assert slot.isnan().all()
    slot.fill_(1)
    nbytes = slot.untyped_storage().nbytes()
    slot.untyped_storage().resize_(0)
    slot.untyped_storage().resize_(nbytes)
    assert slot.isnan().all()


def test_devices_do_not_mix(sim: Simulator) -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device="sim")
    mistakes = [
        lambda: here + there,
        lambda: there @ here,
        lambda: torch.cat([there, here]),
        lambda: F.embedding(torch.tensor([1]), there),
        lambda: F.cross_entropy(there, torch.tensor([0, 1])),
        lambda: there.mul_(here),
    ]
    for mistake in mistakes:
        with pytest.raises(RuntimeError, match="same device"):
            mistake()
    assert (there * torch.tensor(2.0)).device.type == "sim"  # a host scalar is welcome, as on hardware


# ---------------------------------------------------------------------------------------------- late copies


def test_missing_wait_is_a_wrong_value_and_a_race(sim: Simulator) -> None:
    slot = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    ready = late_copy(torch.Stream(device="sim"), slot, torch.ones(4).pin_memory())
    assert slot.sum().item() == 0
    assert (
        len(sim.races()) == 1 and "may still be writing" in sim.races()[0] and "aten::sum" in sim.races()[0]
    )
    current().wait_event(ready)
    assert slot.sum().item() == 4
    sim.reset()


def test_host_buffer_that_is_refilled_too_early_arrives_wrong(sim: Simulator) -> None:
    host, slot = torch.ones(4).pin_memory(), torch.empty(4, device="sim")
    ready = late_copy(torch.Stream(device="sim"), slot, host)
    host.fill_(2)  # nobody waited for `ready`
    ready.synchronize()
    assert slot.tolist() == [2, 2, 2, 2]


def test_waiting_on_the_device_does_not_free_the_host_buffer(sim: Simulator) -> None:
    host, slot = torch.ones(4).pin_memory(), torch.empty(4, device="sim")
    current().wait_event(late_copy(torch.Stream(device="sim"), slot, host))
    host.fill_(2)  # the compute stream will wait, the host did not
    assert slot.tolist() == [2, 2, 2, 2]


def test_copy_to_the_host_is_poison_until_synchronised(sim: Simulator) -> None:
    device, host = torch.ones(4, device="sim"), torch.empty(4, pin_memory=True)
    side = torch.Stream(device="sim")
    side.wait_stream(current())
    done = late_copy(side, host, device)
    assert host.isnan().all()
    done.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_copies_on_the_compute_stream_are_late_for_the_host_only(sim: Simulator) -> None:
    host, slot, back = (
        torch.ones(4).pin_memory(),
        torch.zeros(4, device="sim"),
        torch.empty(4, pin_memory=True),
    )
    slot.copy_(host, non_blocking=True)
    back.copy_(slot * 2, non_blocking=True)
    assert back.isnan().all()
    torch.accelerator.synchronize()
    assert back.tolist() == [2, 2, 2, 2]


def test_a_stream_keeps_its_order(sim: Simulator) -> None:
    side, slot = torch.Stream(device="sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        slot.copy_(torch.ones(4), non_blocking=True)
        slot.mul_(3)
    side.synchronize()
    assert slot.tolist() == [3, 3, 3, 3]


def test_events_and_streams_tell_the_host_when_they_are_over(sim: Simulator) -> None:
    slot, side = torch.zeros(4, device="sim"), torch.Stream(device="sim")
    assert torch.Event("sim").query()
    first = late_copy(side, slot, torch.ones(4))
    second = late_copy(side, slot, torch.full((4,), 2.0))
    assert not first.query()  # asking does not wait, but a loop that polls ends
    assert first.query() and not side.query()
    assert slot.tolist() != [1, 1, 1, 1]
    second.synchronize()
    assert second.query() and side.query() and slot.tolist() == [2, 2, 2, 2]
    assert sim.pending() == 0
    sim.reset()


def test_elapsed_time_is_refused(sim: Simulator) -> None:
    start, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    with pytest.raises(NotImplementedError, match="keep no time"):
        start.elapsed_time(end)


# ------------------------------------------------------------------------------------------- happens-before


def stream_layers(
    sim: Simulator, slots: int, copy_waits: bool, compute_waits: bool, layers: int = 6
) -> Tensor:
    """Sum of the layers' weights 0, 1, ... computed on the device through a ring of slots."""
    host = [torch.full((8,), float(layer)).pin_memory() for layer in range(layers)]
    ring = torch.empty(slots, 8, device="sim")
    total = torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    stream = torch.Stream(device="sim")
    released: list[torch.Event | None] = [None] * slots
    for layer in range(layers):
        slot, free = ring[layer % slots], released[layer % slots]
        if copy_waits and free is not None:
            stream.wait_event(free)
        loaded = late_copy(stream, slot, host[layer])
        if compute_waits:
            current().wait_event(loaded)
        total += slot
        released[layer % slots] = current().record_event()
    return total


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_correct_ring_has_no_race(sim: Simulator, slots: int) -> None:
    assert stream_layers(sim, slots, copy_waits=True, compute_waits=True).tolist() == [15.0] * 8
    assert sim.races() == []


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_copy_that_does_not_wait_for_compute_is_a_race(sim: Simulator, slots: int) -> None:
    total = stream_layers(sim, slots, copy_waits=False, compute_waits=True)
    assert total.tolist() == [15.0] * 8  # the value is right here, and would be wrong on hardware
    assert len(sim.races()) == slots  # one sentence for each slot, however often it happens
    assert all(
        "a host-to-device copy on stream" in race and "may still be reading" in race for race in sim.races()
    )
    sim.reset()


def test_compute_that_does_not_wait_for_the_copy_is_a_race(sim: Simulator) -> None:
    assert stream_layers(sim, slots=2, copy_waits=True, compute_waits=False).isnan().all()
    assert any("may still be writing" in race for race in sim.races())
    sim.reset()


def test_an_event_recorded_too_early_does_not_cover_later_work(sim: Simulator) -> None:
    slot, side = torch.ones(4, device="sim"), torch.Stream(device="sim")
    too_early = current().record_event()
    slot.sum()
    side.wait_event(too_early)
    late_copy(side, slot, torch.zeros(4))
    assert len(sim.races()) == 1
    sim.reset()


def test_reading_together_is_no_race_and_order_is_transitive(sim: Simulator) -> None:
    slot, backs = torch.ones(4, device="sim"), [torch.empty(4, pin_memory=True) for _ in range(2)]
    first, second = torch.Stream(device="sim"), torch.Stream(device="sim")
    first.wait_stream(current())
    done = late_copy(first, backs[0], slot)
    slot.sum()  # compute reads what the copy reads
    second.wait_event(done)
    late_copy(second, backs[1], slot)  # knows of compute's writes through `first`
    assert sim.races() == []
    current().wait_stream(second)
    slot.zero_()  # after both readers
    assert sim.races() == []
    sim.synchronize()
    assert backs[0].tolist() == backs[1].tolist() == [1, 1, 1, 1]


def test_disjoint_parts_of_one_buffer_are_independent(sim: Simulator) -> None:
    ring, host = torch.ones(2, 4, device="sim"), torch.zeros(2, 4).pin_memory()
    torch.accelerator.synchronize()
    out, back = torch.Stream(device="sim"), torch.Stream(device="sim")
    ring[0].sum()
    late_copy(out, ring[1], host[1])
    late_copy(back, host[0], ring[0])
    assert sim.races() == []
    late_copy(out, ring[1], host[0])  # host[0] is being written on the other stream
    assert len(sim.races()) == 1 and "pinned block" in sim.races()[0]
    sim.reset()


def test_what_the_host_has_waited_for_is_over(sim: Simulator) -> None:
    slot, side = torch.ones(4, device="sim"), torch.Stream(device="sim")
    slot.sum().item()
    late_copy(side, slot, torch.zeros(4)).synchronize()
    assert slot.sum().item() == 0
    assert sim.races() == []


def test_memory_released_while_another_stream_uses_it(sim: Simulator) -> None:
    def offload(announce: bool) -> None:
        hidden, host = torch.ones(4, device="sim"), torch.empty(4, pin_memory=True)
        side = torch.Stream(device="sim")
        side.wait_stream(current())
        late_copy(side, host, hidden)
        if announce:
            hidden.record_stream(side)
        del hidden
        side.synchronize()
        assert host.tolist() == [1, 1, 1, 1]

    offload(announce=True)
    assert sim.races() == []
    offload(announce=False)
    assert len(sim.races()) == 1 and "record_stream" in sim.races()[0]
    sim.reset()


def test_memory_of_a_side_stream_released_while_compute_uses_it(sim: Simulator) -> None:
    def onload(announce: bool) -> None:
        side = torch.Stream(device="sim")
        with side:
            hidden = torch.ones(4).pin_memory().to("sim", non_blocking=True)
        current().wait_stream(side)
        if announce:
            hidden.record_stream(current())
        hidden.sum()

    onload(announce=True)
    assert sim.races() == []
    onload(announce=False)
    assert len(sim.races()) == 1 and "was released while aten::sum on stream 0" in sim.races()[0]
    sim.reset()


def test_a_race_fails_the_test_that_has_it(sim: Simulator) -> None:
    teardown = sim_package.sim_fixture.__wrapped__()  # type: ignore[attr-defined]
    simulator = next(teardown)
    slot = torch.ones(4, device="sim")
    late_copy(torch.Stream(device="sim"), slot, torch.zeros(4))
    assert len(simulator.races()) == 1
    with pytest.raises(pytest.fail.Exception, match="data races on the simulated accelerator"):
        next(teardown)


# -------------------------------------------------------------------------------------------------- threads


def test_copies_enqueued_by_a_background_thread(sim: Simulator) -> None:
    layers, slots = 20, 2
    host = [torch.full((8,), float(layer)).pin_memory() for layer in range(layers)]
    ring, total = torch.empty(slots, 8, device="sim"), torch.zeros(8, device="sim")
    torch.accelerator.synchronize()
    stream = torch.Stream(device="sim")
    loaded: list[torch.Event] = []
    released: list[torch.Event] = []
    may_load, may_compute = threading.Semaphore(slots), threading.Semaphore(0)

    def load() -> None:
        with stream:
            for layer in range(layers):
                may_load.acquire()
                if layer >= slots:
                    stream.wait_event(released[layer - slots])
                ring[layer % slots].copy_(host[layer], non_blocking=True)
                loaded.append(stream.record_event())
                may_compute.release()

    thread = threading.Thread(target=load)
    thread.start()
    for layer in range(layers):
        may_compute.acquire()
        assert current().stream_id == 0  # the other thread's `with stream` is its own
        current().wait_event(loaded[layer])
        total += ring[layer % slots]
        released.append(current().record_event())
        may_load.release()
    thread.join()
    assert total.tolist() == [190.0] * 8


def test_threads_that_allocate_copy_and_free_do_not_disturb_each_other(sim: Simulator) -> None:
    before = sim.now()
    failures: list[str] = []

    def work(seed: int) -> None:
        stream = torch.Stream(device="sim")
        with stream:
            for step in range(50):
                value = float(seed * 100 + step)
                there = torch.full((16,), value).pin_memory().to("sim", non_blocking=True)
                if (there + 1).sum().item() != 16 * (value + 1):
                    failures.append(f"thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and sim.now() == before


# ----------------------------------------------------------------------------------------- host memory, bus


def test_pinned_memory(sim: Simulator) -> None:
    pinned = torch.empty(3, 4, pin_memory=True)
    assert pinned.is_pinned() and pinned[1:, 2].is_pinned() and torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned() and not torch.ones(3, device="sim").is_pinned()
    assert pinned.isnan().all()
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


def test_traffic_is_counted(sim: Simulator) -> None:
    slot = torch.zeros(8, device="sim")
    slot.copy_(torch.ones(8))
    slot.copy_(torch.ones(8), non_blocking=True)
    slot[:2].cpu()
    assert sim.traffic() == {
        "h2d_copies": 2,
        "h2d_nbytes": 64,
        "d2h_copies": 1,
        "d2h_nbytes": 8,
        "unpinned_late_copies": 1,
    }


# ------------------------------------------------------------------------------------------- random numbers


def test_the_device_has_a_generator_of_its_own(sim: Simulator) -> None:
    torch.manual_seed(0)
    expected = torch.rand(4, device="sim").tolist()
    torch.manual_seed(0)
    torch.rand(100)  # host draws do not disturb device draws
    assert torch.rand(4, device="sim").tolist() == expected
    torch.manual_seed(0)
    host = torch.rand(4)
    torch.manual_seed(0)
    torch.rand(100, device="sim")
    assert torch.equal(torch.rand(4), host)


def test_restored_state_gives_the_same_mask(sim: Simulator) -> None:
    ones = torch.ones(64, device="sim")
    state = torch.get_device_module("sim").get_rng_state("sim")
    first, second = F.dropout(ones, 0.5), F.dropout(ones, 0.5)
    assert not torch.equal(first, second)
    torch.get_device_module("sim").set_rng_state(state, device="sim")
    assert torch.equal(F.dropout(ones, 0.5), first)
    with torch.random.fork_rng(device_type="sim"):
        inside = F.dropout(ones, 0.5)
    assert torch.equal(inside, second) and torch.equal(F.dropout(ones, 0.5), second)


def test_generators_know_their_device(sim: Simulator) -> None:
    generator = torch.Generator("sim").manual_seed(1)
    first = torch.randn(4, device="sim", generator=generator)
    assert torch.equal(torch.randn(4, device="sim", generator=generator.manual_seed(1)), first)
    with pytest.raises(RuntimeError, match="expected a generator on sim"):
        torch.randn(4, device="sim", generator=torch.Generator())


def test_checkpointed_dropout_draws_the_same_mask_again(sim: Simulator) -> None:
    inputs = torch.ones(64, device="sim", requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5), inputs, use_reentrant=False)
    output.sum().backward()
    assert inputs.grad is not None and torch.equal(inputs.grad, output.detach())


# ------------------------------------------------------------------------------------------------ operators


@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_and_its_gradients_equal_the_cpu(
    sim: Simulator, mask_dtype: torch.dtype | None, kv_heads: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 16) for heads in (4, kv_heads, kv_heads))
    mask = None if mask_dtype is None else (torch.rand(2, 1, 7, 7) > 0.2).to(mask_dtype)

    def run(device: str) -> list[Tensor]:
        qkv = [x.to(device).requires_grad_() for x in (q, k, v)]
        attn_mask = None if mask is None else mask.to(device)
        output = F.scaled_dot_product_attention(*qkv, attn_mask=attn_mask, enable_gqa=kv_heads != 4)
        return [output.cpu(), *(g.cpu() for g in torch.autograd.grad(output.square().sum(), qkv))]

    assert all(torch.equal(here, there) for here, there in zip(run("cpu"), run("sim"), strict=True))


@pytest.mark.parametrize(
    "activation", [F.silu, F.mish, F.gelu, lambda x: F.layer_norm(x, (9,)), lambda x: x.softmax(-1)]
)
def test_elementwise_and_norm_gradients_equal_the_cpu(
    sim: Simulator, activation: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    inputs, grad = torch.randn(5, 9), torch.randn(5, 9)
    results = []
    for device in ("cpu", "sim"):
        x = inputs.to(device).requires_grad_()
        y = activation(x)
        results.append((y.cpu(), torch.autograd.grad(y, x, grad.to(device))[0].cpu()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_out_arguments_are_resized_and_filled(sim: Simulator) -> None:
    ones, out = torch.ones(2, 2, device="sim"), torch.empty(0, device="sim")
    assert torch.mm(ones, ones, out=out) is out and out.tolist() == [[2, 2], [2, 2]]
    values, indices = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.long, device="sim")
    torch.topk(torch.arange(4.0, device="sim"), 2, out=(values, indices))
    assert values.tolist() == [3, 2] and indices.tolist() == [3, 2]
    assert torch.randperm(5, device="sim").sort().values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizer_equals_the_cpu(sim: Simulator, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    here = nn.Linear(5, 3)
    there = copy.deepcopy(here).to("sim")
    for module in (here, there):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 5, device=module.weight.device)).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert torch.equal(there.weight.cpu(), here.weight)


def test_views_indexing_and_convolution(sim: Simulator) -> None:
    raw = torch.zeros(64, dtype=torch.uint8, device="sim")
    weight = raw[16:48].view(torch.float32).view(2, 4)
    weight.fill_(1)
    assert raw.count_nonzero().item() == 16  # 0x3F800000 has two bytes that are not zero
    assert weight.unfold(1, 2, 1).data_ptr() == weight.data_ptr()
    assert torch.view_as_complex(weight.view(2, 2, 2)).data_ptr() == weight.data_ptr()
    rows = torch.tensor([1, 0, 1], device="sim")
    weight.index_add_(0, rows, torch.ones(3, 4, device="sim"))
    weight[rows[:1], 0] = 9
    assert weight.tolist() == [[2, 2, 2, 2], [9, 3, 3, 3]]
    here = nn.Conv1d(4, 4, 3, groups=4)
    there = copy.deepcopy(here).to("sim")
    for conv in (here, there):
        conv(torch.ones(1, 4, 9, device=conv.weight.device)).square().sum().backward()
    for left, right in zip(here.parameters(), there.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None
        assert torch.equal(left.grad, right.grad.cpu())


def test_integers_are_counted_and_complex_numbers_conjugated(sim: Simulator) -> None:
    experts = torch.tensor([0, 2, 2], dtype=torch.int32, device="sim")
    assert experts.histc(bins=3, min=0, max=2).tolist() == [1, 0, 2]
    z = torch.complex(torch.ones(2), torch.arange(2.0)).to("sim")
    assert z.conj().cpu().tolist() == [1 - 0j, 1 - 1j]
    assert torch.view_as_real(z).grad_fn is None and z.conj().imag.tolist() == [0, -1]


def test_moving_a_module_keeps_its_ties(sim: Simulator) -> None:
    embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head).to("sim")
    assert model[0].weight is model[1].weight and model[0].weight.device.type == "sim"
    embed.weight.data = torch.zeros(4, 3)  # a visit that ends gives the parameter host memory again
    assert head.weight.device.type == "cpu"


def test_autocast(sim: Simulator) -> None:
    linear = nn.Linear(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        hidden = linear(torch.ones(2, 4, device="sim"))
        assert hidden.dtype == torch.bfloat16 and hidden.softmax(-1).dtype == torch.float32
    assert linear(torch.ones(2, 4, device="sim")).dtype == torch.float32


def test_tensors_are_saved_and_loaded(sim: Simulator) -> None:
    file = io.BytesIO()
    torch.save(torch.arange(4.0, device="sim"), file)
    for location, device in ((None, "sim"), ("cpu", "cpu")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded.device.type == device and loaded.tolist() == [0, 1, 2, 3]


def test_transformers_trains_and_generates(sim: Simulator) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    here = LlamaForCausalLM(config)
    there = copy.deepcopy(here).to("sim")
    ids_BS = torch.randint(0, 64, (2, 9))
    losses = []
    for model in (here, there):
        ids = ids_BS.to(model.device)
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert losses[0].item() == losses[1].item()
    for (name, left), right in zip(here.named_parameters(), there.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None
        assert torch.equal(left.grad, right.grad.cpu()), name
    prompt = {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS)}
    answers = [
        model.generate(
            **{k: v.to(model.device) for k, v in prompt.items()}, max_new_tokens=4, do_sample=False
        )
        for model in (here, there)
    ]
    assert answers[1].device.type == "sim" and torch.equal(answers[0], answers[1].cpu())


# ---------------------------------------------------------------------------------------------- one process


def test_no_accelerator_is_available_outside_the_fixture() -> None:
    simulator = sim_package.load_sim()
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with simulator.visible():
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")
    assert not torch.accelerator.is_available()


def test_a_failed_build_shows_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++\n")
    monkeypatch.setattr(sim_package, "_SOURCE", broken)
    monkeypatch.setenv("AIRTUNE_TEST_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"broken\.cpp:1:1: error"):
        sim_package._build()
