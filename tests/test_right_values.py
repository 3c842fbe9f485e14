"""What was plausible and wrong, each with its right value from a plain reference in float64."""

import ast
import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import small_pages
import torch
from networks import NETWORKS
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)
from torch import nn
from torch.testing import assert_close

from uqlab import data, ensembles, extraction, heads, metrics, models, runs, training
from uqlab.analysis import representations
from uqlab.core.modules import classifier_of
from uqlab.study import decide, methods, scores

L, S = nn.Linear, nn.Sequential
ROOT = Path(__file__).parents[1]


class HeadFirst(nn.Module):
    """The classifier is defined before the layer that it reads."""

    def __init__(self):
        super().__init__()
        self.head, self.body = L(8, 3), L(6, 8)

    def forward(self, x):
        return self.head(self.body(x).relu())


class TwoHeads(nn.Module):
    """The logits are a mean of two layers' outputs, as DeiT's with its teacher."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = L(6, 8), L(8, 3), L(8, 3)

    def forward(self, x):
        h = self.body(x).relu()
        return (self.one(h) + self.two(h)) / 2


@pytest.fixture
def x():
    return torch.randn(60, 6)


@pytest.fixture
def y():
    return torch.arange(60) % 3


# The classifier is the layer whose output is the logits --------------------------------


class Beside(HeadFirst):
    """Another layer is called after the classifier."""

    def forward(self, x):
        logits = super().forward(x)
        self.body(x.flip(0))
        return logits


def test_the_classifier_is_found_wherever_it_is_defined(x):
    network = Beside()
    assert_close(representations.penultimate(network, x), network.body(x).relu())
    for drawn in (
        ensembles.laplace(network, x, 2),
        ensembles.lora(network, 2, 2, classifier="head"),  # B starts at zero
    ):
        one = drawn.member(0)
        assert torch.equal(one.body.weight, network.body.weight)
        assert not torch.equal(one.head.weight, network.head.weight)


METHODS = {
    "lora": lambda net, *_: ensembles.lora(net, 2, 2),
    "singular_value": lambda net, *_: ensembles.singular_value(net, 2),
    "batch": lambda net, *_: ensembles.batch(net, 2),
    "packed": lambda net, *_: ensembles.packed(net, 2),
    "masks": lambda net, *_: extraction.masks(net, 2),
    "masksembles": lambda net, *_: ensembles.masksembles(net, 2),
    "laplace": lambda net, x: ensembles.laplace(net, x, 2),
}


@pytest.mark.parametrize("name", ["lora", "singular_value", "batch", "packed", "masks"])
def test_a_method_that_took_another_layer_says_so_at_the_first_call(name, x):
    with pytest.raises(ValueError, match="'head'"):
        METHODS[name](HeadFirst())(x)


def test_a_method_is_not_trained_with_another_layer_for_the_classifier(x, y):
    with pytest.raises(ValueError, match="'head'"):
        methods.train("deep", HeadFirst(), x, y, members=2, epochs=1)


@pytest.mark.parametrize(
    "use",
    [
        METHODS["laplace"],
        lambda net, x: METHODS["lora"](net)(x),
        representations.penultimate,
    ],
)
def test_two_heads_are_no_classifier(use, x):
    with pytest.raises(ValueError, match="no linear layer whose output is the logits"):
        use(TwoHeads(), x)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_classifier_of_every_network_is_found(name):
    one = NETWORKS[name].make()
    found = models.classifier_of(one, NETWORKS[name].inputs(3))
    assert found == models.classifier(one)


# Language models answer from the last token --------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_features_are_those_of_the_token_that_is_classified(name):
    network = NETWORKS[name]
    one, ids = network.make(), network.inputs(5)["input_ids"]  # filled up with 0
    features = representations.penultimate(one, ids)
    assert_close(one.score(features), one(ids).logits, rtol=1e-4, atol=1e-5)


def test_last_layer_laplace_of_tokens_is_that_of_the_token_that_is_classified():
    network = NETWORKS["gpt2"]
    one, ids = network.make(), network.inputs(60)["input_ids"]
    h = one.transformer(ids)[0][torch.arange(60), (ids != 0).sum(1) - 1].detach()
    head = L(h.shape[1], 3, bias=False)
    head.weight = one.score.weight
    drawn = ensembles.laplace(one, ids, 300, prior_variance=1.0)(ids)
    expected = ensembles.laplace(S(nn.Identity(), head), h, 300, prior_variance=1.0)(h)
    assert_close(drawn.std(0), expected.std(0), rtol=1e-3, atol=1e-4)


# One logit ------------------------------------------------------------------------------


def test_one_logit_is_a_sigmoids(x):
    """Its variance, by the Gauss-Newton matrix of logistic regression."""
    network = S(L(6, 8), nn.ReLU(), L(8, 1))
    drawn = ensembles.laplace(network, x, 400, prior_variance=1.0)(x)
    h = torch.cat([network[:2](x), torch.ones(60, 1)], 1).double()
    p = network(x).sigmoid().double()
    covariance = torch.linalg.inv(torch.eye(9) + h.T @ (p * (1 - p) * h))
    spread = (h @ covariance * h).sum(1).mean().sqrt().item()
    found = drawn.double().var(0).mean().sqrt().item()
    assert found == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(
    "name", sorted(n for n, s in scores.SCORES.items() if s.of != "features")
)
def test_no_score_of_one_logit_is_that_of_one_class(name, x):
    """The energy of z alone is -z, not that of [0, z]."""
    network = S(L(6, 8), nn.ReLU(), L(8, 1))
    with pytest.raises(ValueError, match=r"two classes or more|C >= 2"):
        scores.SCORES[name](network, x)


# Runs whose files have changed ----------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "file"),
    [
        ("best.safetensors", "best.safetensors"),
        ("mine.py:make", "mine.py"),
        ("mine:make", "mine.py"),
        ("three", "three/0.pt"),
        ("*.pt", "0.pt"),
    ],
)
def test_a_run_is_stale_when_a_file_that_it_names_has_changed(
    project, computed, named, file
):
    path = project / "notebooks" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    for expected in ("ok", "done before"):
        (outcome,) = runs.sweep("00", {"name": [named]}).outcomes
        assert outcome.status == expected
    path.write_text("2")
    (outcome,) = runs.sweep("00", {"name": [named]}).outcomes
    assert outcome.status == "ok"


# Sets of classes, and alarms --------------------------------------------------------------


@pytest.mark.parametrize("method", ["aps", "raps"])
def test_inputs_asked_one_at_a_time_have_shares_of_their_own(method):
    logits = torch.randn(1, 300, 4)
    labels = torch.distributions.Categorical(logits=logits[0]).sample()
    together = decide.conformal(logits, labels, method=method).sets(logits)
    rule = decide.conformal(logits, labels, method=method)
    alone = [rule.sets(each) for each in logits.split(1, 1)]
    assert torch.equal(torch.cat(alone), together)


def test_the_conformal_threshold_is_the_score_of_its_rank():
    logits, labels = torch.randn(1, 99, 4).double(), torch.arange(99) % 4
    sets = decide.conformal(logits, labels, level=0.55).sets(logits)
    assert sets.gather(1, labels[:, None]).sum() == 55


def test_sets_are_of_the_classes_of_their_thresholds(y):
    found = decide.conformal(torch.randn(2, len(y), 3), y)
    with pytest.raises(RuntimeError, match=r"\(4\).*\(3\)"):
        found.sets(torch.randn(2, 5, 4))


def test_scores_that_can_be_differentiated_are_numbers_like_others(y):
    logits, doubt = torch.randn(2, 60, 3), torch.rand(60)
    asked = decide.abstain(logits, y, doubt.clone().requires_grad_(), risk=0.9)
    assert asked == decide.abstain(logits, y, doubt, risk=0.9)


def code_of(page, *marks):
    """The cell of a page's code that has these marks."""
    sources = small_pages.sources(ROOT / "notebooks" / page, "code")
    (cell,) = [each for each in sources if all(mark in each for mark in marks)]
    return cell


