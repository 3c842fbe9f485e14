"""The engine: members by vmap and in turn are separate plain networks, whatever a network does."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from same import near, unchanged
from torch import nn
from torch.utils.checkpoint import checkpoint

from uqlab import ensembles, training
from uqlab.core import modules

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
WAYS = pytest.mark.parametrize("mode", ["auto", "vmap", "loop"])


def perceptron(*between):
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 3))


def lora(network, members=3, **settings):
    return ensembles.lora(network, members, 2, std=0.5, **settings)


def alone(ensemble, x=X):
    members = map(ensemble.member, range(ensemble.members))
    return torch.stack([member.train(ensemble.training)(x) for member in members])


class Refused(nn.Module):
    """What vmap refuses: a number of the data decides in Python."""

    def forward(self, x):
        return x if x.sum() > 1e9 else 2 * x


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = perceptron(nn.Tanh())

    def forward(self, x):
        x -= 0.5
        return self.layers(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layers, self.reentrant = perceptron(nn.Tanh()), reentrant

    def forward(self, x):
        x = x if x.requires_grad else x + 0 * self.layers[0].bias.sum()
        h = checkpoint(self.layers[:2], x, use_reentrant=self.reentrant)
        return self.layers[2](h)


class Noisy(nn.Module):
    """Noise of functions, of channels and inside attention; no module of dropout says all of it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        h = F.dropout(self.first(x), 0.3, self.training)
        h = F.dropout2d(h.view(-1, 8, 1, 1), 0.3, self.training).view(-1, 1, 8)
        h = h.expand(-1, 3, -1)
        return self.last(self.attention(h, h, h)[0].mean(1))


class Attribute(nn.Module):
    """A tensor that is a plain attribute, which members must not share."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), torch.rand(4)

    def forward(self, x):
        return self.layer(x * self.scale)


class NormByHand(nn.Module):
    """Batch norm as it is taught: its buffers are set anew, or changed in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if not self.training:
            return x - self.mean
        if self.in_place:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - x.mean(0)


# Ways to run ----------------------------------------------------------------------------------------------------------
@WAYS
def test_every_way_is_the_separate_members(mode):
    for ensemble in (
        lora(perceptron(nn.ReLU())),
        ensembles.deep(lambda: perceptron(nn.BatchNorm1d(8)), 3).eval(),
    ):
        ensemble.mode = mode
        near(ensemble(X), alone(ensemble))
        each = torch.stack([X, X + 1, X + 2])
        found = ensemble.forward_each(each)
        near(found[1], ensemble.member(1).eval()(each[1]))
        ensemble.chunk_size = 2
        near(ensemble(X), alone(ensemble))


def test_what_vmap_refuses_runs_in_turn_and_says_why():
    ensemble = lora(perceptron(Refused()))
    near(ensemble(X), alone(ensemble))
    assert "loop: vmap" in repr(ensemble)
    again = lora(perceptron(nn.ReLU()))
    near(again(X), alone(again))
    assert not again.refused


@pytest.mark.parametrize("error", [RuntimeError, ValueError, torch.OutOfMemoryError])
def test_other_errors_are_not_taken_for_a_refusal(error):
    class Wrong(nn.Module):
        def forward(self, x):
            raise error("of the user's own")

    ensemble = lora(perceptron(nn.ReLU()))
    ensemble.network[1] = Wrong()
    with pytest.raises(error, match="of the user's own"):
        ensemble(X)
    assert not ensemble.refused


@WAYS
@pytest.mark.parametrize("between", [nn.Identity, Refused])
def test_batch_statistics_move_once(mode, between):
    ensemble = ensembles.deep(lambda: perceptron(nn.BatchNorm1d(8), between()), 3)
    if mode == "vmap" and between is Refused:
        pytest.skip("refused")
    ensemble.mode = mode
    plain = [ensemble.member(m).train() for m in range(3)]
    near(ensemble.train()(X), torch.stack([network(X) for network in plain]))
    for m, network in enumerate(plain):
        assert ensemble.member(m)[1].num_batches_tracked == 1
        near(ensemble.member(m)[1].running_var, network[1].running_var)


@WAYS
@pytest.mark.parametrize("in_place", [True, False])
def test_statistics_by_hand_are_each_member_s_own(mode, in_place):
    ensemble = ensembles.deep(lambda: perceptron(NormByHand(in_place)), 3)
    ensemble.mode = mode
    plain = [ensemble.member(m).requires_grad_() for m in range(3)]
    settings = {"epochs": 4, "lr": 0.5, "progress": False}
    training.fit(ensemble, X, Y, **settings)
    for network in plain:
        training.fit(ensembles.from_members([network]), X, Y, **settings)
    near(ensemble(X), torch.stack([network.eval()(X) for network in plain]))


