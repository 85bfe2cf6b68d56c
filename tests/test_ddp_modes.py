"""Every mode in which DDP runs a backward, and every way in which users drive it."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from checks import (
    Branches,
    assert_conserved,
    assert_equal_on_all_ranks,
    batch,
    gradients,
    local_gradients,
    loss_of,
    mean_over_ranks,
    residuals,
    run_conservation,
    wrap,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import SIDCoState, attach, sidco_hook, transport
from sidco_ddp.state import SIDCoState as State


def check_views(rank, world_size, hook):
    """Gradients that are views of the bucket or not, freed or zeroed in place: four times the same parameters."""
    found = []
    for view in (False, True):
        for set_to_none in (False, True):
            torch.manual_seed(3)
            ddp_model = wrap(Branches(), gradient_as_bucket_view=view)
            attach(ddp_model, **hook)
            optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
            for step in range(8):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(ddp_model, batch(rank, step)).backward()
                optimizer.step()
            found.append(nn.utils.parameters_to_vector(ddp_model.parameters()).detach())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compressor", ["none", "topk"])
def test_bucket_views(worlds, compressor):
    """H5: two iterations were right, later ones were not, depending on who owned the gradient's memory.

    Fails when the residual is a view of the bucket.
    """
    worlds(2).run(check_views, hook={"compressor": compressor, "ratio": 0.1})


def check_many_layers(rank, world_size):
    """Twenty small layers in many buckets, feedback from the first step on; the layout really changes."""
    seen = []
    original = State.begin

    def begin(self, bucket):
        call = original(self, bucket)
        seen.append((self.step, call.slot.layout.names))
        return call

    State.begin = begin
    try:
        layers = [layer for _ in range(20) for layer in (nn.Linear(24, 24), nn.Tanh())]
        run_conservation(nn.Sequential(*layers), rank, steps=5, ddp_options={"many_buckets": True}, ratio=0.05)
    finally:
        State.begin = original
    first, later = ([names for step, names in seen if step == wanted] for wanted in (1, 3))
    assert len(later) > 5
    assert first != later


def test_error_feedback_from_the_first_step_on(worlds):
    """H7: memory kept before DDP rebuilt its buckets no longer fitted afterwards. Fails with an index as the key."""
    worlds(2).run(check_many_layers)


def check_accumulation(rank, world_size, view, all_synchronised):
    """Four micro-batches without zero_grad, the rebuild in the middle; ratio 1 equals plain DDP, 0.05 loses nothing."""
    results = []
    model = Branches()
    for hook in (None, {"ratio": 1.0}, {"ratio": 0.05, "dense_fallback": False}):
        ddp_model = wrap(copy.deepcopy(model), gradient_as_bucket_view=view)
        state = attach(ddp_model, **hook) if hook else None
        for micro in range(4):
            synchronise = all_synchronised or micro == 3
            with contextlib.nullcontext() if synchronise else ddp_model.no_sync():
                loss_of(ddp_model, batch(rank, micro)).backward()
        results.append(gradients(ddp_model))
        assert state is None or state.step == (4 if all_synchronised else 1)
    plain, whole, sparse = results
    for name, expected in plain.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-5, atol=1e-7)
    true = [mean_over_ranks(local_gradients(model, batch(rank, micro))) for micro in range(4)]
    total = {name: sum(part[name] for part in true) for name in plain}
    assert_conserved(total, {name: part.double() for name, part in sparse.items()}, mean_over_ranks(residuals(state)))


@pytest.mark.parametrize("all_synchronised", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_accumulation_across_the_rebuild(worlds, view, all_synchronised):
    """H28: the first micro-batch vanished when gradient views moved to new buckets; nothing is sent twice either."""
    worlds(2).run(check_accumulation, view=view, all_synchronised=all_synchronised)


def check_step_count(rank, world_size, many_buckets, static):
    model = Branches()
    ddp_model = wrap(model, many_buckets=many_buckets, static_graph=static)
    state = attach(ddp_model, ratio=0.1)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for step in range(12):
        last = step % 4 == 3 or static
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss_of(ddp_model, batch(rank, step)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    assert state.step == (12 if static else 3)
    assert len(state.stats()["buckets"]) == (1 if not many_buckets else len(state._slots._slots))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("many_buckets", [False, True])
def test_a_step_is_a_synchronised_backward(worlds, many_buckets, static):
    """H14: counters ran once a bucket, a parameter group, or not at all, so warm-up ended too early.

    In the first backward of a static graph DDP gives every bucket the index 0 and calls none the last. Fails when
    the index decides.
    """
    worlds(2).run(check_step_count, many_buckets=many_buckets, static=static)


def check_order(rank, world_size):
    """The hash seed differs by rank; what is posted does not."""
    posted = []
    original = transport._all_gather_single, dist.all_reduce

    def gather(output, message, **options):
        posted.append(("gather", message.numel(), str(message.dtype)))
        return original[0](output, message, **options)

    def reduce(tensor, *arguments, **options):
        posted.append(("reduce", tensor.numel(), str(tensor.dtype)))
        return original[1](tensor, *arguments, **options)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12, dtype=DTYPES[i % 3]) for i in range(60))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                if i % 7 and (i + rank) % 5:
                    x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x

    ddp_model = wrap(Layers(), many_buckets=True, find_unused_parameters=True)
    attach(ddp_model, ratio=0.05)
    transport._all_gather_single, dist.all_reduce = gather, reduce
    try:
        for step in range(3):
            factor = 0.0 if step == rank else 1.0
            (loss_of(ddp_model, batch(rank, step, 12)) * factor).backward()
    finally:
        transport._all_gather_single, dist.all_reduce = original
    return posted


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def test_collectives_are_posted_in_one_order(worlds):
    """H19: iteration over a set, or skipping because a selection is empty, made ranks meet in different collectives."""
    first, second = worlds(2).run(check_order)
    assert len(first) > 30
    assert first == second


class Uneven:
    """Batches until this rank has no more."""

    def __init__(self, rank, counts):
        self.count = counts[rank]

    def __iter__(self):
        return iter(range(self.count))


def check_join(rank, world_size, initial, hook, unused):
    """Against plain DDP at ratio 1; and no rank keeps anything back for ever below it."""
    model = Branches()
    parameters = []
    for use_hook in (False, True):
        ddp_model = wrap(copy.deepcopy(model), many_buckets=True, find_unused_parameters=unused)
        state = attach(ddp_model, **hook) if use_hook else None
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
        with ddp_model.join(divide_by_initial_world_size=initial):
            for step in Uneven(rank, [3, 9]):
                optimizer.zero_grad()
                loss_of(ddp_model, batch(rank, step)).backward()
                optimizer.step()
        parameters.append({name: p.detach().clone() for name, p in ddp_model.module.named_parameters()})
        assert_equal_on_all_ranks(parameters[-1])
    if hook["ratio"] == 1.0:
        for name, expected in parameters[0].items():
            torch.testing.assert_close(parameters[1][name], expected, rtol=1e-5, atol=1e-6)
    norm = torch.cat(list(residuals(state).values())).norm().item() if hook["ratio"] < 1.0 else 0.0
    assert state.step == 9
    return norm


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("initial", [True, False])
def test_join_with_uneven_inputs(worlds, initial, unused):
    """H21: a rank that ran out of data left the others waiting. Both divisors equal plain DDP's.

    Fails without ``num_contributors``.
    """
    worlds(2).run(check_join, initial=initial, unused=unused, hook={"ratio": 1.0, "dense_fallback": False})
    worlds(2).run(check_join, initial=initial, unused=unused, hook={"ratio": 1.0})


def test_a_joined_rank_sends_what_it_had_kept(worlds):
    """H21: six steps at ratio 0.3 drain the residual of the rank without data; the other one still has its own."""
    without_data, with_data = worlds(2).run(
        check_join, initial=True, unused=False, hook={"compressor": "topk", "ratio": 0.3}
    )
    assert without_data < 1e-6 < with_data


def check_sparse_embedding(rank, world_size):
    """The table's gradient stays sparse and is averaged as it is, also where a rank did not look anything up."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 16, sparse=True)
            self.head = nn.Linear(16, 30)

        def forward(self, tokens):
            return self.head(self.table(tokens).sum(0))

    model = Model()
    plain, hooked = (wrap(copy.deepcopy(model)) for _ in range(2))
    state = attach(hooked, ratio=0.1)
    for step in range(4):
        tokens = torch.tensor([1, 5 + rank, 5 + rank, 900 + step])
        tokens = tokens[:0] if step == 2 and rank == 1 else tokens
        found = []
        for ddp_model in (plain, hooked):
            ddp_model.zero_grad()
            ddp_model(tokens).square().sum().backward()
            found.append(ddp_model.module.table.weight.grad)
        assert found[1].is_sparse
        torch.testing.assert_close(found[1].to_dense(), found[0].to_dense())
    assert set(residuals(state)) == {"head.weight", "head.bias"}