def test_an_alarm_is_silent_on_the_entropies_that_it_keeps():
    lines = code_of("studies/saved_logits.ipynb", "write_text").splitlines()
    (line,) = [each.strip() for each in lines if "usual = " in each]
    doubt = 1e-7 * torch.rand(3000, dtype=torch.float64)  # of a sure model
    names = {"threshold": 1.0, "known": [doubt], "doubt_of": lambda z: z}
    exec(line, names)
    usual = json.loads(json.dumps(names["usual"]))["usual"]
    assert usual == doubt.tolist()
    assert decide.drift(usual, 0).update(doubt[:500]).max() < 20


def test_a_watch_without_its_alarm_is_refused():
    cell = code_of("studies/saved_logits.ipynb", "decide.saved(watch")
    line = cell[cell.index("if watch and") : cell.index("found = ")]
    with pytest.raises(ValueError, match=r"-p alarm FILE"):
        exec(line, {"watch": "new.npz", "alarm": ""})


# Data --------------------------------------------------------------------------------------

MISSING = ["-1", "-100.0", "None", "NA", "#N/A", "?", "\u200b", "NaN", ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"text,label\ng,1\nb,0\nso,{label}\n", "label or split in row 3")
            for label in MISSING
        ),
        ("sentence,label\n\n  ,0\nb,1\n", "no text, .* in row 1"),
        ('sentence,label\n"a\nb",0\nc,\n', "no text, .* in row 2"),
        ("Label,sentence,label\n0,a,1\n1,b,0\n", "no name twice"),
        ("text,label,split\na,0,train\nb,1,test\nc,1,\n", "split in row 3"),
        ("text,label,split\na,0,train\nb,1,train\nc,1,tset\n", "tset"),
    ],
)
def test_a_row_without_text_label_or_split_is_refused(tmp_path, text, message):
    (tmp_path / "mine.csv").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "mine.csv", "train")