@pytest.mark.parametrize("in_place", [True, False])
def test_statistics_by_hand_that_members_share_follow_all_in_turn(in_place):
    ensemble = lora(perceptron(NormByHand(in_place)))
    given = [ensemble.member(m)[0](X).mean(0) for m in range(3)]
    ensemble.train()(X)
    expected = torch.zeros(8)
    for mean in given:
        expected = 0.9 * expected + 0.1 * mean
    near(ensemble.network[1].mean, expected)
    near(ensemble.eval()(X), alone(ensemble))


def test_no_rows_are_no_answers():
    assert lora(perceptron(nn.ReLU()))(X[:0]).shape == (3, 0, 3)


@WAYS
def test_a_network_that_changes_its_input_changes_no_one_s(mode):
    ensemble, x = lora(InPlace()), X.clone()
    ensemble.mode = mode
    found = ensemble(x)
    assert torch.equal(x, X)
    near(found, torch.stack([ensemble.member(m)(X.clone()) for m in range(3)]))


@WAYS
@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_the_network_are_refused(mode, reentrant):
    ensemble = lora(Checkpointed(reentrant)).train()
    ensemble.mode = mode
    said = "checkpointing|autograd.Function" if mode == "vmap" else "checkpointing"
    with pytest.raises(RuntimeError, match=said):
        ensemble(X)
    if not reentrant:
        with torch.no_grad():
            near(ensemble(X), alone(ensemble))
    # Elsewhere it goes on as it was.
    plain = Checkpointed(reentrant)
    plain(X).sum().backward()
    assert plain.layers[0].weight.grad.any()


def test_separate_networks_may_checkpoint():
    networks = [Checkpointed(), Checkpointed()]
    ensemble = ensembles.from_members(networks)
    training.member_mean(ensemble(X), Y).backward()
    found = [p.grad.clone() for p in networks[1].parameters()]
    networks[1].zero_grad()
    F.cross_entropy(networks[1](X), Y).backward()
    near(found, [p.grad for p in networks[1].parameters()])


def test_passes_in_threads_leave_torch_as_it_was():
    before = torch.backends.mha.get_fastpath_enabled()
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(30)
            return x

    class Later(nn.Module):
        def forward(self, x):
            if not go_on.is_set():
                go_on.set()
                thread.join(30)
            return x

    slow, fast = lora(perceptron(nn.ReLU())), lora(perceptron(nn.ReLU()))
    slow.network[1], fast.network[1] = Waits(), Later()
    slow.mode = fast.mode = "vmap"
    thread = threading.Thread(target=lambda: slow(X))
    thread.start()
    assert inside.wait(30)
    fast(X)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert torch.backends.cuda.flash_sdp_enabled()


# What members hold ----------------------------------------------------------------------------------------------------
def test_tensors_as_plain_attributes_belong_to_each_network():
    ensemble = ensembles.deep(Attribute, 3)
    scales = [ensemble.member(m).scale for m in range(3)]
    assert not torch.equal(scales[0], scales[1])
    near(ensemble(X), alone(ensemble))


@pytest.mark.parametrize("between", [nn.ReLU, lambda: nn.BatchNorm1d(8)])
def test_everything_goes_where_the_ensemble_goes(between):
    for make in (lora, ensembles.singular_value, ensembles.batch, ensembles.deep):
        network = perceptron(between())
        given = (lambda: perceptron(between())) if make is ensembles.deep else network
        ensemble = make(given, 3).eval()
        expected = ensemble(X)
        ensemble.double()
        tensors = [*ensemble.parameters(), *ensemble.buffers()]
        assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float64}
        found = ensemble(X.double())
        assert found.dtype == torch.float64
        near(found.float(), expected)


def test_a_small_update_is_not_lost_in_half_precision():
    """Of .2 % of W: in bfloat16 a sum would keep less than half of it."""
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).to(torch.bfloat16)
    ensemble = ensembles.lora(network, 2, 4, std=0.02, target="^0$")
    full = ensembles.lora(copy.deepcopy(network).float(), 2, 4, std=0.02, target="^0$")
    x = torch.randn(500, 64).to(torch.bfloat16)
    seen = []
    for each, given in ((ensemble, x), (full, x.float())):
        found = []
        layer = each.network[0]
        hook = each.network[1].register_forward_pre_hook(
            lambda _, args, found=found: found.append(args[0].float())
        )
        each.mode = "loop"
        each(given)
        hook.remove()
        seen.append(torch.stack(found[-2:]) - layer(given).float())
    added, expected = seen
    product = F.linear(x, ensemble.network[0].weight, ensemble.network[0].bias)
    rounding = product.float().abs().mean() * 2**-8
    assert (added - expected).abs().mean() < rounding