def test_sparse_embeddings(worlds):
    """H26: sparse buckets crashed code that flattens them. Fails without the look at ``is_sparse``."""
    worlds(2).run(check_sparse_embedding)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24).double()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).double())


def check_static_graph(rank, world_size, accumulate, mixed=False):
    model = TwoDtypes() if mixed else Branches()
    ddp_model = wrap(model, static_graph=True, many_buckets=True)
    state = attach(ddp_model, "topk", 0.1)
    true, applied = {}, {}
    for step in range(8):
        last = not accumulate or step % 4 == 3
        for name, mean in mean_over_ranks(local_gradients(model, batch(rank, step))).items():
            true[name] = true.get(name, 0) + mean
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            loss_of(ddp_model, batch(rank, step)).backward()
        if last:
            assert_equal_on_all_ranks(gradients(ddp_model))
            for name, gradient in gradients(ddp_model).items():
                applied[name] = applied.get(name, 0) + gradient.double()
            ddp_model.zero_grad()
    assert state.step == (2 if accumulate else 8)
    assert_conserved(true, applied, mean_over_ranks(residuals(state)))


@pytest.mark.parametrize("mixed", [False, True])
def test_static_graph(worlds, mixed):
    """H27, H14: conserved from the first, delayed, exchange on, in which DDP calls no bucket the last.

    Found at random, with buckets of several dtypes. Fails when a step ends with the last bucket only.
    """
    worlds(2).run(check_static_graph, accumulate=False, mixed=mixed)