@pytest.mark.parametrize("named", ["covid-19", "what?", "2020-01-01", str(2**63)])
def test_labels_that_look_like_missing_ones_are_classes(tmp_path, named):
    rows = [f"t{i},{named if i % 2 else named[:-1] + '8'}" for i in range(20)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    classes = data.load(tmp_path / "mine.csv", "train").classes
    assert set(classes) == {named, named[:-1] + "8"}


def test_numbers_of_classes_stay_apart_in_order_however_they_are_written(tmp_path):
    path = tmp_path / "mine.csv"
    rows = [f"text {i},{i % 12}{'.0' if i % 5 else ''}" for i in range(60)]
    path.write_text("\n".join(["sentence,label", *rows]))
    assert data.load(path).classes == tuple(map(str, range(12)))
    path.write_text("text,label\n" + f"a,{2**53}\nb,{2**53 + 1}\n" * 5)
    assert len(data.load(path, "train").classes) == 2


@pytest.mark.parametrize("y", [[1, 2, 3, 4], [0, 1, 2, 255]])
def test_numbers_that_begin_at_1_or_say_ignore_are_refused(tmp_path, y):
    x, labels = np.zeros((20, 8, 8), np.uint8), np.array(5 * y, np.uint8)
    np.savez(tmp_path / "i.npz", x=x, y=labels)
    with pytest.raises(ValueError, match="class numbers 0, 1"):
        data.load(tmp_path / "i.npz", "train")


# Measures ----------------------------------------------------------------------------------

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_confidences_on_the_edges_of_bins_stay_there(dtype):
    logits = torch.tensor([[[0.8, 0.2], [0.72, 0.28]]]).double().log().to(dtype)
    assert metrics.ece(logits, [0, 1], 5) == pytest.approx(0.26, abs=1e-3)
    assert metrics.classwise_ece(logits, [0, 1], 5) == pytest.approx(0.36, abs=1e-3)


def plain_ece(logits, labels, bins):
    """The calibration error in float64, by NumPy, of what is a millionth above an edge at most."""
    p = np.exp(logits.double().numpy())
    p = (p / p.sum(-1, keepdims=True)).mean(0)
    sure, hit = p.max(1), p.argmax(1) == labels.numpy()
    at = np.ceil((sure - 1e-6) * bins).astype(int)
    gaps = [abs((sure - hit)[at == b].sum()) for b in range(bins + 1)]
    return sum(gaps) / len(sure)


@pytest.mark.parametrize("dtype", TYPES[1:])
@pytest.mark.parametrize("bins", [5, 10, 15])
def test_calibration_of_coarse_numbers_is_that_of_the_same_in_float64(dtype, bins):
    on_edges = torch.arange(1, 40, dtype=torch.float64) / 40
    on_edges = torch.stack([on_edges, 1 - on_edges], 1).log()[None]
    for z in (torch.randn(3, 400, 4), torch.randn(1, 200, 2) / 8, on_edges):
        z = z.to(dtype)
        labels = torch.arange(z.shape[1]) % z.shape[2]
        assert metrics.ece(z, labels, bins) == pytest.approx(
            plain_ece(z, labels, bins), abs=1e-12
        )
        for measure in (metrics.adaptive_ece, metrics.classwise_ece):
            assert measure(z, labels, bins) == measure(z.double(), labels, bins)


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_confidences_count_alike_whatever_their_order(dtype):
    logits = torch.tensor([2.0, 0.0]).expand(1, 40, 2).to(dtype)
    right = torch.tensor([0] * 20 + [1] * 20)
    mixed = torch.tensor([0, 1] * 20)
    expected = abs(torch.tensor(2.0).double().sigmoid().item() - 0.5)
    for labels in (right, mixed):
        found = metrics.adaptive_ece(logits, labels, 4)
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["", "bfloat16", "float16", "one-hot", "two digits"])
def test_probabilities_are_no_logits(kind):
    p = (3 * torch.randn(2, 500, 5)).softmax(-1)
    if kind == "one-hot":
        p[0, 0] = torch.eye(5)[0]
    elif kind == "two digits":
        p = (100 * p).round() / 100
    elif kind:
        p = p.to(getattr(torch, kind))
    for measure in (metrics.ece, metrics.nll):
        with pytest.raises(ValueError, match="must not be probabilities"):
            measure(p, torch.arange(500) % 5)
    if not kind:
        assert metrics.nll(p.log(), torch.arange(500) % 5) > 0