def test_names_of_modules_may_hold_anything():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("in:1", nn.Linear(4, 8))
            self.add_module("a/b", nn.Linear(8, 8))
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            first, second = self._modules["in:1"], self._modules["a/b"]
            return self.out(second(first(x).relu()).relu())

    for ensemble in (lora(Named()), ensembles.deep(Named, 3)):
        near(ensemble(X), alone(ensemble))


@WAYS
def test_autocast_computes_the_same_in_every_way(mode):
    for network in (
        perceptron(nn.ReLU()),
        nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)),
            nn.Conv2d(1, 4, 2),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
    ):
        ensemble = lora(network)
        ensemble.mode = mode
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = ensemble(X).float()
        near(found, alone(ensemble), rtol=0.03, atol=0.03 * found.abs().max().item())


# Networks of all kinds ------------------------------------------------------------------------------------------------
class Several(nn.Module):
    """Two inputs, one of them a mask with a batch axis; the logits are one of two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, mask, scale=1.0):
        h = (self.first(x).relu() * mask[..., None]).sum(1) * scale
        return {"hidden": h, "logits": self.last(h)}


@WAYS
def test_several_inputs_and_outputs(mode):
    x, mask = torch.randn(5, 7, 4), (torch.rand(5, 7) > 0.4).float()
    for ensemble in (lora(Several()), ensembles.deep(Several, 3)):
        ensemble.mode = mode
        found = ensemble(x, mask, scale=2.0)
        for m in range(3):
            near(found[m], ensemble.member(m)(x, mask, 2.0)["logits"])
        near(ensemble({"x": x, "mask": mask, "scale": 2.0}), found)
        masks = torch.stack([mask, 1 - mask, mask * 0.5])
        each = ensemble.forward_each(x.expand(3, *x.shape), masks)
        near(each[1], ensemble.member(1)(x, masks[1])["logits"])


class Tied(nn.Module):
    """One layer used twice, by two names, and a weight that is also another's."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.back = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.again, self.back.weight = self.mix, self.mix.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        h = self.mix(self.first(x)).relu()
        return self.last(self.back(self.again(h)))


class TiedClassifier(nn.Module):
    """Its classifier's weight is an earlier layer's too, as language models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.last.weight = self.mix.weight

    def forward(self, x):
        return self.last(self.mix(self.first(x).relu()).relu())


class Counting(nn.Module):
    """A buffer that every call changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        z = self.layer(x)
        self.mean += z.detach().mean(0)
        return z - self.mean


@WAYS
def test_what_is_tied_and_what_moves(mode):
    for ensemble in (
        lora(Tied()),
        lora(TiedClassifier()),
        lora(TiedClassifier(), classifiers="shared"),
        ensembles.singular_value(Tied(), 3),
        ensembles.batch(Tied(), 3),
        ensembles.deep(Tied, 3),
    ):
        ensemble.mode = mode
        near(ensemble(X), alone(ensemble))
    counting = ensembles.deep(Counting, 3)
    counting.mode = mode
    plain = [counting.member(m) for m in range(3)]
    for _ in range(2):
        near(counting(X), torch.stack([network(X) for network in plain]))
    near(counting.member(2).mean, plain[2].mean)


@pytest.mark.parametrize(
    "wrap", [lambda n: torch.compile(n, backend="eager"), nn.DataParallel]
)
def test_wrapped_networks_are_the_ones_inside(wrap):
    network = perceptron(nn.ReLU())
    near(lora(wrap(network))(X), lora(network)(X))
    deep = ensembles.deep(lambda: wrap(perceptron(nn.ReLU())), 3)
    near(deep(X), ensembles.deep(lambda: perceptron(nn.ReLU()), 3)(X))
    near(ensembles.laplace(wrap(network), X, 3)(X), ensembles.laplace(network, X, 3)(X))


@pytest.mark.slow
@pytest.mark.parametrize("make", [lora, lambda network: ensembles.dropout(network, 3)])
def test_an_ensemble_may_be_compiled_before_its_first_call(make, unchecked):
    ensemble = make(perceptron(nn.ReLU()))
    compiled = torch.compile(ensemble, backend="eager")
    with torch.no_grad():
        near(compiled(X), alone(ensemble))
    near(training.predict(compiled, X), ensemble(X))