def check_static_graph_no_sync(rank, world_size):
    try:
        check_static_graph(rank, world_size, accumulate=True)
    except RuntimeError as error:  # DDP's own refusal; anything else is ours
        return str(error)
    return "works"


def test_static_graph_with_no_sync_is_never_silent(worlds):
    """H27: DDP itself may refuse to begin a static graph within ``no_sync``; it must not go on without exchanging."""
    for outcome in worlds(2).run(check_static_graph_no_sync):
        assert outcome == "works" or "INTERNAL ASSERT" in outcome or "static" in outcome


def check_thawed(rank, world_size):
    """Frozen when wrapped, thawed later: DDP does not average it, and the hook says so once, by name."""
    model = Branches()
    model.first.requires_grad_(False)
    ddp_model = wrap(model)
    attach(ddp_model, ratio=0.1)
    for step in range(2):
        loss_of(ddp_model, batch(rank, step)).backward()
    model.first.requires_grad_(True)
    model.head.bias.requires_grad_(False)  # as many as before require a gradient, but others
    model.head.bias.requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"does not average .* \['first.bias', 'first.weight'\]. .* wrap the model again"
    ):
        loss_of(ddp_model, batch(rank, 2)).backward()
    loss_of(ddp_model, batch(rank, 3)).backward()  # warnings are errors here: it comes once


def test_thawed_parameters_are_named(worlds):
    """H29: newly trained parameters were not exchanged, replicas drifted. Fails without ``warn_about_unreduced``."""
    worlds(2).run(check_thawed)


def check_frozen_again(rank, world_size):
    """A head frozen for some steps: its gradient stays None, its residual waits to the bit and then goes on."""
    model = Branches()
    ddp_model = wrap(model, find_unused_parameters=True)
    state = attach(ddp_model, ratio=0.05)
    for step in range(3):
        ddp_model.zero_grad()
        loss_of(ddp_model, batch(rank, step)).backward()
    before = residuals(state)
    assert before["head.weight"].any()
    model.head.requires_grad_(False)
    for step in range(3, 6):
        ddp_model.zero_grad()
        loss_of(ddp_model, batch(rank, step)).backward()
        assert model.head.weight.grad is None
        assert torch.equal(residuals(state)["head.weight"], before["head.weight"])
    model.head.requires_grad_(True)
    loss_of(ddp_model, batch(rank, 6)).backward()
    assert not torch.equal(residuals(state)["head.weight"], before["head.weight"])


def test_frozen_for_a_while(worlds):
    """H29: the residual of a frozen layer waits for it."""
    worlds(2).run(check_frozen_again)


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x, use_b):
        x = self.a(torch.tanh(self.trunk(x)))
        return self.b(torch.tanh(x)) if use_b else x


def check_unused(rank, world_size, one_rank_only):
    """A branch nobody uses keeps None and its weights, whatever waits for it; used by one rank, it is a mean over W."""
    model = TwoBranches()
    ddp_model = wrap(model, find_unused_parameters=True)
    state = attach(ddp_model, ratio=0.02)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    kept = torch.empty(0)
    for step in range(10):
        use_b = step < 5 or (one_rank_only and rank == 0)
        if step == 5:  # larger than everything else, so it would be sent at once
            kept = torch.full((24 * 24,), 100.0)
            state.load_state_dict(state.state_dict() | {"residuals": residuals(state) | {"b.weight": kept}})
        optimizer.zero_grad()
        loss_of(lambda x, use_b=use_b: ddp_model(x, use_b), batch(rank, step)).backward()
        if step >= 5 and not one_rank_only:
            assert model.b.weight.grad is None
            assert torch.equal(residuals(state)["b.weight"], kept)
        elif step >= 5:
            assert model.b.weight.grad is not None
            assert (rank == 1) == torch.equal(residuals(state)["b.weight"], kept)
        optimizer.step()
        kept = residuals(state)["b.weight"]
        assert kept.any()
    assert_equal_on_all_ranks(dict(model.named_parameters()))