def test_a_network_that_ends_in_a_softmax_is_not_trained(x, y):
    members = ensembles.deep(lambda: S(L(6, 3), nn.Softmax(-1)), 2, 0)
    with pytest.raises(ValueError, match="logits must not be probabilities"):
        training.fit(members, x, y, epochs=1, lr=0.1, progress=False)


P = np.random.default_rng(0).dirichlet([1, 1, 1], 20)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"logits": P}, "must not be probabilities"),
        ({"probabilities": [[1.2, -0.2, 0.0]]}, "at least 0"),
        ({"probabilities": 100 * P}, "divide percentages"),
        # the entropy of one network is not that of an ensemble's mean
        ({"logits": np.log(P)[None] * [[[1]]] * 3, "ood_far": np.log(P)}, None),
        ({"logits": np.stack(3 * [np.log(P)]), "ood_far": np.log(P)}, "members"),
    ],
)
def test_saved_logits_are_logits_of_one_model(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    if message is None:
        assert decide.saved(tmp_path / "a.npz").ood["far"].shape == (1, 20, 3)
        return
    with pytest.raises(ValueError, match=message):
        decide.saved(tmp_path / "a.npz")


def test_saved_half_precision_probabilities_and_both_names_of_other_inputs(tmp_path):
    p = np.array([[0.5, 0.5, 0], [1, 0, 0]], np.float16)
    np.savez(tmp_path / "p.npz", probabilities=p, ood=p, ood_ood=p[:1])
    found = decide.saved(tmp_path / "p.npz")
    assert_close(found.logits[0].softmax(-1), torch.tensor(p).float())
    assert {k: z.shape[1] for k, z in found.ood.items()} == {"ood": 2, "ood_ood": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: scores.SCORES["relative_mahalanobis"].fit(
                S(L(6, 8), nn.ReLU(), L(8, 3)), x, torch.zeros(60).long()
            ),
            "two classes or more",
        ),
        (lambda x: metrics.holm([0.01, 1.2]), "p_values"),
        (lambda x: metrics.holm([-0.1, 0.5]), "p_values"),
        (
            lambda x: heads.head_features(
                NETWORKS["gpt2"].make(), NETWORKS["gpt2"].inputs(3)["input_ids"]
            ),
            "first token sees no other",
        ),
    ],
)
def test_what_has_no_right_value_is_refused(call, message, x):
    with pytest.raises(ValueError, match=message):
        call(x)