# Training -------------------------------------------------------------------------------------------------------------
FACTORIES = {
    "lora": lora,
    "shared classifier": lambda network, n=3: lora(network, n, classifiers="shared"),
    "trained backbone": lambda network, n=3: ensembles.batch(network, n, std=0.5),
    "deep": lambda network, n=3: ensembles.deep(lambda: copy.deepcopy(network), n),
    "mimo": lambda network, n=3: ensembles.mimo(network, n, repeats=1, rho=1.0),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_a_plain_loop_and_fit_train_alike(make):
    network = perceptron(nn.Tanh())
    loop, fitted = make(network), make(network)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        training.member_mean(loop.train()(X), Y).backward()
        optimizer.step()
    with unchanged(network):
        training.fit(fitted, X, Y, epochs=3, lr=0.1, batch_size=6, progress=False)
    near(loop.eval()(X), fitted(X))


@WAYS
def test_gradients_are_those_of_separate_members(mode):
    """A member's own follow its own loss; what all share follows the mean."""
    ensemble = FACTORIES["trained backbone"](perceptron(nn.Tanh()))
    ensemble.mode = mode
    training.member_mean(ensemble(X), Y).backward()
    shared = ensemble.network[0].weight
    expected = 0
    for m in range(3):
        member = ensemble.member(m)
        F.cross_entropy(member(X), Y).backward()
        kind = ensemble.seen["0.weight"].kind
        scales = torch.outer(kind.r[m], kind.s[m])
        expected = expected + member[0].weight.grad * scales / 3
        near(ensemble.seen["2.weight"].kind.value.grad[m], member[2].weight.grad)
    near(shared.grad, expected)


@pytest.mark.parametrize(
    "make", [lambda n: lora(n, 4), lambda n: FACTORIES["deep"](n, 4)]
)
def test_noise_follows_from_the_seed(make, monkeypatch, tmp_path):
    """Whatever draws it, on any number of threads, and after an interruption."""
    monkeypatch.setattr(modules, "ONE_THREAD", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        network, found = Noisy(), []
        settings = {"lr": 0.1, "batch_size": 3, "progress": False, "seed": 3}
        for seed in (1, 2):
            torch.manual_seed(seed)
            ensemble = make(network)
            training.fit(ensemble, X, Y, epochs=4, **settings)
            found.append(ensemble(X).detach())
        assert torch.equal(*found)
        for epochs in (2, 4):
            torch.manual_seed(epochs)
            ensemble = make(network)
            path = tmp_path / "run"
            training.fit(ensemble, X, Y, epochs=epochs, resume=path, **settings)
        assert torch.equal(ensemble(X), found[0])
    finally:
        torch.set_num_threads(threads)


@WAYS
def test_members_never_drop_the_same_units(mode):
    network = nn.Sequential(nn.Linear(4, 200), nn.Dropout(0.5), nn.Linear(200, 3))
    ensemble = lora(network, 4, target="^2$|^0$").train()
    with torch.no_grad():  # members that differ in nothing else
        for p in ensemble.parameters():
            p.zero_()
        ensemble.network[0].bias.fill_(1)
        for part in ensemble.seen.values():
            if hasattr(part.kind, "value") and part.kind.value.ndim == 3:
                part.kind.value.copy_(torch.randn(3, 200).expand(4, 3, 200))
    ensemble.mode = mode
    logits = ensemble(X)
    rows = logits.flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)


def test_deep_ensembles_are_built_in_two_threads():
    whole = ensembles.deep(lambda: perceptron(nn.ReLU()), 8, seed=2)(X)
    found = {}

    def build(low):
        ids = range(low, low + 4)
        made = [
            ensembles.deep(lambda: perceptron(nn.ReLU()), ids, seed=2)
            for _ in range(10)
        ]
        found[low] = [each(X) for each in made]

    threads = [threading.Thread(target=build, args=(low,)) for low in (0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for low, each in found.items():
        for logits in each:
            near(logits, whole[low : low + 4])


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize(
    "make",
    [
        lora,
        lambda net: ensembles.singular_value(net, 3, init_std=0.3),
        lambda net: ensembles.batch(net, 3, std=0.5),
    ],
)
def test_products_without_the_weight_are_those_with_it(make, rows):
    """Of one row, and of more than a weight has; in the members it is built."""
    ensemble, x = make(perceptron(nn.Tanh())).eval(), torch.randn(rows, 4)
    near(ensemble(x), alone(ensemble, x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(3, 1)

    def forward(self, w):
        return w + self.shift


def test_a_plain_tensor_in_what_members_see_is_refused():
    with pytest.raises(ValueError, match="'shift'"):
        ensembles.Ensemble(nn.Linear(4, 3), 2, {"weight": [Plain(), Plain()]})


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("not of vmap")


def test_a_call_that_fails_moves_no_statistics():
    """The first call tries a pass before the one that counts."""
    ensemble = ensembles.deep(lambda: perceptron(nn.BatchNorm1d(8), Fails()), 2).train()
    before = [t.clone() for t in ensemble.buffers()]
    with pytest.raises(RuntimeError, match="not of vmap"):
        ensemble(X)
    for t, value in zip(ensemble.buffers(), before, strict=True):
        assert torch.equal(t, value)