@pytest.mark.parametrize("one_rank_only", [False, True])
def test_unused_parameters(worlds, one_rank_only):
    """H39: error feedback moved parameters that nobody used. Fails without ``Binding.idle``."""
    worlds(2).run(check_unused, one_rank_only=one_rank_only)


def check_skipped_part(rank, world_size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x, skip):
            return self.a(x) if skip else self.c(self.b(self.a(x)))

    ddp_model = wrap(Model(), many_buckets=True, find_unused_parameters=True)
    attach(ddp_model, ratio=0.1)
    for step in range(3):
        skip = rank == 1 and step == 0
        loss_of(lambda x, skip=skip: ddp_model(x, skip), batch(rank, step)).backward()
        assert_equal_on_all_ranks(gradients(ddp_model))


def test_one_rank_runs_part_of_the_model_only(worlds):
    """H44: ranks had different buckets in their first step and met in different collectives."""
    worlds(2).run(check_skipped_part)


def check_two_models(rank, world_size):
    """A generator and a critic, a penalty under ``no_sync``, foreign collectives in between."""
    generator, critic = wrap(nn.Linear(24, 24)), wrap(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)))
    states = [attach(model, "topk", 0.1) for model in (generator, critic)]
    true, applied = [{}, {}], [{}, {}]
    for step in range(5):
        generator.zero_grad()
        critic.zero_grad()
        x = batch(rank, step)
        with critic.no_sync():
            (critic(x).square().mean() * 0.1).backward()
        (critic(x) - critic.module(generator.module(x).detach())).mean().backward()
        critic.module.requires_grad_(False)
        critic.module(generator(x)).square().mean().backward()
        critic.module.requires_grad_(True)
        dist.all_reduce(torch.ones(3))
        g, c = copy.deepcopy(generator.module), copy.deepcopy(critic.module)
        g.zero_grad()
        c.zero_grad()
        (c(x).square().mean() * 0.1 + (c(x) - c(g(x).detach())).mean()).backward()
        c.requires_grad_(False)
        c(g(x)).square().mean().backward()
        for at, (twin, model) in enumerate([(g, generator), (c, critic)]):
            mean = mean_over_ranks({name: parameter.grad for name, parameter in twin.named_parameters()})
            for name, found in gradients(model).items():
                true[at][name] = true[at].get(name, 0) + mean[name]
                applied[at][name] = applied[at].get(name, 0) + found.double()
    for at in range(2):
        assert states[at].step == 5
        assert_conserved(true[at], applied[at], mean_over_ranks(residuals(states[at])), tolerance=1e-5)


def test_two_models_in_one_loop(worlds):
    """H12: state keyed by bucket index mixed two models; counters took every collective for their model's."""
    worlds(2).run(check_two_models)


def check_subgroup(rank, world_size):
    """Ranks 0 and 1 train; rank 2 does not take part, and nothing waits for it."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp_model = DistributedDataParallel(Branches(), process_group=pair)
    state = SIDCoState(ratio=1.0, dense_fallback=False)
    ddp_model.register_comm_hook(state, sidco_hook)
    x = batch(rank, 0)
    mine = local_gradients(ddp_model.module, x)
    loss_of(ddp_model, x).backward()
    for name, gradient in gradients(ddp_model).items():
        dist.all_reduce(mine[name], group=pair)
        torch.testing.assert_close(gradient, mine[name] / 2)


def test_subgroup_means_are_over_the_subgroup(worlds):
    """H33: a set-up that should equal plain data parallelism did not, for a wrong group. Fails on the default group."""
    worlds(3).run(check_subgroup)


def check_group_changes(rank, world_size):
    """DDP can be given another group; the hook follows, and keeps what it remembers."""
    solo = [dist.new_group([0]), dist.new_group([1])]
    ddp_model = wrap(Branches())
    state = attach(ddp_model, ratio=0.1)
    loss_of(ddp_model, batch(rank, 0)).backward()
    ddp_model._update_process_group(solo[rank])
    before = residuals(state)
    ddp_model.zero_grad()
    loss_of(ddp_model, batch(rank, 1)).backward()
    mine = local_gradients(ddp_model.module, batch(rank, 1))
    assert_conserved(
        {name: mine[name] + before[name].view_as(mine[name]) for name in mine}, gradients(ddp_model), residuals(state)
    )


def test_the_group_may_change(worlds):
    """H50: state was not reset when the group changed. Fails without ``Binding.is_stale``."""
    worlds(2).run(check_group_changes)