def test_an_ensemble_of_inference_mode_cannot_be_trained(x, y):
    with torch.inference_mode():
        ensemble = ensembles.deep(lambda: L(6, 3), 2)
    with pytest.raises(RuntimeError, match=r"under torch\.inference_mode"):
        training.fit(ensemble, x, y, epochs=1, lr=0.1, progress=False)


# The report's advice -----------------------------------------------------------------------

BOUND = metrics.fit_temperature(9 * torch.eye(3)[None], range(3))  # labels set it


def advice(nll, ece, temperature):
    """The lines that the last cell of lesson 16 advises, for NLL and ECE before and after a temperature."""
    names = dict.fromkeys(("near", "reason"), "")
    names |= {"answered": torch.tensor([True]), "several": False, "easy": []}
    names |= {"temperature": temperature, "threshold": 0.1}
    names |= {"holds": {"temperature": nll[1] < nll[0]}}
    names |= {"errors": {"as it is": ece[:1], "scaled": ece[1:]}}
    for line in ast.parse(code_of("16_bring_your_model.ipynb", "LINES = {")).body:
        source = ast.unparse(line)
        if source.startswith(("LINES", "holds", "advice = [")):
            exec(source, names)
    return " ".join(names["advice"])


def saved_advice(nll, ece, temperature):
    """What the study of saved logits says about it."""
    cell = code_of("studies/saved_logits.ipynb", "divide = ")
    lines = [s.strip() for s in cell.splitlines()]
    lines = [s for s in lines if s.startswith(("gains = ", "divide = "))]
    names = {"losses": nll, "error": ece[:1], "calibrated": ece[1]}
    exec("\n".join(lines), names | {"temperature": temperature}, names)
    return names["divide"]


@pytest.mark.parametrize("said", [advice, saved_advice])
def test_a_temperature_is_advised_where_both_losses_gain_and_no_label_sets_it(said):
    better, worse = [0.4, 0.3], [0.4, 0.41]
    assert re.search("Divide .* by 1.30", said(better, [0.02, 0.01], 1.3))
    for unlike in ((worse, better, 1.3), (better, worse, 1.3), (better, better, BOUND)):
        assert "Divide" not in said(*unlike)


# Small numbers, coarse numbers, missing ones ------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_features_are_each_row_s_own_in_any_precision(dtype, classes):
    network = S(L(6, 8), nn.ReLU(), L(8, classes)).to(dtype)
    x = torch.randn(2000, 6, dtype=dtype)
    h = representations.penultimate(network, x)
    assert_close(h.to(dtype), network[:2](x))


class Pooled(nn.Module):
    """Attention over tokens by a layer as wide as the classifier."""

    def __init__(self, classes):
        super().__init__()
        self.body = L(6, 8)
        self.attention, self.score = L(8, classes), L(8, classes)

    def forward(self, x):
        h = self.body(x).relu()
        share = self.attention(h).mean(-1, keepdim=True).softmax(1)
        return self.score((share * h).sum(1))


@pytest.mark.parametrize("classes", [2, 4])
def test_another_layer_of_the_same_width_is_not_the_classifier(classes):
    network = Pooled(classes).bfloat16()
    assert classifier_of(network, torch.randn(40, 512, 6)) == "score"


class TwoNames(nn.Module):
    """The classifier, and a layer of the body, have a second name each."""

    def __init__(self):
        super().__init__()
        self.body, self.head = L(6, 8), L(8, 3)
        self.again, self.dup = self.body, self.head

    def forward(self, x):
        return self.dup(self.again(x).relu())


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"packed"}))
def test_a_layer_with_two_names_is_one_layer(name, x):
    ensemble = METHODS[name](TwoNames(), x).eval()
    found = ensemble(x).detach()
    apart = torch.stack([ensemble.member(m).eval()(x).detach() for m in range(2)])
    assert_close(found, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-4)


def test_targets_may_be_a_list_of_names_as_in_peft(x):
    """Which end so: "1" is no "11"."""
    network = S(*[layer for _ in range(6) for layer in (L(6, 6), nn.ReLU())], L(6, 3))
    assert [*ensembles.lora(network, 2, 1, target=["10", "0"]).seen] == [
        "0.weight",
        "10.weight",
        "12.weight",
        "12.bias",
    ]
    features = representations.layer_features(network, x, ["2", "12"])
    assert [*features] == ["2", "12"]
    with pytest.raises(ValueError, match="no regular expression"):
        ensembles.lora(network, 2, 1, target="*")
    with pytest.raises(ValueError, match="matches no"):
        ensembles.lora(network, 2, 1, target=["99"])


# Data stay as they are -------------------------------------------------------------------------


class Shifted(nn.Module):
    """Some networks change what they are given; written without that, they compute the same."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.sub_(1.0) if self.in_place else x - 1.0


def fitted(network, x, y):
    ensemble = ensembles.from_members([network])
    training.fit(ensemble, x, y, epochs=1, lr=0.1, progress=False)
    return training.predict(ensemble, x)


PASSES = {
    "fit": fitted,
    "predict": lambda network, x, y: training.predict(network, x),
    "features": lambda network, x, y: representations.penultimate(network, x),
    "laplace": lambda network, x, y: ensembles.laplace(network, x, 2)(x),
    "knn": lambda network, x, y: scores.SCORES["knn"].fit(network, x, y)(network, x),
    "exgrad": lambda network, x, y: scores.SCORES["exgrad"].fit(network, x, y)(
        network, x
    ),
}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_a_network_that_changes_its_inputs_leaves_the_data(passes, x, y):
    layers, found = S(L(6, 8), nn.ReLU(), L(8, 3)), []
    for in_place in (True, False):
        given, network = x.clone(), S(Shifted(in_place), *copy.deepcopy(layers))
        torch.manual_seed(0)
        found.append(torch.as_tensor(passes(network, given, y)))
        assert torch.equal(given, x)
    assert_close(*found)


# Trainings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_of_half_precision_is_that_of_torch(dtype, x, y):
    theirs = S(L(6, 16), nn.ReLU(), L(16, 3)).to(dtype)
    before = theirs[0].weight.detach().clone()
    ours = ensembles.from_members([copy.deepcopy(theirs)])
    how = {"epochs": 1, "lr": 0.5, "progress": False}
    training.fit(ours, x, y, **how)
    nn.functional.cross_entropy(theirs(x.to(dtype)).float(), y).backward()
    torch.optim.SGD(theirs.parameters(), 0.5).step()
    assert (theirs[0].weight - before).abs().max() > 0.01
    assert_close(ours.member(0)[0].weight, theirs[0].weight, rtol=0.02, atol=0.002)


def test_dropout_of_everything_trains_what_is_behind_it(x, y):
    ours = ensembles.deep(lambda: S(L(6, 8), nn.ReLU(), nn.Dropout(1.0), L(8, 3)), 2)
    before = ours.member(0)
    training.fit(ours, x, y, epochs=1, lr=0.5, progress=False)
    assert torch.equal(ours.member(0)[0].weight, before[0].weight)
    share = before[3].bias.softmax(0) - y.bincount() / 60
    assert_close(ours.member(0)[3].bias, before[3].bias - 0.5 * share)


def test_batch_norm_without_running_statistics_is_trained(x, y):
    norm = lambda: nn.BatchNorm1d(8, track_running_stats=False)  # noqa: E731
    ours = ensembles.deep(lambda: S(L(6, 8), norm(), nn.ReLU(), L(8, 3)), 2)
    theirs = ours.member(0).train()
    training.fit(ours, x, y, epochs=1, lr=0.5, progress=False)
    nn.functional.cross_entropy(theirs(x), y).backward()
    assert_close(ours.member(0)[3].bias, theirs[3].bias - 0.5 * theirs[3].bias.grad)
